"""Tensors that know what their rows are, and what each operation on them means over ranks."""

from __future__ import annotations

# Imported for the table: each enters its operations.
from nvalchemi_distributed.shard_tensor import (
    along,
    autograd,
    gather,
    linear,
    metadata,
    other,
    rowwise,
    scatter,
    shape,
    system,
)
from nvalchemi_distributed.shard_tensor.registry import REGISTRY
from nvalchemi_distributed.shard_tensor.rows import RowInfo, RowKind
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor

HANDLERS = (metadata, rowwise, along, shape, gather, scatter, linear, system, autograd, other)
"""The modules that hold the meanings, in the order of the documentation."""

__all__ = ["HANDLERS", "REGISTRY", "RowInfo", "RowKind", "ShardTensor"]
