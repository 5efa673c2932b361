"""Energy, forces and virial of an artefact in any periodic cell, with every image counted, in float64.

For checks, not for dynamics: the pair list is made anew, in numpy, and cells may be tilted and smaller than two
cutoffs. Only for artefacts of the protocol; ``N`` atoms, ``E`` directed pairs with images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials.terms import PairTerms, tail_energy, tail_pressure
from distmd_protocol import Potential

# Older jax has it in jax.experimental only.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


@dataclass(frozen=True)
class Evaluation:
    """Float64 results, in the artefact's units.

    Attributes
    ----------
    energy
        Total potential energy, tail included if the artefact asks for it.
    forces
        ``(N, 3)``.
    virial
        ``Ξ_ab = Σ_{i<j} r_ij,a F_ij,b``, ``(3, 3)``, tail included: the configurational pressure is ``tr Ξ / 3V``.
    """

    energy: float
    forces: np.ndarray
    virial: np.ndarray


def image_pairs(positions: np.ndarray, cell: np.ndarray, cutoff: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every directed pair closer than the cutoff, an atom's own images among them.

    Parameters
    ----------
    positions
        Cartesian ``(N, 3)``, inside the cell or not.
    cell
        Lattice vectors as rows ``(3, 3)``, of either handedness.

    Returns
    -------
    ``i`` and ``j`` ``(E,)`` and ``shift`` ``(E, 3)``, with ``r_ij = r_i − r_j − shift``.
    """
    if abs(np.linalg.det(cell)) < 1e-12 * np.prod(np.linalg.norm(cell, axis=1)):
        raise ArgumentError("the cell has no volume; its rows must be three independent lattice vectors")
    inverse = np.linalg.inv(cell)
    heights = 1.0 / np.linalg.norm(inverse, axis=0)
    fractional = positions @ inverse
    home = np.floor(fractional)
    wrapped = (fractional - home) @ cell
    reach = np.ceil(cutoff / heights).astype(int)
    pieces = []
    for n in np.ndindex(*(2 * reach + 1)):
        image = np.array(n) - reach
        d = wrapped[:, None, :] - wrapped[None, :, :] - image @ cell
        near = np.einsum("ija,ija->ij", d, d) < cutoff**2
        if not image.any():
            np.fill_diagonal(near, False)
        i, j = np.nonzero(near)
        # The image in terms of the unwrapped positions.
        pieces.append((i, j, (image + home[i] - home[j]) @ cell))
    i, j, shift = (np.concatenate(part) for part in zip(*pieces, strict=True))
    return i, j, shift


def evaluate(
    potential: Potential, positions: np.ndarray, cell: np.ndarray, species: Sequence[str] | Sequence[int] | None = None
) -> Evaluation:
    """Energy, forces and virial in float64, whatever JAX's default precision.

    Parameters
    ----------
    positions
        Cartesian ``(N, 3)``, in the artefact's length unit.
    cell
        Lattice vectors as rows ``(3, 3)``.
    species
        Name or index of each atom's species; ``None`` where there is only one.
    """
    positions, cell = np.asarray(positions, np.float64), np.asarray(cell, np.float64)
    count, n = len(potential.species), len(positions)
    given = [0] * n if species is None else species
    kinds = np.array([potential.species.index(s) if isinstance(s, str) else s for s in given], dtype=np.int64)
    terms = PairTerms(potential.family, potential.cutoff, potential.smoothing)
    i, j, shift = image_pairs(positions, cell, potential.cutoff)
    with enable_x64(True):
        params = {name: jnp.asarray(value, jnp.float64) for name, value in potential.parameters.items()}
        kind = jnp.asarray(kinds[i] * count + kinds[j])
        value, (slope, strain_slope) = _value_and_slopes(
            terms, jnp.asarray(positions), jnp.zeros((3, 3)), params, jnp.asarray(i), jnp.asarray(j), shift, kind
        )
        virial = -strain_slope
        if potential.tail_correction:
            volume = abs(np.linalg.det(cell))
            fractions = np.bincount(kinds, minlength=count) / n
            value = value + n * tail_energy(terms, params, n / volume, fractions)
            virial = virial + tail_pressure(terms, params, n / volume, fractions) * volume * jnp.eye(3)
        return Evaluation(float(value), -np.asarray(slope), np.asarray(virial))


@partial(jax.jit, static_argnums=0)
@partial(jax.value_and_grad, argnums=(1, 2))
def _value_and_slopes(
    terms: PairTerms,
    positions: jax.Array,
    strain: jax.Array,
    params: dict[str, jax.Array],
    i: jax.Array,
    j: jax.Array,
    shift: jax.Array,
    kind: jax.Array,
) -> jax.Array:
    d = (positions[i] - positions[j] - shift) @ (jnp.eye(3) + strain)
    return 0.5 * jnp.sum(terms.energy(jnp.sum(d * d, axis=1), terms.prepare(params), kind))
