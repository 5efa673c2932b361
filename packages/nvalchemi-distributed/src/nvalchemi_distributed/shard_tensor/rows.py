"""What a tensor's rows are. Declared where a tensor enters a model and carried along, never guessed from a shape."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RowKind(StrEnum):
    """``NODE``: owned atoms, then ghosts. ``EDGE``: this rank's edges, each on the rank that owns its receiver.
    ``SYSTEM``: per-system or global numbers, the same on every rank or this rank's part of them."""

    NODE = "node"
    EDGE = "edge"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class RowInfo:
    """What is known about one tensor.

    Attributes:
        kind: see :class:`RowKind`.
        dim: which dimension counts the rows; 0 for ``SYSTEM``, whose rows need no tracking.
        fresh: ``NODE``: whether ghost rows equal their owners'.
        partial: ``SYSTEM``: whether this is one rank's part, to be summed over ranks before it is read.
        zero: ``SYSTEM``: all zeros, which are their own sum over ranks.
        refers: integers: what the values number (``receivers`` number nodes, ``batch_idx`` systems).
        owned: integers that number nodes: none of them is a ghost.
        layered: such integers stacked along dimension 0 (``edge_index``): ``owned`` of each.
    """

    kind: RowKind
    dim: int = 0
    fresh: bool = True
    partial: bool = False
    zero: bool = False
    refers: RowKind | None = None
    owned: bool = False
    layered: tuple[bool, ...] | None = None
