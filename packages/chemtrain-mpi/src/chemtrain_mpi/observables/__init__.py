"""Ensemble observables: ``observable(quantity_trajectories, weights, **state_kwargs)`` of one state point.

``quantity_trajectories[name]`` has a leading axis of ``T`` snapshots, ``weights`` ``(T,)`` sum to one.
"""

from chemtrain_mpi.observables.averages import (
    Observable,
    average,
    fluctuation,
    reduced_energy,
    reduced_pressure,
    weighted_mean,
)
from chemtrain_mpi.observables.dynamics import (
    mean_squared_displacement,
    self_diffusion,
    self_diffusion_green_kubo,
    unwrap,
    velocity_autocorrelation,
)
from chemtrain_mpi.observables.elasticity import (
    cubic,
    cubic_means,
    elastic_constants,
    mean_stress,
    stress_fluctuation,
)
from chemtrain_mpi.observables.errors import block_jackknife_error, block_standard_error
from chemtrain_mpi.observables.response import compressibility, heat_capacity, thermal_expansion
from chemtrain_mpi.observables.structure import normalized_histogram

__all__ = [
    "Observable",
    "average",
    "block_jackknife_error",
    "block_standard_error",
    "compressibility",
    "cubic",
    "cubic_means",
    "elastic_constants",
    "fluctuation",
    "heat_capacity",
    "mean_squared_displacement",
    "mean_stress",
    "normalized_histogram",
    "reduced_energy",
    "reduced_pressure",
    "self_diffusion",
    "self_diffusion_green_kubo",
    "stress_fluctuation",
    "thermal_expansion",
    "unwrap",
    "velocity_autocorrelation",
    "weighted_mean",
]
