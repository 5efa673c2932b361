"""Neighbour-list capacities: a geometric ladder common to all state points, so that programs are few."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_md import dataclasses as jax_md_dataclasses
from jax_md import partition

from chemtrain_mpi import moving_box
from chemtrain_mpi.errors import ArgumentError

_FIRST_RUNG = 8
_SPARE = 1.1
"""A new state point gets the rung above what its start needs and a tenth more: a liquid fluctuates."""


@dataclass(frozen=True)
class Capacity:
    """Static sizes of a neighbour list.

    Attributes
    ----------
    slots
        Neighbour slots a particle (dense format) or in all (sparse formats).
    cell
        Slots of a cell of the cell list; 0 where no cell list is used.
    """

    slots: int
    cell: int = 0


def rung(needed: float, multiplier: float) -> int:
    """Smallest rung of the ladder 8, ⌈8m⌉, ⌈⌈8m⌉m⌉, … that is at least ``needed``."""
    size = _FIRST_RUNG
    while size < needed:
        size = max(size + 1, math.ceil(size * multiplier))
    return size


class NeighborLists:
    """Allocates lists of a stated capacity, with the static parts shared, so that equal capacities share a program.

    Parameters
    ----------
    neighbor_fn
        From ``jax_md.partition.neighbor_list``.
    multiplier
        Ratio of two rungs, above 1.
    """

    def __init__(self, neighbor_fn: partition.NeighborListFns, multiplier: float) -> None:
        if not multiplier > 1.0 or not math.isfinite(multiplier):
            raise ArgumentError(f"overflow_capacity_multiplier is {multiplier}; it must be above 1 and finite")
        self._fn = neighbor_fn
        self._multiplier = multiplier
        # jax-md makes a new cell-list function at every allocation; a new static object would be a new program.
        self._cell_fns: dict[float, Callable[..., Any]] = {}

    def reach(self) -> tuple[float, float]:
        """Cutoff and skin."""
        return moving_box.reach(self._fn)

    def first(self, position: jax.Array, **box: Any) -> Capacity:
        """Capacity for a state point that starts at ``position`` ``(N, 3)``: the first rung with some room."""
        fresh = self._fn.allocate(position, **box)
        slots = rung(_occupancy(fresh) * _SPARE, self._multiplier)
        cell = 0 if fresh.cell_list_fn is None else rung(fresh.cell_list_capacity, self._multiplier)
        return Capacity(min(slots, _limit(fresh)), cell)

    def larger(self, capacity: Capacity) -> Capacity:
        """The next rung of both sizes."""
        slots = rung(capacity.slots + 1, self._multiplier)
        return Capacity(slots, rung(capacity.cell + 1, self._multiplier) if capacity.cell else 0)

    def allocate(self, position: jax.Array, capacity: Capacity, **box: Any) -> partition.NeighborList:
        """The list that an update at ``position`` ``(N, 3)`` gives at this capacity; its overflow bit is honest."""
        fresh = self._fn.allocate(position, **box)
        slots = min(capacity.slots, _limit(fresh))
        idx = fresh.idx[:, :slots]
        if idx.shape[1] < slots:
            idx = jnp.pad(idx, ((0, 0), (0, slots - idx.shape[1])), constant_values=position.shape[0])
        overflow = partition.PEC.NEIGHBOR_LIST_OVERFLOW
        error = fresh.error.update(overflow, _occupancy(fresh) > slots)
        cell_size, cell_fn, cell = None, None, None
        if fresh.cell_list_fn is not None:
            cell_size = float(fresh.cell_size)
            cell_fn = self._cell_fns.setdefault(cell_size, fresh.cell_list_fn)
            cell = capacity.cell or rung(fresh.cell_list_capacity, self._multiplier)
        return jax_md_dataclasses.replace(
            fresh,
            idx=idx,
            error=error,
            max_occupancy=slots,
            cell_list_capacity=cell,
            cell_size=cell_size,
            cell_list_fn=cell_fn,
        )


def _occupancy(neighbors: partition.NeighborList) -> int:
    """Slots really used: the longest row (dense) or the number of pairs (sparse)."""
    idx, n = np.asarray(neighbors.idx), neighbors.reference_position.shape[0]
    if partition.is_sparse(neighbors.format):
        return int((idx[0] < n).sum())
    return int((idx < n).sum(axis=1).max(initial=0))


def _limit(neighbors: partition.NeighborList) -> int:
    n = neighbors.reference_position.shape[0]
    if not partition.is_sparse(neighbors.format):
        return max(n - 1, 1)
    return n * (n - 1) // (1 if neighbors.format is partition.NeighborListFormat.Sparse else 2)
