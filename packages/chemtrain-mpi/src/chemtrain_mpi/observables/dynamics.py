r"""Time correlations along a trajectory, and the self-diffusion coefficient by Einstein's and by Green and Kubo's rule.

Snapshots are equally spaced in time, which the trainer's are. Where a state point has several chains, its snapshots are
those of one chain after the other: say how many with ``chains``, so that no path leads from one into the next. A lag of
``n`` compares snapshots ``t`` and ``t + n``; the weight of such a pair is that of its first snapshot.

The dynamics are those of the potential, thermostat and friction that sampled the trajectory. Weights change how often a
pair starts somewhere, not where it goes: after a change of parameters these are estimates, and their gradient is not
that of the diffusion coefficient. Use them as predictions on fresh trajectories, not as targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chemtrain_mpi.boxes import box_matrix
from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.observables.averages import Observable


def unwrap(position: jax.Array, box: jax.Array | float) -> jax.Array:
    """Cartesian paths ``(T, N, 3)`` that do not jump at the faces of the box, from folded fractional positions.

    Every step between two snapshots is taken to the nearest image. That is right as long as no particle moves half a
    box edge between snapshots; where one seems to move a quarter, all is NaN: store snapshots more often.
    """
    steps = jnp.diff(position, axis=0)
    steps = steps - jnp.round(steps)
    steps = jnp.where(jnp.max(jnp.abs(steps)) < 0.25, steps, jnp.nan)
    path = jnp.concatenate([jnp.zeros_like(steps[:1]), jnp.cumsum(steps, axis=0)])
    return (position[0] + path) @ box_matrix(box).T.astype(position.dtype)


def mean_squared_displacement(position: str, lags: Sequence[int], *, chains: int = 1) -> Observable:
    """``⟨|r(t + n) − r(t)|²⟩`` over particles and time origins, for every lag, NVT.

    Parameters
    ----------
    position
        Name of ``quantities.position``.
    lags
        Numbers of snapshots ``(L,)``, at least 1.
    chains
        Chains of the state point.

    Returns
    -------
    An observable of shape ``(L,)``, length unit squared.
    """
    steps = _lags(lags, 1)

    def msd(trajectories: Mapping[str, jax.Array], weights: jax.Array, **kwargs: Any) -> jax.Array:
        if "pressure" in kwargs or "box" not in kwargs:
            raise ArgumentError("paths are unwrapped in a fixed box: give state_kwargs a 'box', and no barostat")
        folded = _by_chain(trajectories[position], chains)
        paths = jax.vmap(lambda path: unwrap(path, kwargs["box"]))(folded)
        return _correlate(paths, _by_chain(weights, chains), steps, lambda a, b: jnp.sum((b - a) ** 2, axis=-1))

    return msd


def self_diffusion(position: str, interval: float, lags: Sequence[int], *, chains: int = 1) -> Observable:
    """Self-diffusion coefficient by Einstein's rule: a sixth of the slope of the mean squared displacement.

    A straight line with an intercept is fitted over the lags, so that the ballistic start does not count if the lags
    leave it out. In a cubic box of edge ``L`` the value is too small by about ``2.837 kT / (6π η L)``: Yeh and Hummer,
    J. Phys. Chem. B 108, 15873 (2004).

    Parameters
    ----------
    position
        Name of ``quantities.position``.
    interval
        Time between snapshots, ``timings.steps_per_snapshot * timings.time_step``.
    lags
        Numbers of snapshots, at least two different ones.
    chains
        Chains of the state point.
    """
    steps = _lags(lags, 1)
    if len(set(steps)) < 2:
        raise ArgumentError("a slope needs at least two different lags")
    displacement = mean_squared_displacement(position, steps, chains=chains)
    times = interval * np.asarray(steps, float)
    centred = times - times.mean()

    def diffusion(trajectories: Mapping[str, jax.Array], weights: jax.Array, **kwargs: Any) -> jax.Array:
        values = displacement(trajectories, weights, **kwargs)
        return jnp.dot(jnp.asarray(centred / np.sum(centred**2), values.dtype), values) / 6.0

    return diffusion


def velocity_autocorrelation(velocity: str, lags: Sequence[int], *, chains: int = 1) -> Observable:
    """``⟨v(t)·v(t + n)⟩`` over particles and time origins, for every lag ``(L,)``.

    Parameters
    ----------
    velocity
        Name of ``quantities.velocity``.
    lags
        Numbers of snapshots ``(L,)``, 0 included where wanted.
    chains
        Chains of the state point.
    """
    steps = _lags(lags, 0)

    def correlation(trajectories: Mapping[str, jax.Array], weights: jax.Array, **_: Any) -> jax.Array:
        series = _by_chain(trajectories[velocity], chains)
        return _correlate(series, _by_chain(weights, chains), steps, lambda a, b: jnp.sum(a * b, axis=-1))

    return correlation


def self_diffusion_green_kubo(velocity: str, interval: float, last: int, *, chains: int = 1) -> Observable:
    """Self-diffusion coefficient ``⅓ ∫ ⟨v(0)·v(t)⟩ dt`` by the trapezoidal rule from 0 to ``last`` snapshots.

    Snapshots must be close enough to resolve the decay of the velocities, and ``last`` behind it.
    """
    correlation = velocity_autocorrelation(velocity, range(last + 1), chains=chains)

    def diffusion(trajectories: Mapping[str, jax.Array], weights: jax.Array, **kwargs: Any) -> jax.Array:
        values = correlation(trajectories, weights, **kwargs)
        return interval * (jnp.sum(values) - 0.5 * (values[0] + values[-1])) / 3.0

    return diffusion


def _lags(lags: Sequence[int], least: int) -> list[int]:
    steps = [int(n) for n in lags]
    if not steps or min(steps) < least or steps != list(lags):
        raise ArgumentError(f"lags are whole numbers of snapshots, at least {least}; got {list(lags)}")
    return steps


def _by_chain(series: jax.Array, chains: int) -> jax.Array:
    if chains < 1 or series.shape[0] % chains:
        raise ArgumentError(f"{series.shape[0]} snapshots are not those of {chains} chains of equal length")
    return series.reshape(chains, -1, *series.shape[1:])


def _correlate(
    series: jax.Array, weights: jax.Array, lags: Sequence[int], product: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    total = weights.shape[1]
    if max(lags) >= total:
        raise ArgumentError(f"a lag of {max(lags)} needs more than the {total} snapshots of a chain")

    # One program for every lag; what a roll brings round from the start has weight zero.
    def at(lag: jax.Array) -> jax.Array:
        origins = jnp.where(jnp.arange(total) < total - lag, weights, 0.0)
        each = jnp.mean(product(series, jnp.roll(series, -lag, axis=1)), axis=-1)
        return jnp.sum(origins * each) / jnp.sum(origins)

    return jax.lax.map(at, jnp.asarray(lags))
