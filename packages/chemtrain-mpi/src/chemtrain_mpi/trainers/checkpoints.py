"""What of a trainer is stored, and how it comes back: the protocol's checkpoints, never a pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chemtrain_mpi.capacity import Capacity
from chemtrain_mpi.free_energy import FreeEnergyRecord
from chemtrain_mpi.trajectories import Trajectory
from chemtrain_mpi.version import VERSION
from distmd_protocol import CheckpointError, Comm, flatten, load_checkpoint, save_checkpoint

TRAINER = "difftre-trainer"
TRAJECTORIES = "trajectories"
ERROR_STATE = "error-state"
_ERROR_SUFFIX = "_error_state"


def packages() -> dict[str, str]:
    """Versions that go into the manifest."""
    return {"chemtrain-mpi": VERSION, **{name: version(name) for name in ("jax", "jax-md", "optax")}}


def trajectory_arrays(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Trajectories as a tree of arrays, by state point."""
    return {
        str(k): {
            "chains": t.chains,
            "snapshots": t.snapshots,
            "reference_energy": t.reference_energy,
            "reference_kwargs": t.reference_kwargs,
            "free_energy": t.free_energy,
            "capacity": np.array([t.capacity.slots, t.capacity.cell], np.int64),
        }
        for k, t in enumerate(trajectories)
    }


def trajectory_template(
    starts: Sequence[Trajectory], snapshots: int, energy_dtype: Any, params: Any = None
) -> dict[str, Any]:
    """The tree that ``trajectory_arrays`` gives, with empty arrays, from state points before their first step.

    Parameters
    ----------
    snapshots
        ``T``, of all chains of a state point.
    params
        Parameters like those that each trajectory keeps for its free energy; ``None``: none are kept.
    """

    def stacked(leaf: Any) -> jax.Array:
        return jnp.zeros((snapshots, *leaf.shape), leaf.dtype)

    record = None if params is None else FreeEnergyRecord(params, np.zeros(3))
    filled = [
        replace(
            t,
            snapshots=jax.tree.map(stacked, t.chains[0].state),
            reference_energy=jnp.zeros((snapshots,), energy_dtype),
            free_energy=record,
        )
        for t in starts
    ]
    return trajectory_arrays(filled)


def restore_trajectories(stored: dict[str, Any]) -> list[Trajectory]:
    """Trajectories from a restored tree."""
    result = []
    for k in range(len(stored)):
        part = stored[str(k)]
        slots, cell = (int(size) for size in part["capacity"])
        result.append(
            Trajectory(
                part["chains"],
                Capacity(slots, cell),
                part["snapshots"],
                part["reference_energy"],
                dict(part["reference_kwargs"]),
                part["free_energy"],
            )
        )
    return result


def save(path: Path, tree: Any, *, kind: str, step: int, comm: Comm, meta: dict[str, Any]) -> Path:
    """Write a tree of arrays that all ranks hold alike. Collective; returns the checkpoint's folder."""
    pending = save_checkpoint(path, flatten(tree), kind=kind, step=step, comm=comm, meta=meta, packages=packages())
    return pending.wait()


def load(
    path: Path, template: Any, *, kind: str, comm: Comm, expected: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Read a tree of arrays and the meta data. Collective.

    Parameters
    ----------
    expected
        Trainer arguments that decide what a trajectory holds, and must be those that the file was written with.

    Raises
    ------
    CheckpointError
        Also for an error state, by its name, before anything is read; and for another number of ranks.
    """
    if path.name.removesuffix(".pkl").endswith(_ERROR_SUFFIX):
        raise CheckpointError(
            f"{path} records a failed update, for diagnosis; it cannot be resumed. Restore a checkpoint of a completed "
            "epoch"
        )
    manifest = load_checkpoint(path, kind=kind, comm=comm)
    if kind == TRAINER and manifest.world_size != comm.size:
        raise CheckpointError(
            f"{path} was written by {manifest.world_size} MPI ranks and this run has {comm.size}; resume with "
            f"mpirun -np {manifest.world_size}"
        )
    if not manifest.meta.get("epoch_complete", True):
        raise CheckpointError(f"{path} is from the middle of an epoch; restore one of a completed epoch")
    for name, value in expected.items():
        if manifest.meta.get(name) != value:
            raise CheckpointError(
                f"{path} was written with {name}={manifest.meta.get(name)} and this trainer has {name}={value}; "
                "construct the trainer with what it was written with"
            )
    return manifest.restore(template), dict(manifest.meta)


def error_path(folder: Path, epoch: int) -> Path:
    """Where the state of a failed update in ``epoch`` goes."""
    return folder / f"epoch-{epoch:06d}{_ERROR_SUFFIX}"


def epoch_path(folder: Path, epoch: int) -> Path:
    """Where the checkpoint after ``epoch`` goes."""
    return folder / f"epoch-{epoch:06d}"
