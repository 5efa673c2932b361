"""Moves rows between ranks: the only file that sends tensors point to point.

``gloo`` traps met here: a blocking send on both sides deadlocks, a dropped handle loses its message, a receive buffer
that is too large succeeds with a stale tail, and only global ranks are addresses. Letters: B rows, W ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from nvalchemi_distributed.collectives import all_gather_equal
from nvalchemi_distributed.errors import TransportError

# Weak: an entry lives as long as its transport does. Nothing is found here that was not handed in by key.
_LIVE: weakref.WeakValueDictionary[str, Transport] = weakref.WeakValueDictionary()
_SERIAL = itertools.count()


@dataclass
class Traffic:
    """What went through, for tests and for the table of what a step does."""

    exchanges: int = 0
    messages: int = 0
    bytes_sent: int = 0
    reductions: int = 0
    by_name: dict[str, int] = field(default_factory=dict)

    def note(self, name: str) -> None:
        """Count one operation under its name."""
        self.by_name[name] = self.by_name.get(name, 0) + 1


class Transport:
    """Row exchange inside one process group.

    Args:
        group: the ranks that exchange; ``None`` is a single rank, and nothing is sent.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._global = [0] if group is None else [dist.get_global_rank(group, r) for r in range(self.size)]
        # As in GroupComm: the default group is named by None, not held.
        self.group = None if group is None or group is dist.group.WORLD else group
        self.traffic = Traffic()
        self.key = f"transport-{next(_SERIAL)}"
        _LIVE[self.key] = self

    def close(self) -> None:
        """Let go of the group."""
        self.group = None
        _LIVE.pop(self.key, None)

    def exchange(self, parts: Sequence[Tensor], peers: Sequence[int], counts: Sequence[int], name: str) -> list[Tensor]:
        """Send ``parts[k]`` to ``peers[k]`` and receive ``counts[k]`` rows from it.

        Args:
            parts: one tensor a peer, equal row shape and dtype; no message where it has no rows.
            peers: group ranks, never this one. Both sides name each other.
            counts: rows to receive from each.
            name: for the counters.

        Returns:
            One tensor a peer, ``counts[k]`` rows.
        """
        self.traffic.exchanges += 1
        self.traffic.note(name)
        pending: list[dist.Work] = []
        kept: list[Tensor] = []
        received: list[Tensor] = []
        for part, peer, count in zip(parts, peers, counts, strict=True):
            out = part.new_empty((count, *part.shape[1:]))
            received.append(out)
            if out.numel():
                pending.append(_required(dist.irecv(out, src=self._global[peer], group=self.group)))
        for part, peer in zip(parts, peers, strict=True):
            if part.numel():
                block = part.detach().contiguous()
                kept.append(block)
                self.traffic.messages += 1
                self.traffic.bytes_sent += block.numel() * block.element_size()
                pending.append(_required(dist.isend(block, dst=self._global[peer], group=self.group)))
        for work in pending:
            work.wait()
        return received

    def counts(self, send: Sequence[int], peers: Sequence[int], name: str) -> list[int]:
        """Tell each peer how many rows it will get, and learn how many come from it."""
        parts = [torch.tensor([c], dtype=torch.int64) for c in send]
        return [int(t[0]) for t in self.exchange(parts, peers, [1] * len(peers), name)]

    def all_to_all(self, rows: Tensor, send: Sequence[int], name: str) -> tuple[Tensor, list[int]]:
        """Rows for any rank (migration, partition): ``rows`` in rank order, ``send[r]`` of them for rank r.

        Returns:
            The received rows in rank order, and how many came from each rank.
        """
        if self.size == 1:
            return rows, list(send)
        self.traffic.exchanges += 1
        self.traffic.note(name)
        out = torch.tensor(list(send), dtype=torch.int64)
        recv_counts = torch.empty_like(out)
        dist.all_to_all_single(recv_counts, out, group=self.group)
        recv = recv_counts.tolist()
        others = [r for r in range(self.size) if r != self.rank and (send[r] or recv[r])]
        start = [sum(send[:r]) for r in range(self.size)]
        parts = [rows[start[r] : start[r] + send[r]] for r in others]
        got = dict(zip(others, self.exchange(parts, others, [recv[r] for r in others], name + ".rows"), strict=True))
        own = rows[start[self.rank] : start[self.rank] + send[self.rank]]
        pieces = [own if r == self.rank else got.get(r, rows[:0]) for r in range(self.size)]
        return torch.cat(pieces), recv

    def all_gather(self, rows: Tensor, name: str) -> Tensor:
        """Every rank's rows in rank order, on every rank. Uneven counts are padded: gloo gathers equal shapes only."""
        if self.size == 1:
            return rows
        self.traffic.exchanges += 1
        self.traffic.note(name)
        mine = torch.tensor([rows.shape[0]], dtype=torch.int64)
        counts = torch.empty(self.size, dtype=torch.int64)
        all_gather_equal(counts, mine, self.group)
        most = int(counts.max())
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        out = rows.new_empty((self.size * most, *rows.shape[1:]))
        all_gather_equal(out, padded, self.group)
        return torch.cat([out[r * most : r * most + int(c)] for r, c in enumerate(counts.tolist())])


def live_transport(key: str) -> Transport:
    """The transport of that key. Custom ops carry tensors and strings only, so they name it."""
    try:
        return _LIVE[key]
    except KeyError:
        raise TransportError(
            f"{key} is closed: its DomainParallel no longer exists; keep it until backward has run"
        ) from None


def _required(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise TransportError("this rank is not a member of the process group it was given; pass a mesh that holds it")
    return work


def pack(fields: dict[str, Tensor]) -> Tensor:
    """Per-atom fields as one (N, B) uint8 block, in name order: any dtype, one message."""
    columns = []
    for name in sorted(fields):
        value = fields[name].detach().contiguous()
        n = value.shape[0]
        flat = value.to(torch.uint8) if value.dtype is torch.bool else value
        columns.append(
            flat.reshape(n, -1).view(torch.uint8)
            if flat.numel()
            else flat.new_zeros((n, _row_bytes(flat)), dtype=torch.uint8)
        )
    return torch.cat(columns, dim=1) if columns else torch.zeros(0, 0, dtype=torch.uint8)


def unpack(block: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of :func:`pack`; ``like`` gives dtype and row shape of each field."""
    out: dict[str, Tensor] = {}
    at = 0
    n = block.shape[0]
    for name in sorted(like):
        template = like[name]
        width = _row_bytes(template)
        dtype = torch.uint8 if template.dtype is torch.bool else template.dtype
        # A copy even where the slice is contiguous: a view as another type needs an aligned start.
        piece = block[:, at : at + width].clone(memory_format=torch.contiguous_format)
        at += width
        value = piece.view(dtype).reshape(n, *template.shape[1:]) if n else template.new_zeros((0, *template.shape[1:]))
        out[name] = value.to(torch.bool) if template.dtype is torch.bool else value
    return out


def _row_bytes(value: Tensor) -> int:
    row = 1
    for d in value.shape[1:]:
        row *= d
    return row * (1 if value.dtype is torch.bool else value.element_size())
