"""The object through which MACE, NequIP and SevenNet let a program that decomposes space refresh ghost features.

The three packages share one protocol, made for LAMMPS' ML-IAP: a layer works on owned rows, pads them with zero rows
for the ghosts, and calls ``forward_exchange`` of an object handed in with the data; the backward pass calls
``reverse_exchange``. So ghost rows cost no node-wise work, and the packages need no change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvalchemi_distributed.context import DistributedContext, current_dd_context
from nvalchemi_distributed.data.batch import Batch


class GhostExchange:
    """Owner → ghost, and its adjoint, between buffers of (L + N, F) rows: stand-ins, owned atoms, then ghosts.

    Args:
        context: the decomposed forward.
        n_stand_ins: L rows before the owned ones that are no atoms of the system and go nowhere.

    Attributes:
        nlocal: rows before the ghosts.
        ntotal: all rows.
    """

    def __init__(self, context: DistributedContext, n_stand_ins: int = 0) -> None:
        self._context, self._first = context, n_stand_ins
        self.nlocal, self.ntotal = n_stand_ins + context.n_owned, n_stand_ins + context.n_padded

    def forward_exchange(self, source: Tensor, out: Tensor, width: int) -> None:
        """``out`` = ``source`` with ghost rows replaced by their owners'. Collective among ranks that share a halo."""
        out[: self._first] = source[: self._first]
        out[self._first :] = self._context.refresh(source[self._first :])

    def reverse_exchange(self, source: Tensor, out: Tensor, width: int) -> None:
        """``out`` = ``source`` with ghost rows added to their owners' and cleared."""
        out[: self._first] = source[: self._first]
        out[self._first :] = self._context.fold(source[self._first :])

    def refresh(self, local: Tensor) -> Tensor:
        """(L + M, …) rows before the ghosts to (L + N, …), differentiable."""
        if not self._first:
            return self._context.refresh_owned(local)
        return torch.cat([local[: self._first], self._context.refresh_owned(local[self._first :])])


class NoGhosts:
    """The same on a single process: nothing to exchange."""

    def __init__(self, n_rows: int) -> None:
        self.nlocal = self.ntotal = n_rows

    def forward_exchange(self, source: Tensor, out: Tensor, width: int) -> None:
        """``out`` = ``source``."""
        out.copy_(source)

    reverse_exchange = forward_exchange

    def refresh(self, owned: Tensor) -> Tensor:
        """``owned`` itself."""
        return owned


def ghost_exchange(data: Batch) -> GhostExchange | NoGhosts:
    """The exchange of the decomposed forward that is running, for ``data``."""
    context = current_dd_context()
    if not context.is_distributed:
        return NoGhosts(data.num_nodes)
    return GhostExchange(context, data.num_nodes - context.n_padded)
