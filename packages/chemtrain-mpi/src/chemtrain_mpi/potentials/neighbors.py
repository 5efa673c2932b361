"""Pair energy, forces and virial on jax-md's dense neighbour lists, safe against padding and quick on CPU.

``N`` particles, ``M`` neighbour slots a particle. A dense list holds each pair twice, so the gradient of a particle is
a sum over its own row: no scatter, which is what makes reverse-mode through a gather slow on CPU. The rule below says
so to JAX, and stays exact when it is differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax_md import partition

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials.geometry import Box, check_dense, pair_displacements, strained_box
from chemtrain_mpi.potentials.terms import Coefficients, PairTerms

Kind: TypeAlias = jax.Array | int


def check_box(box: Any, reach: float) -> None:
    """Refuse a box in which the nearest image is not the only one within ``reach``.

    Parameters
    ----------
    box
        Edge length, edges ``(3,)``, or jax-md's upper triangular matrix whose columns are the lattice vectors.
    reach
        Cutoff, or cutoff plus skin.

    Raises
    ------
    ArgumentError
        With the smallest distance between opposite faces and the longest legal reach.
    """
    box = np.asarray(box, dtype=float)
    matrix = box if box.ndim == 2 else np.diag(np.broadcast_to(box, (3,)))
    heights = 1.0 / np.linalg.norm(np.linalg.inv(matrix), axis=1)
    if reach > heights.min() / 2 * (1 + 1e-6):
        raise ArgumentError(
            f"a reach of {reach:g} needs faces at least {2 * reach:g} apart, but this box has {heights.min():g}: only "
            f"the nearest image is counted. Use a larger box or a cutoff up to {heights.min() / 2:g}"
        )


def pair_energy_template(
    terms: PairTerms, *, box: Box | None = None, fractional: bool = True, species: Sequence[int] | None = None
) -> Callable[[Any], Callable[..., jax.Array]]:
    """``energy_fn_template`` of a pair potential, in jax-md's conventions.

    Parameters
    ----------
    terms
        Family, cutoff and smoothing.
    box
        Edge length, edges ``(3,)`` or upper triangular matrix; a ``box=`` keyword at the call replaces it.
    fractional
        Positions are fractional, as ``space.periodic_general(..., fractional_coordinates=True)`` has them; gradients
        are then Cartesian, as jax-md's own are. Otherwise Cartesian in a fixed box without tilt.
    species
        Index of each particle's species ``(N,)``; ``None`` for one species.

    Returns
    -------
    ``template(params) -> energy_fn(position, neighbor, box=…, perturbation=…, **ignored) -> energy``, with ``position``
    ``(N, 3)`` and ``neighbor`` a dense list. The energy is the truncated sum; no tail.
    """
    kinds = None if species is None else np.asarray(species, dtype=np.int32)

    def template(params: Any) -> Callable[..., jax.Array]:
        # Outside energy_fn, so that tables are prepared once a trajectory and not once a step.
        coefficients = terms.prepare(params)

        def energy_fn(
            position: jax.Array,
            neighbor: partition.NeighborList,
            box: Box | None = box,
            perturbation: jax.Array | float | None = None,
            **_: Any,
        ) -> jax.Array:
            idx, edges, kind = _arguments(position, neighbor, box, kinds, coefficients)
            edges = strained_box(edges, perturbation)
            return _energy(terms, fractional, position, idx, kind, edges, coefficients)

        return energy_fn

    return template


def pair_virial(
    terms: PairTerms,
    params: Any,
    position: jax.Array,
    neighbor: partition.NeighborList,
    box: Box,
    *,
    fractional: bool = True,
    species: Sequence[int] | None = None,
) -> jax.Array:
    """Virial ``Ξ_ab = Σ_{i<j} r_ij,a F_ij,b`` of shape ``(3, 3)``, positive for repulsion, energy unit.

    Differentiable with respect to ``params``. The configurational pressure is ``tr Ξ / 3V``.
    """
    coefficients = terms.prepare(params)
    kinds = None if species is None else np.asarray(species, dtype=np.int32)
    idx, edges, kind = _arguments(position, neighbor, box, kinds, coefficients)
    d, r2, mask = pair_displacements(terms.cutoff, fractional, position, idx, edges)
    pull = jnp.where(mask, terms.slope(r2, coefficients, kind), 0.0)
    # Half of −2 dφ/d(r²): every pair stands in the list twice.
    return -jnp.stack([jnp.stack([jnp.sum(pull * da * db) for db in d]) for da in d])


def _arguments(
    position: jax.Array,
    neighbor: partition.NeighborList,
    box: Box | None,
    species: np.ndarray | None,
    coefficients: Coefficients,
) -> tuple[jax.Array, jax.Array, Kind]:
    check_dense(neighbor, box)
    pair_types = next(iter(v for k, v in coefficients.items() if k != "r")).shape[0]
    if species is None:
        if pair_types != 1:
            raise ArgumentError(f"parameters for {pair_types} ordered pair types need species=")
        return neighbor.idx, jnp.asarray(box, position.dtype), 0
    count = round(pair_types**0.5)
    if species.shape != (position.shape[0],) or species.max() >= count or species.min() < 0:
        raise ArgumentError(
            f"species of shape {species.shape} with indices up to {species.max()} do not fit {position.shape[0]} "
            f"particles and {count} species"
        )
    padded = np.append(species, 0)
    kind = species[:, None] * count + jnp.asarray(padded)[neighbor.idx]
    return neighbor.idx, jnp.asarray(box, position.dtype), kind


def _row_sum(
    terms: PairTerms,
    fractional: bool,
    position: jax.Array,
    idx: jax.Array,
    kind: Kind,
    box: jax.Array,
    coefficients: Coefficients,
) -> jax.Array:
    _, r2, mask = pair_displacements(terms.cutoff, fractional, position, idx, box)
    return 0.5 * jnp.sum(jnp.where(mask, terms.energy(r2, coefficients, kind), 0.0))


def _gradient(
    terms: PairTerms,
    fractional: bool,
    position: jax.Array,
    idx: jax.Array,
    kind: Kind,
    box: jax.Array,
    coefficients: Coefficients,
) -> jax.Array:
    d, r2, mask = pair_displacements(terms.cutoff, fractional, position, idx, box)
    slope = 2.0 * jnp.where(mask, terms.slope(r2, coefficients, kind), 0.0)
    return jnp.stack([jnp.sum(slope * x, axis=1) for x in d], axis=-1)


_energy = partial(jax.custom_jvp, nondiff_argnums=(0, 1))(_row_sum)


@_energy.defjvp
def _energy_jvp(
    terms: PairTerms, fractional: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    position, idx, kind, box, coefficients = primals
    d_position, _, _, d_box, d_coefficients = tangents
    value, rest = jax.jvp(
        lambda b, c: _row_sum(terms, fractional, position, idx, kind, b, c),
        (box, coefficients),
        (d_box, d_coefficients),
    )
    return value, rest + jnp.vdot(_gradient(terms, fractional, position, idx, kind, box, coefficients), d_position)
