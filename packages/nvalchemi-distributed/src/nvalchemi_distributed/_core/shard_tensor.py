"""Where the guide looks for :class:`ShardTensor`."""

from __future__ import annotations

from nvalchemi_distributed.shard_tensor import ShardTensor

__all__ = ["ShardTensor"]
