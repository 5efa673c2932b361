"""Statistical errors of observables, by blocks of the trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.observables.averages import Observable, weighted_mean


def block_standard_error(quantity: str, blocks: int = 8) -> Observable:
    """Standard error of the average of the named quantity, from averages over consecutive blocks of the trajectory.

    Blocks longer than the correlation time are independent; with equal weights this is the usual block-averaged error
    (Flyvbjerg and Petersen, J. Chem. Phys. 91, 461 (1989)). Snapshots that fill no whole block are left out.

    Parameters
    ----------
    quantity
        Its name.
    blocks
        Number of blocks, at least 2.
    """

    def error(trajectories: Mapping[str, jax.Array], weights: jax.Array, **_: Any) -> jax.Array:
        length = weights.shape[0] // blocks
        values = trajectories[quantity][: blocks * length]
        w = weights[: blocks * length].reshape(blocks, length)
        shaped = values.reshape(blocks, length, *values.shape[1:])
        share = jnp.sum(w, axis=1) / jnp.sum(w)
        means = jax.vmap(weighted_mean)(shaped, w / jnp.sum(w, axis=1, keepdims=True))
        spread = means - jnp.tensordot(share, means, axes=1)
        return jnp.sqrt(jnp.tensordot(share, spread**2, axes=1) / (blocks - 1))

    return error


def block_jackknife_error(observable: Observable, blocks: int = 8) -> Observable:
    """Standard error of any observable, by leaving out one block of consecutive snapshots after the other.

    For observables that are no plain averages, such as fluctuations. Blocks longer than the correlation time are
    independent. Source: Efron, SIAM CBMS-NSF 38 (1982), ch. 3. Snapshots that fill no whole block are left out.

    Parameters
    ----------
    observable
        What the error is of; it must depend on snapshots only through weighted averages, not on their order.
    blocks
        Number of blocks, at least 2.

    Returns
    -------
    An observable of the same shape.
    """
    if blocks < 2:
        raise ArgumentError(f"blocks is {blocks}; an error needs at least 2")

    def error(trajectories: Mapping[str, Any], weights: jax.Array, **kwargs: Any) -> jax.Array:
        length = weights.shape[0] // blocks
        if length == 0:
            raise ArgumentError(f"{weights.shape[0]} snapshots do not fill {blocks} blocks; take fewer blocks")
        block = jnp.arange(weights.shape[0]) // length
        used = jnp.where(block < blocks, weights, 0.0)

        def without(index: jax.Array) -> jax.Array:
            rest = jnp.where(block == index, 0.0, used)
            return observable(trajectories, rest / jnp.sum(rest), **kwargs)

        left = jax.lax.map(without, jnp.arange(blocks))
        spread = left - jnp.mean(left, axis=0)
        return jnp.sqrt((blocks - 1) / blocks * jnp.sum(spread**2, axis=0))

    return error
