"""What trajectories and neighbour lists will take, told before the first simulation.

``K`` state points, ``C`` chains of ``T`` snapshots each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax

from chemtrain_mpi.sampler import Sampler
from chemtrain_mpi.trajectories import Trajectory

_log = logging.getLogger(__name__)


def estimate(sampler: Sampler, starts: Sequence[Trajectory], params: Any = None) -> tuple[int, int]:
    """Bytes on every rank of the trajectories of all ``K`` state points, and of neighbour lists at first capacity.

    Parameters
    ----------
    starts
        State points before their first step.
    params
        Parameters that each trajectory keeps, for its free energy; ``None``: none.
    """
    first, snapshots = starts[0], sampler.timings.snapshots
    states = len(first.chains) * (snapshots + 1)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(first.chains[0].state)) * states
    stored += sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    # A rank keeps the lists of all state points that were ever its share, until their next trajectory.
    lists = sampler.neighbors(first)[0].idx.nbytes * states
    return stored * len(starts), lists * len(starts)


def log_estimate(sampler: Sampler, starts: Sequence[Trajectory], params: Any = None) -> None:
    """One line in the log. Not collective; call it on rank zero."""
    stored, lists = estimate(sampler, starts, params)
    _log.info(
        "memory on every rank: %.1f MB of trajectories and, at first capacity, up to %.1f MB of neighbour lists",
        stored / 1e6,
        lists / 1e6,
    )
