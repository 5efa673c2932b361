"""Natural cubic spline for tabulated pair energies. ``M`` knots, ``P`` pair types."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chemtrain_mpi.errors import ArgumentError


def ends_at(last: Any, cutoff: float) -> Any:
    """Whether a last knot, traced or not, is the cutoff but for having been rounded to float32; a boolean scalar."""
    return abs(last - cutoff) <= float(np.finfo(np.float32).eps) * cutoff


def check_knots(r: np.ndarray, cutoff: float) -> None:
    """Refuse knots that are not a strictly increasing table reaching the cutoff.

    Raises
    ------
    ArgumentError
        With the first offending knot.
    """
    r = np.asarray(r)
    if r.ndim != 1 or r.size < 3:
        raise ArgumentError(f"the knots have shape {r.shape}; a natural spline needs at least 3 in one dimension")
    if not np.all(np.isfinite(r)) or r[0] <= 0 or np.any(np.diff(r) <= 0):
        raise ArgumentError("the knots must be finite, positive and strictly increasing")
    # A cutoff that is the last knot may be above it once the table is in float32.
    if cutoff > r[-1] and not ends_at(float(r[-1]), cutoff):
        raise ArgumentError(f"the cutoff {cutoff} lies beyond the last knot {r[-1]}; shorten it or extend the table")


def sensible(r: jax.Array, cutoff: float) -> jax.Array:
    """What ``check_knots`` asks for, of knots ``(M,)`` whose values are not known yet; a boolean scalar."""
    reaches = (r[-1] >= cutoff) | ends_at(r[-1], cutoff)
    return jnp.all(jnp.isfinite(r)) & (r[0] > 0) & jnp.all(jnp.diff(r) > 0) & reaches


def second_derivatives(r: jax.Array, energy: jax.Array) -> jax.Array:
    """Second derivatives at the knots, zero at both ends, shape as ``energy`` ``(..., M)``.

    One dense solve, shared by all tables: ``M`` is at most some hundred and this runs once a trajectory, not once a
    step.
    """
    h = jnp.diff(r)
    slopes = jnp.diff(energy, axis=-1) / h
    rhs = 6.0 * jnp.diff(slopes, axis=-1)
    matrix = jnp.diag(2.0 * (h[:-1] + h[1:])) + jnp.diag(h[1:-1], 1) + jnp.diag(h[1:-1], -1)
    inner = jnp.linalg.solve(matrix, jnp.moveaxis(rhs, -1, 0).reshape(matrix.shape[0], -1))
    inner = jnp.moveaxis(inner.reshape(-1, *energy.shape[:-1]), 0, -1)
    return jnp.pad(inner, [(0, 0)] * (energy.ndim - 1) + [(1, 1)])


def evaluate(
    distance: jax.Array, r: jax.Array, energy: jax.Array, curvature: jax.Array, kind: jax.Array | int = 0
) -> jax.Array:
    """Spline value, continued in a straight line with the end slope below the first and above the last knot.

    Parameters
    ----------
    distance
        Any shape ``D``.
    r
        Knots ``(M,)``.
    energy, curvature
        Tables ``(P, M)``.
    kind
        Which table an entry of ``distance`` uses, shape ``D`` or a scalar.
    """
    inside = jax.lax.stop_gradient(jnp.clip(distance, r[0], r[-1]))
    left = jnp.clip(jnp.searchsorted(r, inside, side="right") - 1, 0, r.size - 2)
    # Into the flattened tables: taking each pair's whole table first would cost D·M memory.
    at = kind * r.size + left
    x0, x1 = r[left], r[left + 1]
    y0, y1 = energy.reshape(-1)[at], energy.reshape(-1)[at + 1]
    m0, m1 = curvature.reshape(-1)[at], curvature.reshape(-1)[at + 1]
    h = x1 - x0
    a, b = (x1 - distance) / h, (distance - x0) / h
    value = a * y0 + b * y1 + ((a**3 - a) * m0 + (b**3 - b) * m1) * h * h / 6.0
    # The natural spline's curvature is zero at both ends, so that these lines continue it smoothly.
    low = y0 + (distance - x0) * ((y1 - y0) / h - h * (2.0 * m0 + m1) / 6.0)
    high = y1 + (distance - x1) * ((y1 - y0) / h + h * (m0 + 2.0 * m1) / 6.0)
    return jnp.where(distance < r[0], low, jnp.where(distance > r[-1], high, value))
