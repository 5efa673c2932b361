"""Sums and maxima over ranks: the only file that reduces scalars. Everything is reduced in float64."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nvalchemi_distributed.domain.transport import Transport


class Reducer(Protocol):
    """What integrators and hooks reduce with. On one process it is the identity."""

    def sum(self, value: Tensor, name: str = "sum") -> Tensor:
        """Sum over ranks of a detached tensor."""
        ...

    def max(self, value: Tensor, name: str = "max") -> Tensor:
        """Largest over ranks, elementwise."""
        ...


class LocalReducer:
    """The identity: one process holds every atom."""

    def sum(self, value: Tensor, name: str = "sum") -> Tensor:
        """``value`` itself."""
        return value

    def max(self, value: Tensor, name: str = "max") -> Tensor:
        """``value`` itself."""
        return value


class MeshReducer:
    """Reductions over the ranks of one mesh."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def sum(self, value: Tensor, name: str = "sum") -> Tensor:
        """Sum over ranks; accumulated in float64, returned in the dtype of ``value``."""
        return self._reduce(value, dist.ReduceOp.SUM, name)

    def max(self, value: Tensor, name: str = "max") -> Tensor:
        """Largest over ranks, elementwise; NaN is the caller's to exclude."""
        return self._reduce(value, dist.ReduceOp.MAX, name)

    def _reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType, name: str) -> Tensor:
        if self._transport.size == 1:
            return value.detach()
        self._transport.traffic.reductions += 1
        self._transport.traffic.note(name)
        buffer = value.detach().to(torch.float64).clone()
        dist.all_reduce(buffer, op=op, group=self._transport.group)
        return buffer.to(value.dtype)
