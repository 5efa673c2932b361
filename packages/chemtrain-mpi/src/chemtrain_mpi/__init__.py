"""Train interatomic potentials on ensemble observables, state points split over MPI ranks.

``quantities``, ``observables``, ``reweighting`` and ``potentials`` are modules of ready-made parts; ``plot`` needs the
extra of that name, ``comm`` the extra ``mpi``.
"""

from chemtrain_mpi import precision as _precision
from chemtrain_mpi.timings import Timings, process_printouts
from chemtrain_mpi.trainers import DifftreParallel
from chemtrain_mpi.version import VERSION as __version__
from distmd_protocol import PrecisionWarning, check_environment, pin_fp32, warn_if_reduced

_precision.register()

__all__ = [
    "DifftreParallel",
    "PrecisionWarning",
    "Timings",
    "__version__",
    "check_environment",
    "pin_fp32",
    "process_printouts",
    "warn_if_reduced",
]
