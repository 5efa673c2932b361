"""Checks of the trainer's arguments that need no rank but this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.timings import Timings


def raw_key(key: jax.Array) -> jax.Array:
    """The seed as the raw words that jax-md's simulators carry.

    Raises
    ------
    ArgumentError
        For another generator than threefry.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    implementation = str(jax.random.key_impl(key))
    if "fry" not in implementation:
        raise ArgumentError(f"the key is of kind {implementation}; jax-md's simulators need a threefry key")
    return jax.random.key_data(key)


def check_state_kwargs(state_kwargs: Mapping[str, Any]) -> None:
    """Refuse state keywords without a temperature."""
    if "kT" not in state_kwargs:
        raise ArgumentError("state_kwargs has no 'kT'; every state point needs its thermal energy")


def check_other_state(state_kwargs: Mapping[str, Any]) -> None:
    """Refuse state keywords to which stored snapshots cannot be reweighted."""
    wrong = [name for name in state_kwargs if name not in ("kT", "pressure")]
    if wrong:
        raise ArgumentError(
            f"predictions at another {', '.join(wrong)} would need other snapshots; state_kwargs may have 'kT' and "
            "'pressure', the weights account for these"
        )


def check_numbers(
    reweight_ratio: float,
    allowed_reduction: float | None,
    max_neighbor_retries: int,
    vmap_batch: int,
    num_chains: int,
) -> None:
    """Refuse numbers outside their range, naming it."""
    if not 0.0 <= reweight_ratio <= 1.0:
        raise ArgumentError(f"reweight_ratio is {reweight_ratio}; it is a fraction of the snapshots, 0 to 1")
    if allowed_reduction is not None and not 0.0 < allowed_reduction < 1.0:
        raise ArgumentError(f"allowed_reduction is {allowed_reduction}; it is a fraction of the snapshots, 0 to 1")
    if allowed_reduction is not None and allowed_reduction > reweight_ratio:
        raise ArgumentError(
            f"allowed_reduction {allowed_reduction} is above reweight_ratio {reweight_ratio}: a trajectory that may "
            "still be used again would allow no update at all; lower allowed_reduction to reweight_ratio or below"
        )
    if max_neighbor_retries < 0:
        raise ArgumentError(f"max_neighbor_retries is {max_neighbor_retries}; it cannot be negative")
    if vmap_batch < 1:
        raise ArgumentError(f"vmap_batch is {vmap_batch}; it must be at least 1")
    if num_chains < 1:
        raise ArgumentError(f"num_chains is {num_chains}; every state point needs at least 1")


def timings_array(timings: Timings) -> np.ndarray:
    """The timings as numbers, to compare them between ranks."""
    return np.array([timings.time_step, timings.equilibration_steps, timings.steps_per_snapshot, timings.snapshots])
