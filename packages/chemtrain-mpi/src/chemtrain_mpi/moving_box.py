"""Neighbour lists under a box that changes.

jax-md renews a list when a particle has moved by half the skin in scaled coordinates. Where a barostat changes the
box, that is not enough: scaled coordinates may stand still while all distances shrink. A pair that is not listed was
at least ``r_c + s`` apart when the list was built, with the cutoff ``r_c`` and the skin ``s``. If since then the box
has been deformed by ``F``, and no particle has moved by more than ``d`` besides, it is now at least ``σ (r_c + s) − 2
d`` apart, where ``σ`` is the smallest stretch of ``F``. The list is renewed when that falls below ``r_c``.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax_md import partition

from chemtrain_mpi.boxes import box_matrix
from chemtrain_mpi.errors import ArgumentError


def reach(neighbor_fn: partition.NeighborListFns) -> tuple[float, float]:
    """Cutoff and skin of a neighbour function.

    Raises
    ------
    ArgumentError
        For one that is not jax-md's own, which says neither, and for one without scaled coordinates.
    """
    # jax-md keeps both to itself.
    outer = inspect.getclosurevars(neighbor_fn.update).nonlocals
    inner = inspect.getclosurevars(outer["neighbor_list_fn"]).nonlocals if "neighbor_list_fn" in outer else {}
    if not {"cutoff", "threshold_sq", "fractional_coordinates"} <= inner.keys():
        raise ArgumentError(
            "at constant pressure neighbor_fn must come from jax_md.partition.neighbor_list: its cutoff and "
            "dr_threshold say when a list no longer does in a box that has shrunk"
        )
    if not inner["fractional_coordinates"]:
        raise ArgumentError("at constant pressure neighbor_fn needs fractional_coordinates=True")
    skin = 2 * math.sqrt(float(inner["threshold_sq"]))
    return float(inner["cutoff"]) - skin, skin


def smallest_stretch(deformation: jax.Array) -> jax.Array:
    """A lower bound of the smallest singular value of ``(D, D)``; exact where the box keeps its shape."""
    dimension = deformation.shape[0]
    scale = jnp.trace(deformation) / dimension
    return scale - jnp.linalg.norm(deformation - scale * jnp.eye(dimension, dtype=deformation.dtype))


def updated(
    neighbors: partition.NeighborList, built: jax.Array, position: jax.Array, box: Any, cutoff: float, skin: float
) -> tuple[partition.NeighborList, jax.Array]:
    """The list at scaled positions ``(N, D)`` in ``box``, and the box ``(D, D)`` in which it was built. Traced.

    Parameters
    ----------
    built
        The box in which ``neighbors`` were built, ``(D, D)``.
    """
    now = box_matrix(box, position.shape[1])
    moved = position - neighbors.reference_position
    moved = (moved - jnp.round(moved)) @ now.T
    farthest = jnp.sqrt(jnp.max(jnp.sum(moved**2, axis=1)))
    nearest_unlisted = smallest_stretch(now @ jnp.linalg.inv(built)) * (cutoff + skin) - 2 * farthest
    # A NaN is no reason to keep a list.
    holds = nearest_unlisted >= cutoff
    # jax-md renews a list of which a particle has moved, so all of them are moved by half a box.
    reference = jnp.where(holds, neighbors.reference_position, neighbors.reference_position + 0.5)
    new = neighbors.set(reference_position=reference).update(position, box=box)
    kept = jnp.all(new.reference_position == reference)
    return new, jnp.where(kept, built, now)
