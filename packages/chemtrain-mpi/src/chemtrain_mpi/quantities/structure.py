"""Who stands where around whom: pair distances and angles of a snapshot, fractional coordinates. ``B`` bins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_md import partition

from chemtrain_mpi.boxes import box_volume
from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials.geometry import check_dense, pair_displacements
from chemtrain_mpi.quantities.box import Quantity, snapshot_box


def radial_distribution(edges: Sequence[float]) -> Quantity:
    """Radial distribution function ``g(r)`` of one snapshot, all pairs, fractional coordinates.

    ``g`` of a shell is its pair count over that of an ideal gas of ``N − 1`` others in ``V``. The last edge must not
    exceed half the smallest distance between opposite faces.

    Parameters
    ----------
    edges
        Shell edges ``(B + 1,)``, increasing.

    Returns
    -------
    A quantity of shape ``(B,)``.
    """
    radii = _increasing(edges, "radii")

    def rdf(state: Any, **kwargs: Any) -> jax.Array:
        box = jnp.asarray(snapshot_box(state, kwargs))
        n = state.position.shape[0]
        r2 = _pair_squares(state.position, box)
        below = jnp.stack([jnp.sum(r2 < r * r) for r in radii]).astype(r2.dtype)
        shells = 4.0 / 3.0 * jnp.pi * jnp.diff(radii**3)
        ideal = n * (n - 1) / box_volume(box) * shells
        return jnp.diff(below) / ideal

    return rdf


def coordination_number(cutoff: float) -> Quantity:
    """Mean number of others nearer than ``cutoff``, which must not exceed half the distance between opposite faces."""
    if not (np.isfinite(cutoff) and cutoff > 0):
        raise ArgumentError(f"the cutoff is {cutoff}; it must be positive and finite")

    def coordination(state: Any, **kwargs: Any) -> jax.Array:
        r2 = _pair_squares(state.position, jnp.asarray(snapshot_box(state, kwargs)))
        return jnp.sum(r2 < cutoff * cutoff) / jnp.asarray(state.position.shape[0], r2.dtype)

    return coordination


def angular_distribution(edges: Sequence[float], cutoff: float) -> Quantity:
    """Angles between two neighbours of a particle, as a histogram a particle.

    Every pair of others nearer than ``cutoff`` gives one angle. Divide by its sum and the bin widths for a density:
    ``observables.normalized_histogram``.

    Parameters
    ----------
    edges
        Bin edges ``(B + 1,)`` in radians, increasing, within 0 and π. An angle of π belongs to the last bin.
    cutoff
        Longest distance of a neighbour, at most the one for which the neighbour list is made.

    Returns
    -------
    A quantity of shape ``(B,)``. NaN where the list lacks pairs nearer than ``cutoff``: no angle is left out silently.
    """
    angles = np.asarray(_increasing(edges, "angles"), np.float64)
    if angles[0] < 0.0 or angles[-1] > np.pi * (1 + 1e-6):
        raise ArgumentError(f"angles are between 0 and π, not {angles[0]:g} and {angles[-1]:g}")
    # Below every edge is where the cosine is above that edge's; ends are moved so that rounded cosines stay within.
    cosines = np.where(angles >= np.pi * (1 - 1e-6), -2.0, np.where(angles == 0.0, 2.0, np.cos(angles)))

    def histogram(state: Any, *, neighbor: partition.NeighborList, **kwargs: Any) -> jax.Array:
        box = jnp.asarray(snapshot_box(state, kwargs), state.position.dtype)
        check_dense(neighbor, box)
        position = state.position
        d, r2, mask = pair_displacements(cutoff, True, position, neighbor.idx, box)
        inverse = jnp.where(mask, jax.lax.rsqrt(r2), 0.0)
        cosine = sum(x[:, :, None] * x[:, None, :] for x in (component * inverse for component in d))
        counted = mask[:, :, None] & mask[:, None, :] & ~jnp.eye(mask.shape[1], dtype=bool)
        cosine = jnp.where(counted, cosine, -3.0)
        below = jnp.stack([jnp.sum(cosine > edge) for edge in cosines]).astype(position.dtype)
        complete = jnp.sum(mask) == jnp.sum(_pair_squares(position, box) < cutoff * cutoff)
        # Each pair of neighbours was counted twice.
        return jnp.where(complete, 0.5 * jnp.diff(below) / position.shape[0], jnp.nan)

    return histogram


def _increasing(edges: Sequence[float], what: str) -> jax.Array:
    values = jnp.asarray(edges)
    if values.ndim != 1 or values.size < 2 or bool(jnp.any(jnp.diff(values) <= 0)):
        raise ArgumentError(f"edges must be at least two increasing {what}")
    return values


def _pair_squares(position: jax.Array, box: jax.Array) -> jax.Array:
    """Squared nearest-image distances ``(N, N)``, infinite on the diagonal."""
    raw = position[:, None, :] - position[None, :, :]
    raw = raw - jnp.round(raw)
    d = raw @ box.T if box.ndim == 2 else raw * box
    return jnp.where(jnp.eye(position.shape[0], dtype=bool), jnp.inf, jnp.sum(d * d, axis=-1))
