"""Potential energies of a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax_md import partition

from chemtrain_mpi.boxes import box_volume
from chemtrain_mpi.potentials.terms import PairTerms, tail_energy
from chemtrain_mpi.quantities.box import Quantity, snapshot_box
from chemtrain_mpi.trajectories import energy_kwargs


def potential_energy(energy_fn_template: Callable[[Any], Callable[..., jax.Array]]) -> Quantity:
    """Potential energy ``U`` under the trained parameters."""

    def energy(state: Any, *, neighbor: partition.NeighborList, energy_params: Any, **kwargs: Any) -> jax.Array:
        return energy_fn_template(energy_params)(state.position, neighbor=neighbor, **energy_kwargs(state, kwargs))

    return energy


def pair_energy_per_particle(
    terms: PairTerms,
    energy_fn_template: Callable[[Any], Callable[..., jax.Array]],
    to_parameters: Callable[[Any], Any] = lambda params: params,
    *,
    tail: bool = True,
    fractions: Sequence[float] = (1.0,),
) -> Quantity:
    """Energy a particle, tail included.

    Parameters
    ----------
    terms
        The truncation to report, usually ``smoothing="none"``.
    energy_fn_template
        Of the same truncation; it takes what ``to_parameters`` returns.
    to_parameters
        From trained parameters to those of the family.
    tail
        Add the analytic ``g(r) = 1`` tail.
    fractions
        Mole fractions, for the tail.
    """

    def energy(state: Any, *, neighbor: partition.NeighborList, energy_params: Any, **kwargs: Any) -> jax.Array:
        params = to_parameters(energy_params)
        call = energy_kwargs(state, kwargs)
        n = state.position.shape[0]
        mean = energy_fn_template(params)(state.position, neighbor=neighbor, **call) / n
        if not tail:
            return mean
        return mean + tail_energy(terms, params, n / box_volume(snapshot_box(state, kwargs)), fractions)

    return energy
