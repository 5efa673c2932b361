"""Holds a rank to one core. No import of jax: threads that exist already would stay where they are."""

from __future__ import annotations

import os

_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_RANK", "SLURM_LOCALID")


def hold_to_one_core() -> int:
    """Bind this process to one core, by its local rank, and return the core; ranks share only where cores are few."""
    cores = sorted(os.sched_getaffinity(0))
    local = next((int(os.environ[name]) for name in _LOCAL_RANK if name in os.environ), 0)
    core = cores[local % len(cores)]
    os.sched_setaffinity(0, {core})
    return core
