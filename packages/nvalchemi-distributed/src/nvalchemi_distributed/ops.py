"""The parts a distribution spec is made of, in one place to import from."""

from __future__ import annotations

from nvalchemi_distributed.policy import GatherMode, HaloStoragePolicy, ScatterMode
from nvalchemi_distributed.shard_tensor import RowInfo, RowKind, ShardTensor
from nvalchemi_distributed.transforms import (
    AllReduceSum,
    GatherInputs,
    KeepRows,
    RefreshInputs,
    RefreshOutputs,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
    Transform,
)

__all__ = [
    "AllReduceSum",
    "GatherInputs",
    "GatherMode",
    "HaloStoragePolicy",
    "KeepRows",
    "RefreshInputs",
    "RefreshOutputs",
    "RowInfo",
    "RowKind",
    "ScatterMode",
    "ScatterOutputs",
    "ShardTensor",
    "SliceOutputsOwned",
    "SliceOwned",
    "Transform",
]
