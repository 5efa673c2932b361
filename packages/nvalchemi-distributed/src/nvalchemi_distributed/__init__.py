"""Molecular dynamics of one system decomposed over ranks. Å, eV, amu, fs; velocities in √(eV/amu)."""

from nvalchemi_distributed.comm import GroupComm, world_comm
from nvalchemi_distributed.config import DomainConfig, HookScope, StrategyKind
from nvalchemi_distributed.distributed_model import DistributedModel
from nvalchemi_distributed.domain_parallel import DomainParallel
from nvalchemi_distributed.precision import pin_fp32
from nvalchemi_distributed.presets import SPEC_LJ_HALO
from nvalchemi_distributed.sharded_batch import ShardedBatch
from nvalchemi_distributed.spec import MLIPSpec, OutputKind
from nvalchemi_distributed.version import package_version

__version__ = package_version()

__all__ = [
    "SPEC_LJ_HALO",
    "DistributedModel",
    "DomainConfig",
    "DomainParallel",
    "GroupComm",
    "HookScope",
    "MLIPSpec",
    "OutputKind",
    "ShardedBatch",
    "StrategyKind",
    "pin_fp32",
    "world_comm",
]
