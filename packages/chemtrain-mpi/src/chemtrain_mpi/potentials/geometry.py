"""Displacements of listed neighbours: dense lists, nearest images, safe against padding.

``N`` particles, ``M`` neighbour slots a particle.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax_md import partition

from chemtrain_mpi.errors import ArgumentError

Box: TypeAlias = jax.Array | float


def check_dense(neighbor: partition.NeighborList, box: Box | None) -> None:
    """Refuse a missing box and lists that are not dense.

    Raises
    ------
    ArgumentError
        With the remedy.
    """
    if box is None:
        raise ArgumentError("no box: pass box= to the template, or as a state keyword")
    if neighbor.format is not partition.NeighborListFormat.Dense:
        raise ArgumentError(
            f"these potentials use dense neighbour lists, not {neighbor.format.name}; build the list with "
            "format=partition.Dense"
        )


def strained_box(box: jax.Array, perturbation: jax.Array | float | None) -> jax.Array:
    """The box after jax-md's ``perturbation``, a factor or a matrix ``(3, 3)`` applied to all displacements."""
    if perturbation is None:
        return box
    if jnp.ndim(perturbation) < 2:
        return perturbation * box
    return perturbation @ (box if box.ndim == 2 else jnp.diag(jnp.broadcast_to(box, (3,))))


def pair_displacements(
    cutoff: float, fractional: bool, position: jax.Array, idx: jax.Array, box: jax.Array
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Displacements ``r_i − r_j`` as three ``(N, M)`` arrays, safe squared distances, and which slots are pairs.

    One array an axis: XLA's CPU code runs twice as fast on these as on one array with a last axis of 3.
    """
    columns = position.T
    raw = [x[:, None] - x[idx] for x in columns]
    if fractional:
        d = to_cartesian(box, [x - jnp.round(x) for x in raw])
    else:
        if box.ndim == 2:
            raise ArgumentError("a tilted box needs fractional coordinates")
        edges = jnp.broadcast_to(box, (3,))
        d = [x - edges[a] * jnp.round(x / edges[a]) for a, x in enumerate(raw)]
    r2 = d[0] * d[0] + d[1] * d[1] + d[2] * d[2]
    # Padding slots index one past the end, which a gather clamps to the last particle: at distance 0 from itself.
    mask = (idx < position.shape[0]) & (r2 < cutoff * cutoff)
    return d, jnp.where(mask, r2, jnp.asarray(cutoff * cutoff, r2.dtype)), mask


@jax.custom_jvp
def to_cartesian(box: jax.Array, raw: list[jax.Array]) -> list[jax.Array]:
    """Fractional differences, one array an axis, as Cartesian ones; the columns of ``box`` are the lattice vectors."""
    if box.ndim == 2:
        return [box[a, 0] * raw[0] + box[a, 1] * raw[1] + box[a, 2] * raw[2] for a in range(3)]
    edges = jnp.broadcast_to(box, (3,))
    return [x * edges[a] for a, x in enumerate(raw)]


@to_cartesian.defjvp
def _to_cartesian_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[jax.Array], list[jax.Array]]:
    # jax-md's rule (space.raw_transform): a tangent of a fractional position is Cartesian already.
    box, raw = primals
    d_box, d_raw = tangents
    moved = to_cartesian(d_box, raw)
    return to_cartesian(box, raw), [x + y for x, y in zip(d_raw, moved, strict=True)]
