"""What two molecular-dynamics engines agree on: checkpoints, failures, precision, potentials.

Imports numpy and the standard library; never jax, torch or mpi4py.
"""

from distmd_protocol.checkpoint import (
    Checkpoint,
    Manifest,
    PendingSave,
    latest,
    list_checkpoints,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from distmd_protocol.comm import Comm, LocalComm, decode, encode
from distmd_protocol.environment import check_environment
from distmd_protocol.errors import (
    AgreementError,
    CheckpointError,
    PrecisionWarning,
    ProtocolError,
    RankError,
    RankFailure,
    UnitsError,
)
from distmd_protocol.failures import abort_on_uncaught, agree, rank_zero
from distmd_protocol.potential import Potential, load_potential, save_potential
from distmd_protocol.precision import PrecisionPolicy, pin_fp32, register_backend, warn_if_reduced
from distmd_protocol.trees import flatten, unflatten
from distmd_protocol.units import Units
from distmd_protocol.version import VERSION as __version__

__all__ = [
    "AgreementError",
    "Checkpoint",
    "CheckpointError",
    "Comm",
    "LocalComm",
    "Manifest",
    "PendingSave",
    "Potential",
    "PrecisionPolicy",
    "PrecisionWarning",
    "ProtocolError",
    "RankError",
    "RankFailure",
    "Units",
    "UnitsError",
    "__version__",
    "abort_on_uncaught",
    "agree",
    "check_environment",
    "decode",
    "encode",
    "flatten",
    "latest",
    "list_checkpoints",
    "load_checkpoint",
    "load_potential",
    "pin_fp32",
    "rank_zero",
    "read_manifest",
    "register_backend",
    "save_checkpoint",
    "save_potential",
    "unflatten",
    "warn_if_reduced",
]
