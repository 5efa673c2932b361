"""Ensemble observables: ``observable(quantity_trajectories, weights, **state_kwargs)`` of one state point.

``quantity_trajectories[name]`` has a leading axis of ``T`` snapshots, ``weights`` ``(T,)`` sum to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Observable = Callable[..., jax.Array]


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """``Σ w_i a_i`` over the leading axis."""
    return jnp.tensordot(weights, values, axes=1)


def average(quantity: str) -> Observable:
    """Ensemble average of the named quantity."""

    def mean(trajectories: Mapping[str, jax.Array], weights: jax.Array, **_: Any) -> jax.Array:
        return weighted_mean(trajectories[quantity], weights)

    return mean


def reduced_pressure(pressure: str, density: str) -> Observable:
    """Compressibility factor ``P / (ρ kT)``: a pressure in the unit in which a liquid's is of order one."""

    def factor(trajectories: Mapping[str, jax.Array], weights: jax.Array, *, kT: jax.Array, **_: Any) -> jax.Array:
        mean = weighted_mean(trajectories[pressure], weights)
        return mean / (weighted_mean(trajectories[density], weights) * kT)

    return factor


def reduced_energy(energy: str) -> Observable:
    """Mean energy over ``kT``."""

    def ratio(trajectories: Mapping[str, jax.Array], weights: jax.Array, *, kT: jax.Array, **_: Any) -> jax.Array:
        return weighted_mean(trajectories[energy], weights) / kT

    return ratio


def fluctuation(quantity: str) -> Observable:
    """Variance ``⟨a²⟩ − ⟨a⟩²`` of the named quantity, computed around its mean."""

    def variance(trajectories: Mapping[str, jax.Array], weights: jax.Array, **_: Any) -> jax.Array:
        values = trajectories[quantity]
        return weighted_mean((values - weighted_mean(values, weights)) ** 2, weights)

    return variance


def heat_capacity(energy: str, particles: int, *, ideal: float = 1.5) -> Observable:
    """Isochoric heat capacity a particle over ``k_B``: ``var(U) / (N kT²) + ideal``, NVT.

    Parameters
    ----------
    energy
        Name of the total potential energy.
    particles
        ``N``.
    ideal
        Kinetic share, 3/2 for atoms.
    """
    variance = fluctuation(energy)

    def capacity(trajectories: Mapping[str, jax.Array], weights: jax.Array, *, kT: jax.Array, **_: Any) -> jax.Array:
        return variance(trajectories, weights) / (particles * kT**2) + ideal

    return capacity


def compressibility(volume: str) -> Observable:
    """Isothermal compressibility ``var(V) / (⟨V⟩ kT)``, NPT."""
    variance = fluctuation(volume)

    def kappa(trajectories: Mapping[str, jax.Array], weights: jax.Array, *, kT: jax.Array, **_: Any) -> jax.Array:
        return variance(trajectories, weights) / (weighted_mean(trajectories[volume], weights) * kT)

    return kappa


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
