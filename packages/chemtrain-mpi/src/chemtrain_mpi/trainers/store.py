"""Writing and reading a trainer's state: checkpoints, trajectories alone, and the state of a failed update."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chemtrain_mpi.collectives import Collectives
from chemtrain_mpi.trainers import checkpoints
from chemtrain_mpi.trainers.points import Points
from chemtrain_mpi.trainers.state import TrainerState
from chemtrain_mpi.trajectories import Trajectory
from distmd_protocol import CheckpointError, agree

PathLike = str | os.PathLike[str]

# Arguments that the rest of a run, or what a stored trajectory stands for, depends on. The targets are among the first
# because the epoch losses and the best parameters are measured by them.
_RESUMED = ("key", "timings", "state_kwargs", "targets")
_SAMPLED = ("timings", "state_kwargs")


class Store:
    """Files of one trainer. All methods but ``folder`` are collective; rank zero writes.

    Parameters
    ----------
    comm
        Ranks.
    points
        State points; they tell the shapes of trajectories before there are any.
    folder
        Where checkpoints and error states go; ``None``: no error states.
    digests
        Hashes of the trainer's arguments by name; a checkpoint carries those that make it this run.
    """

    def __init__(self, comm: Collectives, points: Points, folder: PathLike | None, digests: Mapping[str, str]) -> None:
        self._comm = comm
        self._points = points
        self._digests = digests
        self.folder = None if folder is None else Path(folder)

    def save(self, state: TrainerState, path: PathLike) -> Path:
        """Write a resumable checkpoint.

        Raises
        ------
        CheckpointError
            In the middle of an epoch: its remaining batches could not be made up for.
        """
        if state.mid_epoch:
            raise CheckpointError(
                f"epoch {state.epoch + 1} broke off after some of its updates, so there is nothing to save that could "
                "be resumed bit for bit; restore the last checkpoint, or train on to the end of an epoch"
            )
        meta = {
            "epoch_complete": True,
            "epoch": state.epoch,
            "update": state.update,
            "runs": state.runs,
            **self._kept(),
            "arguments": self._same(_RESUMED),
            "best_loss": state.best_loss,
            "epoch_losses": state.epoch_losses,
        }
        tree = {**state.arrays(), "trajectories": checkpoints.trajectory_arrays(state.require_trajectories())}
        with self._comm.named("save a checkpoint"):
            kind, step = checkpoints.TRAINER, state.epoch
            return checkpoints.save(Path(path), tree, kind=kind, step=step, comm=self._comm, meta=meta)

    def save_epoch(self, state: TrainerState) -> Path:
        """Write the checkpoint of a completed epoch into the folder."""
        assert self.folder is not None
        return self.save(state, checkpoints.epoch_path(self.folder, state.epoch))

    def restore(self, state: TrainerState, path: PathLike) -> TrainerState:
        """Read a checkpoint that has the structure of ``state``, which stays as it is."""
        with self._comm.named("restore a checkpoint"):
            template = {**state.arrays(), "trajectories": self._trajectory_template(state)}
            kind = checkpoints.TRAINER
            tree, meta = checkpoints.load(Path(path), template, kind=kind, comm=self._comm, expected=self._kept())
        self._require_same(Path(path), meta, _RESUMED)
        return TrainerState(
            params=tree["params"],
            opt_state=tree["opt_state"],
            best_params=tree["best_params"],
            best_loss=meta["best_loss"],
            epoch=meta["epoch"],
            update=meta["update"],
            epoch_losses=list(meta["epoch_losses"]),
            trajectories=self._restored(tree["trajectories"]),
            runs=meta["runs"],
        )

    def save_trajectories(self, state: TrainerState, path: PathLike) -> Path:
        """Write the trajectories alone."""
        tree = checkpoints.trajectory_arrays(state.require_trajectories())
        with self._comm.named("save trajectories"):
            kind, step = checkpoints.TRAJECTORIES, state.epoch
            meta = {**self._kept(), "arguments": self._same(_SAMPLED)}
            return checkpoints.save(Path(path), tree, kind=kind, step=step, comm=self._comm, meta=meta)

    def load_trajectories(self, state: TrainerState, path: PathLike) -> list[Trajectory]:
        """Read trajectories written under any number of ranks."""
        with self._comm.named("load trajectories"):
            template = self._trajectory_template(state)
            kind, kept = checkpoints.TRAJECTORIES, self._kept()
            tree, meta = checkpoints.load(Path(path), template, kind=kind, comm=self._comm, expected=kept)
        self._require_same(Path(path), meta, _SAMPLED)
        return self._restored(tree)

    def save_error_state(self, state: TrainerState, epoch: int, batch: list[int], error: Exception) -> None:
        """Write what a rejected update left untouched, for diagnosis; never resumable."""
        if self.folder is None:
            return
        tree = {**state.arrays(), "trajectories": checkpoints.trajectory_arrays(state.require_trajectories())}
        meta = {"epoch_complete": False, "epoch": epoch, "batch": batch, "error": str(error)}
        with self._comm.named("write an error state"):
            path = checkpoints.error_path(self.folder, epoch)
            checkpoints.save(path, tree, kind=checkpoints.ERROR_STATE, step=epoch, comm=self._comm, meta=meta)

    def _kept(self) -> dict[str, Any]:
        return {"num_chains": self._points.chains, "free_energies": self._points.free_energies}

    def _same(self, names: tuple[str, ...]) -> dict[str, str]:
        return {name: self._digests[name] for name in names}

    def _require_same(self, path: Path, meta: Mapping[str, Any], names: tuple[str, ...]) -> None:
        # The digests agree over ranks, as does the file, so all ranks raise alike.
        stored = meta.get("arguments", {})
        differing = [name for name in names if stored.get(name) != self._digests[name]]
        if differing:
            raise CheckpointError(
                f"{path} belongs to a run with another {', another '.join(differing)}; construct the trainer with what "
                "it was written with"
            )

    def _restored(self, tree: dict[str, Any]) -> list[Trajectory]:
        return [self._points.place(trajectory) for trajectory in checkpoints.restore_trajectories(tree)]

    def _trajectory_template(self, state: TrainerState) -> dict:
        starts = state.trajectories
        with agree(self._comm, "preparing the state points"):
            starts = self._points.start(state.params) if starts is None else starts
            energy = self._points.sampler.energy_dtype(state.params, starts[0])
        params = state.params if self._points.free_energies else None
        snapshots = self._points.sampler.timings.snapshots * self._points.chains
        return checkpoints.trajectory_template(starts, snapshots, energy, params)
