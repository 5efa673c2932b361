"""Molecular dynamics of one system decomposed over ranks. Å, eV, amu, fs; velocities in √(eV/amu)."""

from nvalchemi_distributed.adapters import (
    FunctionAdapter,
    JitAdapter,
    MethodAdapter,
    OpAdapter,
    PythonAdapter,
    ScriptAdapter,
)
from nvalchemi_distributed.comm import GroupComm, world_comm
from nvalchemi_distributed.config import DomainConfig, HookScope, StrategyKind
from nvalchemi_distributed.distributed_model import DistributedModel
from nvalchemi_distributed.domain_parallel import DomainParallel
from nvalchemi_distributed.helpers import (
    Scope,
    autograd_target,
    current_dd_context,
    refresh_neighbors,
    scatter_to_owners,
    system_sum,
    to_local,
)
from nvalchemi_distributed.precision import pin_fp32
from nvalchemi_distributed.presets import SPEC_LJ_HALO, SPEC_MPNN_HALO
from nvalchemi_distributed.shard_tensor import ShardTensor
from nvalchemi_distributed.sharded_batch import ShardedBatch
from nvalchemi_distributed.spec import DistributionSpec, HaloStoragePolicy, MLIPSpec, OutputKind, OutputSpec, Reduce
from nvalchemi_distributed.version import package_version

__version__ = package_version()

__all__ = [
    "SPEC_LJ_HALO",
    "SPEC_MPNN_HALO",
    "DistributedModel",
    "DistributionSpec",
    "DomainConfig",
    "DomainParallel",
    "FunctionAdapter",
    "GroupComm",
    "HaloStoragePolicy",
    "HookScope",
    "JitAdapter",
    "MLIPSpec",
    "MethodAdapter",
    "OpAdapter",
    "OutputKind",
    "OutputSpec",
    "PythonAdapter",
    "Reduce",
    "Scope",
    "ScriptAdapter",
    "ShardTensor",
    "ShardedBatch",
    "StrategyKind",
    "autograd_target",
    "current_dd_context",
    "pin_fp32",
    "refresh_neighbors",
    "scatter_to_owners",
    "system_sum",
    "to_local",
    "world_comm",
]
