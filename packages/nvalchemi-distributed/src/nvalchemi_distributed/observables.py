"""Thermodynamic quantities of a batch, per system. Å, eV, amu, K."""

from __future__ import annotations

import torch
from torch import Tensor

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.domain.reduce import LocalReducer, Reducer
from nvalchemi_distributed.units import BOLTZMANN


def kinetic_energy(batch: Batch, reduce: Reducer | None = None) -> Tensor:
    """(S,) Σ ½ m v² in eV, float64. Pass ``ctx.reduce`` or ``self.reduce`` where ``batch`` holds one rank's atoms."""
    per_atom = 0.5 * (batch.atomic_masses * batch.velocities.square().sum(-1)).to(torch.float64)
    local = per_atom.new_zeros(batch.num_graphs).index_add(0, batch.batch_idx, per_atom)
    return (reduce or LocalReducer()).sum(local, "kinetic_energy")


def atom_counts(batch: Batch, reduce: Reducer | None = None) -> Tensor:
    """(S,) number of atoms, float64."""
    local = torch.bincount(batch.batch_idx, minlength=batch.num_graphs).to(torch.float64)
    return (reduce or LocalReducer()).sum(local, "atom_counts")


def temperature(batch: Batch, reduce: Reducer | None = None) -> Tensor:
    """(S,) 2 K / (3 N k_B) in K; 0 for an empty system."""
    return 2.0 * kinetic_energy(batch, reduce) / (3.0 * atom_counts(batch, reduce).clamp_min(1.0) * BOLTZMANN)


def volume(batch: Batch) -> Tensor:
    """(S,) |det cell| in Å³; 0 where a lattice vector is missing."""
    return batch.cell.to(torch.float64).det().abs()


def pressure(batch: Batch, reduce: Reducer | None = None) -> Tensor:
    """(S,) (2 K + tr virial) / (3 V) in eV/Å³ from ``batch.stress``, which is global on every rank.

    Raises:
        AttributeError: the model was not asked for ``stress``.
    """
    if batch.stress is None:
        raise AttributeError("batch.stress is not there; add 'stress' to model.model_config.active_outputs")
    trace = batch.stress.to(torch.float64).diagonal(dim1=-2, dim2=-1).sum(-1)
    return 2.0 * kinetic_energy(batch, reduce) / (3.0 * volume(batch)) - trace / 3.0
