"""Collective operations that know their place: a mismatch between ranks is an error naming both, not a hang."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from chemtrain_mpi.errors import OrderError
from distmd_protocol import Comm

Bundle = list[np.ndarray]
Shapes = Sequence[tuple[tuple[int, ...], np.dtype]]


class Collectives:
    """A ``Comm`` whose every operation starts with a check that all ranks are in the same one.

    The check is an all-gather of the sequence number and the operation's name, so ranks that enter different
    operations still meet there.

    Parameters
    ----------
    comm
        The communicator underneath.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._number = 0
        self._names: list[str] = []

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._comm.size

    @property
    def mpi(self) -> Any | None:
        """The mpi4py communicator underneath, if there is one; for calls inside jit."""
        return getattr(self._comm, "mpi", None)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Give the operations inside a name in a user's words."""
        self._names.append(name)
        try:
            yield
        finally:
            self._names.pop()

    def barrier(self) -> None:
        """Return on no rank before every rank has called."""
        self._meet("barrier")

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """Return ``root``'s object on every rank."""
        self._meet("broadcast")
        return self._comm.broadcast(obj, root)

    def allgather(self, obj: Any) -> list[Any]:
        """Return every rank's object, by rank."""
        self._meet("allgather")
        return self._comm.allgather(obj)

    def share(self, mine: Mapping[int, Bundle], owners: Mapping[int, int]) -> dict[int, Bundle]:
        """Every state point's arrays on every rank, bit for bit.

        Peak memory beside the result: the arrays of one state point, once.

        Parameters
        ----------
        mine
            Arrays of the state points that this rank owns.
        owners
            Owning rank of each state point to be shared; the same on every rank.
        """
        self._meet("share")
        if self.size == 1:
            return {point: mine[point] for point in owners}
        layout = [[point, [[list(a.shape), a.dtype.name] for a in mine[point]]] for point in mine]
        layouts = {point: arrays for rank in self._comm.allgather(layout) for point, arrays in rank}
        result: dict[int, Bundle] = {}
        for point, owner in owners.items():
            if owner == self.rank:
                result[point] = mine[point]
                packed = np.frombuffer(b"".join(np.ascontiguousarray(a).tobytes() for a in mine[point]), np.uint8)
                self._broadcast_bytes(packed.copy(), owner)
            else:
                shapes = [(tuple(shape), np.dtype(dtype)) for shape, dtype in layouts[point]]
                total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
                result[point] = _unpack(self._broadcast_bytes(np.empty(total, np.uint8), owner), shapes)
        return result

    def sum(self, buffer: np.ndarray) -> np.ndarray:
        """Elementwise sum over ranks, in an order that depends on their number."""
        self._meet("sum")
        if self.size == 1:
            return buffer
        if hasattr(self._comm, "sum_buffer"):
            return self._comm.sum_buffer(np.ascontiguousarray(buffer))
        parts = self._comm.allgather(np.ascontiguousarray(buffer).tobytes())
        return np.sum([np.frombuffer(p, buffer.dtype).reshape(buffer.shape) for p in parts], axis=0, dtype=buffer.dtype)

    def _broadcast_bytes(self, packed: np.ndarray, root: int) -> np.ndarray:
        if hasattr(self._comm, "broadcast_buffer"):
            self._comm.broadcast_buffer(packed, root)
            return packed
        return np.frombuffer(self._comm.broadcast(packed.tobytes(), root), np.uint8)

    def _meet(self, operation: str) -> None:
        self._number += 1
        if self.size == 1:
            return
        name = ": ".join([*self._names, operation])
        entered = self._comm.allgather([self._number, name])
        if any(other != entered[0] for other in entered):
            listed = "; ".join(f"rank {rank}: number {n}, {what!r}" for rank, (n, what) in enumerate(entered))
            raise OrderError(
                f"ranks entered different operations ({listed}); every rank must call the trainer's methods in the "
                "same order, also those that read or write files"
            )


def _unpack(packed: np.ndarray, shapes: Shapes) -> Bundle:
    arrays, at = [], 0
    for shape, dtype in shapes:
        length = math.prod(shape) * dtype.itemsize
        arrays.append(packed[at : at + length].view(dtype).reshape(shape).copy() if length else np.empty(shape, dtype))
        at += length
    return arrays
