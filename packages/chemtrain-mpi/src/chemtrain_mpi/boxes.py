"""Boxes as users give them: an edge, edges, or a matrix whose columns are lattice vectors."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def box_volume(box: jax.Array | float) -> jax.Array:
    """Volume of a box given as an edge, three edges or a matrix."""
    box = jnp.asarray(box)
    return jnp.abs(jnp.linalg.det(box)) if box.ndim == 2 else jnp.prod(jnp.broadcast_to(box, (3,)))


def box_matrix(box: jax.Array | float, dimension: int = 3) -> jax.Array:
    """A box given as an edge, edges or a matrix, as the matrix ``(D, D)`` whose columns are lattice vectors."""
    box = jnp.asarray(box)
    return box if box.ndim == 2 else jnp.diag(jnp.broadcast_to(box, (dimension,)))
