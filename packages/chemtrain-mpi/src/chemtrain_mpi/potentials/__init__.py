"""Ready-made pair potentials, their tails, and the artefact that another engine reads."""

from chemtrain_mpi.potentials.artefact import LoadedPotential, export_potential, load
from chemtrain_mpi.potentials.images import Evaluation, evaluate
from chemtrain_mpi.potentials.neighbors import check_box, pair_energy_template, pair_virial
from chemtrain_mpi.potentials.terms import PairTerms, tail_energy, tail_pressure

__all__ = [
    "Evaluation",
    "LoadedPotential",
    "PairTerms",
    "check_box",
    "evaluate",
    "export_potential",
    "load",
    "pair_energy_template",
    "pair_virial",
    "tail_energy",
    "tail_pressure",
]
