"""The potential artefact: what is trained here and simulated elsewhere, or the other way round."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chemtrain_mpi.potentials.neighbors import Box, pair_energy_template
from chemtrain_mpi.potentials.spline import ends_at
from chemtrain_mpi.potentials.terms import PairTerms
from distmd_protocol import Comm, Potential, Units, load_potential, save_potential


def export_potential(
    path: str | os.PathLike[str],
    terms: PairTerms,
    params: Mapping[str, Any],
    *,
    species: Sequence[str],
    masses: Sequence[float],
    units: Units,
    tail_correction: bool,
    smoothing: str | None = None,
    meta: Mapping[str, Any] | None = None,
    comm: Comm | None = None,
) -> Potential:
    """Write trained parameters as the protocol's artefact. Collective if ``comm`` is given.

    Parameters
    ----------
    path
        Folder to write.
    terms
        Family and cutoff.
    params
        Parameters of the family, each a scalar or ``(S, S)``; for ``tabulated_pair`` ``r`` and ``energy``. A last knot
        that is below the cutoff by the rounding of float32 alone is written as the cutoff.
    species, masses
        Names and masses ``(S,)``.
    units
        Of everything given here.
    tail_correction
        Whether a simulation should add the analytic tail.
    smoothing
        Instead of that of ``terms``. A run with shifted energies samples the same configurations as a plainly
        truncated one, and the latter is what a tail correction belongs to.
    meta
        Free-form JSON: where it was fitted, to what.

    Returns
    -------
    The artefact as written.
    """
    count = len(species)

    def full(name: str, value: Any) -> np.ndarray:
        array = np.asarray(value, np.float64)
        if name == "r":
            # The protocol wants the cutoff within the knots, and a table in float32 may end an ulp below it.
            below = array.ndim == 1 and array.size > 0 and array[-1] < terms.cutoff
            return np.append(array[:-1], terms.cutoff) if below and ends_at(array[-1], terms.cutoff) else array
        return np.broadcast_to(array, (count, count, *array.shape[array.ndim - (name == "energy") :])).copy()

    potential = Potential(
        family=terms.family,
        species=tuple(species),
        masses=np.asarray(masses, np.float64),
        parameters={name: full(name, value) for name, value in params.items()},
        cutoff=terms.cutoff,
        smoothing=terms.smoothing if smoothing is None else smoothing,
        tail_correction=tail_correction,
        units=units,
        meta=dict(meta or {}),
    )
    save_potential(path, potential, comm=comm)
    return potential


@dataclass(frozen=True)
class LoadedPotential:
    """An artefact, ready for jax-md.

    Attributes
    ----------
    potential
        The artefact, in the units asked for.
    terms
        Its family and truncation.
    params
        Its parameters as JAX arrays.
    """

    potential: Potential
    terms: PairTerms
    params: dict[str, jax.Array]

    def energy_fn(
        self, *, box: Box | None = None, fractional: bool = True, species: Sequence[str] | None = None
    ) -> Callable[..., jax.Array]:
        """``energy_fn(position, neighbor, box=…) -> energy`` on jax-md's dense neighbour lists, without the tail.

        Parameters
        ----------
        box, fractional
            As in ``pair_energy_template``.
        species
            Name of each particle's species; ``None`` where the artefact has only one.
        """
        indices = None
        if species is not None:
            names = self.potential.species
            indices = [names.index(name) for name in species]
        template = pair_energy_template(self.terms, box=box, fractional=fractional, species=indices)
        return template(self.params)


def load(path: str | os.PathLike[str], *, units: Units | None = None, comm: Comm | None = None) -> LoadedPotential:
    """Read an artefact, whichever package wrote it. Collective if ``comm`` is given.

    Parameters
    ----------
    units
        Units to convert to; ``None`` leaves those of the file.
    """
    potential = load_potential(path, units=units, comm=comm)
    terms = PairTerms(potential.family, potential.cutoff, potential.smoothing)
    return LoadedPotential(potential, terms, {name: jnp.asarray(v) for name, v in potential.parameters.items()})
