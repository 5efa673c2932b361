"""Which state points an update sees, and which rank computes which."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import numpy as np

from chemtrain_mpi.errors import ArgumentError


def check_batch_size(sim_batch_size: int, points: int, ranks: int) -> int:
    """The batch size, with −1 resolved to all state points.

    Raises
    ------
    ArgumentError
        If it is not between the number of ranks and the number of state points.
    """
    size = points if sim_batch_size == -1 else sim_batch_size
    if not 1 <= size <= points:
        raise ArgumentError(f"sim_batch_size is {sim_batch_size}; use -1 (all) or 1 to {points}, the state points")
    if size < ranks:
        raise ArgumentError(
            f"sim_batch_size is {size}, fewer than the {ranks} MPI ranks, so some would have nothing to do; use a "
            f"batch of at least {ranks} (-1: all {points} state points), or start at most {size} ranks"
        )
    return size


def epoch_batches(key: jax.Array, points: int, batch: int, stale: Collection[int] | None = None) -> list[list[int]]:
    """Batches of one epoch: every state point exactly once, the remainder folded into the last batch.

    Parameters
    ----------
    key
        Of this epoch; the same on every rank.
    points, batch
        Number of state points and batch size, ``batch ≤ points``.
    stale
        State points to be recomputed; they are put together, so that few batches mix them with fresh ones.
    """
    order = [int(point) for point in np.asarray(jax.random.permutation(key, points))]
    if stale is not None:
        order = [p for p in order if p in stale] + [p for p in order if p not in stale]
    count = points // batch
    batches = [order[i * batch : (i + 1) * batch] for i in range(count)]
    batches[-1].extend(order[count * batch :])
    return batches


def deal(points: Sequence[int], ranks: int) -> dict[int, int]:
    """Rank of each state point, dealt in turn: the loads differ by one at most, wherever the points came from."""
    return {point: position % ranks for position, point in enumerate(points)}
