"""Averages of one quantity and simple ratios of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Observable = Callable[..., jax.Array]
"""``observable(quantity_trajectories, weights, **state_kwargs)`` of one state point."""


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
