"""A trainer's files: checkpoints to resume from, and trajectories alone."""

from __future__ import annotations

import os
from pathlib import Path

from chemtrain_mpi.trainers.state import TrainerState
from chemtrain_mpi.trainers.store import Store


class Files:
    """What a trainer writes and reads; every method is collective."""

    _state: TrainerState
    _store: Store

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a resumable checkpoint. Collective; returns its folder.

        Raises
        ------
        CheckpointError
            On every rank, after a training that broke off within an epoch, or if the folder cannot be written.
        """
        return self._store.save(self._state, path)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint, bit for bit. Collective; nothing changes if it is refused on any rank.

        Raises
        ------
        CheckpointError
            On every rank: an error state, an unfinished epoch, another number of ranks, other shapes, another key,
            timings, state keywords or targets.
        """
        self._state = self._store.restore(self._state, path)

    def save_trajstates(self, path: str | os.PathLike[str]) -> Path:
        """Write the trajectories alone. Collective; rank zero writes, failures reach every rank."""
        return self._store.save_trajectories(self._state, path)

    def load_trajstates(self, path: str | os.PathLike[str]) -> None:
        """Take the trajectories of ``save_trajstates``, written under any number of ranks. Collective.

        Raises
        ------
        CheckpointError
            On every rank: other shapes, timings or state keywords.
        """
        self._state.trajectories = self._store.load_trajectories(self._state, path)
