"""What can be read off a trainer."""

from __future__ import annotations

from typing import Any

from chemtrain_mpi.collectives import Collectives
from chemtrain_mpi.sampler import Sampler
from chemtrain_mpi.trainers.history import History
from chemtrain_mpi.trainers.state import TrainerState
from chemtrain_mpi.trajectories import Params, Trajectory
from distmd_protocol import Comm


class Views:
    """Read-only properties of a trainer; none is collective."""

    _comm: Collectives
    _history: History
    _sampler: Sampler
    _state: TrainerState

    @property
    def params(self) -> Params:
        """Parameters after the last update."""
        return self._state.params

    @property
    def best_params(self) -> Params:
        """Parameters at the start of the epoch with the smallest loss."""
        return self._state.best_params

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry an update: loss, gradient norm, N_eff by state point, step size, seconds by phase."""
        return self._history.entries

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self._state.epoch

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._comm.size

    @property
    def comm(self) -> Comm:
        """The ranks; its operations count among the trainer's own, so every rank must call them."""
        return self._comm

    @property
    def trajectories(self) -> list[Trajectory] | None:
        """Stored trajectories by state point, the same on every rank."""
        return self._state.trajectories

    @property
    def compilations(self) -> dict[str, int]:
        """How often each program was compiled."""
        return dict(self._sampler.compilations)
