"""Moves rows between ranks: the only file that sends tensors point to point.

``gloo`` traps met here: a blocking send on both sides deadlocks, a dropped handle loses its message, a receive buffer
that is too large succeeds with a stale tail, and only global ranks are addresses. Letters: B rows, W ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from nvalchemi_distributed.collectives import all_gather_equal, no_roll_call
from nvalchemi_distributed.domain.gloo_threads import keep_behind_the_ranks
from nvalchemi_distributed.errors import TransportError

# Weak: an entry lives as long as its transport does. Nothing is found here that was not handed in by key.
_LIVE: weakref.WeakValueDictionary[str, Transport] = weakref.WeakValueDictionary()
_SERIAL = itertools.count()
# Tags from here on are reductions'; exchanges of rows have tag 0.
_REDUCTIONS = 1


@dataclass
class Traffic:
    """What went through, for tests and for the table of what a step does.

    Attributes:
        exchanges: collective calls that move rows.
        messages, bytes_sent: point to point, as sender; all-to-all counts and all-gathers of a rebuild are not in them.
        reductions: all-reduces; the messages they are made of are not in the line above.
        by_name: calls of each kind.
        by_peer: messages to each group rank.
    """

    exchanges: int = 0
    messages: int = 0
    bytes_sent: int = 0
    reductions: int = 0
    by_name: dict[str, int] = field(default_factory=dict)
    by_peer: dict[int, int] = field(default_factory=dict)

    def note(self, name: str) -> None:
        """Count one operation under its name."""
        self.by_name[name] = self.by_name.get(name, 0) + 1


class Transport:
    """Row exchange inside one process group.

    Args:
        group: the ranks that exchange; ``None`` is a single rank, and nothing is sent.
        roll_call: debug mode; called with the name of each operation before it.
    """

    def __init__(self, group: dist.ProcessGroup | None, roll_call: Callable[[str], None] = no_roll_call) -> None:
        self.roll_call = roll_call
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._global = [0] if group is None else [dist.get_global_rank(group, r) for r in range(self.size)]
        # As in GroupComm: the default group is named by None, not held.
        self.group = None if group is None or group is dist.group.WORLD else group
        if self.size > 1:
            keep_behind_the_ranks()
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
        self.roll_call(name)
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
                self.traffic.by_peer[peer] = self.traffic.by_peer.get(peer, 0) + 1
                self.traffic.bytes_sent += block.numel() * block.element_size()
                pending.append(_required(dist.isend(block, dst=self._global[peer], group=self.group)))
        for work in pending:
            work.wait()
        return received

    def counts(self, send: Sequence[int], peers: Sequence[int], name: str) -> list[int]:
        """Tell each peer how many rows it will get, and learn how many come from it."""
        parts = [torch.tensor([c], dtype=torch.int64) for c in send]
        return [int(t[0]) for t in self.exchange(parts, peers, [1] * len(peers), name)]

    def all_reduce(self, buffer: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``combine`` of every rank's ``buffer``, the same bits on every rank; a few numbers, not arrays of atoms.

        Pairs of ranks swap what they have, log2(W) times: gloo's own all-reduce goes around a ring of all W ranks, and
        takes several times as long for two. Ranks beyond the largest power of two give theirs to a partner first and
        get the result from it.

        Args:
            buffer: contiguous, the same shape and dtype on every rank.
            combine: ``torch.add`` or ``torch.maximum``: what a pair makes must not depend on the order.
        """
        if not buffer.numel():
            return buffer
        whole = 1 << (self.size.bit_length() - 1)
        extra = self.size - whole
        if self.rank >= whole:
            self._swap(buffer, None, self.rank - whole)
            return self._swap(None, torch.empty_like(buffer), self.rank - whole)
        partner = self.rank + whole if self.rank < extra else None
        if partner is not None:
            buffer = combine(buffer, self._swap(None, torch.empty_like(buffer), partner))
        step = 1
        while step < whole:
            buffer = combine(buffer, self._swap(buffer, torch.empty_like(buffer), self.rank ^ step))
            step *= 2
        if partner is not None:
            self._swap(buffer, None, partner)
        return buffer

    def _swap(self, mine: Tensor | None, out: Tensor | None, peer: int) -> Tensor:
        """Send ``mine`` and fill ``out``, where given. The number of bytes is the tag, so that reductions of ranks that
        disagree wait for each other, as gloo's own would, and never mistake each other's numbers."""
        tag = _REDUCTIONS + sum(t.numel() * t.element_size() for t in (mine if out is None else out,) if t is not None)
        rank = self._global[peer]
        pending = []
        if out is not None:
            pending.append(_required(dist.irecv(out, src=rank, group=self.group, tag=tag)))
        if mine is not None:
            pending.append(_required(dist.isend(mine, dst=rank, group=self.group, tag=tag)))
        for work in pending:
            work.wait()
        return mine if out is None else out  # type: ignore[return-value]

    def all_to_all(self, rows: Tensor, send: Sequence[int], name: str) -> tuple[Tensor, list[int]]:
        """Rows for any rank (migration, partition): ``rows`` in rank order, ``send[r]`` of them for rank r.

        Returns:
            The received rows in rank order, and how many came from each rank.
        """
        if self.size == 1:
            return rows, list(send)
        self.roll_call(name)
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
        self.roll_call(name)
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
