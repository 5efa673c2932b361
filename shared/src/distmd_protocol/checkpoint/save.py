"""Writing a checkpoint: nothing under its final name until everything is on the disk."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distmd_protocol.arrays import to_stored
from distmd_protocol.checkpoint.commit import Job, open_partial, see_partial
from distmd_protocol.checkpoint.header import build_header
from distmd_protocol.checkpoint.keys import check_key
from distmd_protocol.checkpoint.limits import MAX_STEP
from distmd_protocol.checkpoint.manifest import check_kind
from distmd_protocol.checkpoint.pending import PendingSave
from distmd_protocol.checkpoint.together import on_rank_zero, together
from distmd_protocol.comm import Comm, LocalComm
from distmd_protocol.dtypes import StoredArray
from distmd_protocol.errors import CheckpointError
from distmd_protocol.precision import PrecisionPolicy
from distmd_protocol.version import VERSION


def save_checkpoint(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Any],
    *,
    kind: str,
    step: int,
    comm: Comm | None = None,
    meta: Mapping[str, Any] | None = None,
    packages: Mapping[str, str] | None = None,
    replicated: bool = True,
    wait: bool = True,
    keep_last: int | None = None,
) -> PendingSave:
    """Write a checkpoint. Collective.

    A reader sees either nothing, or the previous checkpoint of this name, or the whole new one.

    Parameters
    ----------
    path
        ``FOLDER/NAME``. The folder is made if need be. A checkpoint of that name is replaced.
    arrays
        Arrays by key: numpy, JAX or torch, or Python scalars (see ``flatten``).
    kind
        What is stored: ``"difftre-trainer"``, ``"trajectories"``, ``"dynamics"``, ``"potential"``, ``"model-spec"``,
        ``"error-state"``, or a name of your own in lower case.
    step
        Position of the run, not negative. ``latest`` goes by it.
    comm
        Ranks that take part; ``None`` is this process alone.
    meta
        JSON object that is stored beside the arrays.
    packages
        Versions of the packages that write.
    replicated
        All ranks hold the same arrays: rank zero writes them, the others' are not looked at. Otherwise each rank
        writes a shard of its own, and all must see the same file system.
    wait
        ``False`` copies the arrays and writes in the background, so that later updates never reach the file. With
        ``replicated=True`` the commit happens there too; otherwise it happens in ``PendingSave.wait()``.
    keep_last
        After the commit remove all but this many of the newest checkpoints of the same kind in the folder. The one
        just written always stays.

    Raises
    ------
    CheckpointError
        On every rank (as a ``RankError`` naming the failed ranks, if there are several), if anything fails. What was
        there before is still there.
    """
    comm = LocalComm() if comm is None else comm
    target = Path(os.path.abspath(path))
    writing = comm.rank == 0 or not replicated
    stored: dict[str, StoredArray] = {}
    with together(comm, f"preparing the checkpoint {target}"):
        check_kind(kind)
        step = _checked(step, "step", least=0)
        keep_last = None if keep_last is None else _checked(keep_last, "keep_last", least=1)
        if writing:
            stored = {check_key(key): to_stored(value, key, copy=not wait) for key, value in arrays.items()}
            build_header({key: array.layout for key, array in stored.items()})
    partial = on_rank_zero(comm, f"making the folder of the checkpoint {target}", open_partial, target)
    job = Job(
        target=target,
        partial=partial,
        shards=1 if replicated else comm.size,
        kind=kind,
        step=step,
        world_size=comm.size,
        replicated=replicated,
        meta=dict(meta or {}),
        packages={"distmd-protocol": VERSION, **(packages or {})},
        precision=PrecisionPolicy.current().to_json(),
        keep_last=keep_last,
    )
    try:
        if not replicated:
            with together(comm, f"looking for the folder of the checkpoint {target}"):
                see_partial(partial)
        pending = PendingSave(job, comm, stored)
        if wait:
            pending.wait()
        else:
            pending.start()
    except BaseException:
        if comm.rank == 0:
            job.abandon()
        raise
    return pending


def _checked(value: object, name: str, least: int) -> int:
    """Return a count given as any integer type, numpy's and JAX's included."""
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise CheckpointError(f"{name} is {value!r}; give an integer") from error
    if isinstance(value, bool) or not least <= count <= MAX_STEP:
        raise CheckpointError(f"{name} is {value!r}; give an integer from {least} to {MAX_STEP}")
    return count
