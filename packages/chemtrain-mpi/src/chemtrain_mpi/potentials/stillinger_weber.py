r"""Stillinger–Weber potential on padded dense lists, at the cost of a pair potential.

    U = ½ Σ_{i,j} ε A (B (σ/r_ij)⁴ − 1) e^{1/(r_ij/σ − a)} + ½ Σ_i Σ_{j≠k} ε λ g_ij g_ik (cos θ_jik + 1/3)²,
    g_ij = e^{γ/(r_ij/σ − a)},   a = cutoff/σ,

with the powers 4 and 0 of the original, which are also those of ``jax_md.energy.stillinger_weber``: Stillinger and
Weber, Phys. Rev. B 31, 5262 (1985). The triple sum is a square of cosines, so that it is taken by moments, exactly.

``N`` atoms, ``M`` neighbour slots an atom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_md import partition

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials.geometry import Box, check_dense, pair_displacements, strained_box
from chemtrain_mpi.potentials.moments import cosine_moments

PARAMETERS = ("epsilon", "sigma", "A", "B", "lam", "gamma")
SILICON: Mapping[str, float] = MappingProxyType(
    {"epsilon": 2.16826, "sigma": 2.0951, "A": 7.049556277, "B": 0.6022245584, "lam": 21.0, "gamma": 1.2}
)
"""Parameters of silicon, eV and Å; cutoff 3.77118. Source: as above, in the units of jax-md and LAMMPS."""
CUTOFF_OVER_SIGMA = 1.8
"""Reduced cutoff ``a`` of the original."""


def stillinger_weber_template(
    cutoff: float, *, box: Box | None = None, fractional: bool = True
) -> Callable[[Any], Callable[..., jax.Array]]:
    """``energy_fn_template`` of the Stillinger–Weber potential, every parameter trainable.

    Parameters
    ----------
    cutoff
        Where both terms end, a length. It stays while ``sigma`` is trained, so that lists stay valid.
    box, fractional
        As in ``pair_energy_template``.

    Returns
    -------
    ``template(params) -> energy_fn(position, neighbor, box=…, perturbation=…, **ignored) -> energy``. ``params`` has
    the scalars ``epsilon`` (energy), ``sigma`` (length), ``A``, ``B``, ``lam`` and ``gamma``; ``neighbor`` is a dense
    list that reaches the cutoff.

    Raises
    ------
    ArgumentError
        For a cutoff that is not positive, and from ``template`` for missing or unknown parameters.
    """
    if not (np.isfinite(cutoff) and cutoff > 0):
        raise ArgumentError(f"the cutoff is {cutoff}; it must be positive and finite")

    def template(params: Mapping[str, Any]) -> Callable[..., jax.Array]:
        missing = [name for name in PARAMETERS if name not in params]
        unknown = [name for name in params if name not in PARAMETERS]
        if missing or unknown:
            raise ArgumentError(
                f"Stillinger–Weber takes the parameters {', '.join(PARAMETERS)}; missing: "
                f"{', '.join(missing) or 'none'}, unknown: {', '.join(unknown) or 'none'}"
            )

        def energy_fn(
            position: jax.Array,
            neighbor: partition.NeighborList,
            box: Box | None = box,
            perturbation: jax.Array | float | None = None,
            **_: Any,
        ) -> jax.Array:
            check_dense(neighbor, box)
            edges = strained_box(jnp.asarray(box, position.dtype), perturbation)
            d, r2, _mask = pair_displacements(cutoff, fractional, position, neighbor.idx, edges)
            return _energy(params, cutoff, d, r2)

        return energy_fn

    return template


def _energy(params: Mapping[str, Any], cutoff: float, d: list[jax.Array], r2: jax.Array) -> jax.Array:
    # Slots that are no pairs have r = cutoff. Within σ/1000 of it both terms are e^−1000, zero in any precision, while
    # their derivatives would be 0·∞: these slots take a radius at which everything is finite, and weight zero.
    scaled = jnp.sqrt(r2) / params["sigma"]
    gap = scaled - cutoff / params["sigma"]
    inside = jax.lax.stop_gradient(gap) < -1e-3
    gap = jnp.where(inside, gap, -1.0)
    scaled = jnp.where(inside, scaled, 1.0)
    pair = params["A"] * (params["B"] * scaled**-4 - 1.0) * jnp.exp(1.0 / gap)
    g = jnp.where(inside, jnp.exp(params["gamma"] / gap), 0.0)
    inverse = jnp.where(inside, jax.lax.rsqrt(r2), 0.0)
    zeroth, first, second = cosine_moments(g, [x * inverse for x in d])
    triple = second + 2.0 / 3.0 * first + zeroth / 9.0
    return params["epsilon"] * (0.5 * jnp.sum(jnp.where(inside, pair, 0.0)) + 0.5 * params["lam"] * jnp.sum(triple))
