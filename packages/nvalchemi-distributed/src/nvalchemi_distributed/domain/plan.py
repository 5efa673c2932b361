"""The halo plan: which owned rows go to which rank, and which ghost rows come from where.

Fixed for an epoch. Letters: N owned atoms, G ghosts, P peers, B rows sent in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nvalchemi_distributed.domain.geometry import Boxes, meeting_ranks, within
from nvalchemi_distributed.domain.transport import Transport


@dataclass(frozen=True)
class HaloPlan:
    """Routing of one epoch.

    Attributes:
        n_owned: N.
        n_ghost: G. Padded rows are the N owned ones, then the ghosts in peer order.
        send_index: (B,) int64 owned rows in peer order; a row may go to several peers.
        peers: (P,) int64 group ranks with whom rows are exchanged.
        send_counts: (P,) int64, recv_counts: (P,) int64.
    """

    n_owned: int
    n_ghost: int
    send_index: Tensor
    peers: Tensor
    send_counts: Tensor
    recv_counts: Tensor

    @property
    def n_padded(self) -> int:
        """N + G."""
        return self.n_owned + self.n_ghost

    @cached_property
    def numbers(self) -> tuple[list[int], list[int], list[int]]:
        """Peers, send counts and receive counts as Python's numbers."""
        return self.peers.tolist(), self.send_counts.tolist(), self.recv_counts.tolist()


def build_plan(
    frac: Tensor, batch_idx: Tensor, boxes: Boxes, cell: Tensor, width: float, transport: Transport, lag: float = 0.0
) -> HaloPlan:
    """One copy of an atom for each rank whose widened box holds it or one of its images.

    Collective among ranks that share a halo: one exchange of counts.

    Args:
        frac: (N, 3) float64 of owned atoms, wrapped on periodic axes.
        batch_idx: (N,) system of each atom.
        boxes: all boxes.
        cell: (S, 3, 3) completed cells.
        width: ghost width in Å.
        transport: the mesh.
        lag: how far, in Å, an owned atom may lie outside this rank's box (migration hysteresis).
    """
    peers = meeting_ranks(boxes, cell, width + lag, transport.rank) if transport.size > 1 else []
    chosen = [within(frac, batch_idx, boxes, cell, width, r).nonzero().squeeze(-1) for r in peers]
    send = [int(c.numel()) for c in chosen]
    recv = transport.counts(send, peers, "plan.counts") if transport.size > 1 else []
    active = [k for k in range(len(peers)) if send[k] or recv[k]]
    empty = torch.zeros(0, dtype=torch.int64, device=frac.device)
    return HaloPlan(
        n_owned=int(frac.shape[0]),
        n_ghost=sum(recv),
        send_index=torch.cat([chosen[k] for k in active]) if active else empty,
        peers=torch.tensor([peers[k] for k in active], dtype=torch.int64),
        send_counts=torch.tensor([send[k] for k in active], dtype=torch.int64),
        recv_counts=torch.tensor([recv[k] for k in active], dtype=torch.int64),
    )
