"""Instantaneous quantities: ``quantity(state, neighbor=…, energy_params=…, **state_kwargs)`` of one snapshot.

Each function here returns such a quantity. ``N`` particles, box of volume ``V``. Units are the caller's.
"""

from chemtrain_mpi.boxes import box_matrix, box_volume
from chemtrain_mpi.quantities.box import Quantity, density, volume
from chemtrain_mpi.quantities.energies import pair_energy_per_particle, potential_energy
from chemtrain_mpi.quantities.motion import position, velocity
from chemtrain_mpi.quantities.pressures import pair_pressure, virial_pressure
from chemtrain_mpi.quantities.strain import born_stiffness, born_stress
from chemtrain_mpi.quantities.structure import angular_distribution, coordination_number, radial_distribution

__all__ = [
    "Quantity",
    "angular_distribution",
    "born_stiffness",
    "born_stress",
    "box_matrix",
    "box_volume",
    "coordination_number",
    "density",
    "pair_energy_per_particle",
    "pair_pressure",
    "position",
    "potential_energy",
    "radial_distribution",
    "velocity",
    "virial_pressure",
    "volume",
]
