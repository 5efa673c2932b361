"""Ready-made potentials, the tails of pair potentials, and the artefact that another engine reads."""

from chemtrain_mpi.potentials.artefact import LoadedPotential, export_potential, load
from chemtrain_mpi.potentials.images import Evaluation, evaluate
from chemtrain_mpi.potentials.neighbors import check_box, pair_energy_template, pair_virial
from chemtrain_mpi.potentials.neural import NeuralCorrection, symmetry_functions
from chemtrain_mpi.potentials.stillinger_weber import SILICON, stillinger_weber_template
from chemtrain_mpi.potentials.sums import sum_template
from chemtrain_mpi.potentials.terms import PairTerms, tail_energy, tail_pressure

__all__ = [
    "SILICON",
    "Evaluation",
    "LoadedPotential",
    "NeuralCorrection",
    "PairTerms",
    "check_box",
    "evaluate",
    "export_potential",
    "load",
    "pair_energy_template",
    "pair_virial",
    "stillinger_weber_template",
    "sum_template",
    "symmetry_functions",
    "tail_energy",
    "tail_pressure",
]
