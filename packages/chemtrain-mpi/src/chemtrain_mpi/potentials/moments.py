"""Sums over pairs of neighbours by moments of the bonds: the cost of a pair sum, and no angle that could be undefined.

``N`` atoms, ``M`` neighbour slots an atom.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cosine_moments(g: jax.Array, n: list[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``Σ_{j≠k} g_j g_k cos^p θ_jk`` of every atom for ``p = 0, 1, 2``, each ``(N,)``.

    With ``s = Σ g``, ``v = Σ g n`` and ``q = Σ g nn`` the double sums are ``s²``, ``|v|²`` and ``|q|²``, less the terms
    ``j = k``, ``Σ g²``.

    Parameters
    ----------
    g
        Bond weights ``(N, M)``, zero where a slot is no bond.
    n
        Unit bond vectors, one ``(N, M)`` array an axis.
    """
    own = jnp.sum(g * g, axis=1)
    zeroth = jnp.sum(g, axis=1) ** 2
    first = sum(jnp.sum(g * x, axis=1) ** 2 for x in n)
    second = sum(
        (1.0 if a == b else 2.0) * jnp.sum(g * n[a] * n[b], axis=1) ** 2 for a in range(3) for b in range(a, 3)
    )
    return zeroth - own, first - own, second - own
