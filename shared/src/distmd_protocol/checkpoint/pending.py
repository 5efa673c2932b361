"""A save that may still be under way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distmd_protocol.checkpoint.commit import Job
from distmd_protocol.checkpoint.manifest import ArrayEntry, ShardEntry
from distmd_protocol.checkpoint.shard import ShardIndex
from distmd_protocol.checkpoint.together import on_rank_zero, together
from distmd_protocol.comm import Comm
from distmd_protocol.dtypes import Layout, StoredArray
from distmd_protocol.errors import CheckpointError

_log = logging.getLogger(__name__)


class PendingSave:
    """What ``save_checkpoint`` returns.

    The writing thread uses no communicator: MPI may be single-threaded, and the order of collectives must be the
    order of the program. So ranks meet only in ``wait``.

    Attributes
    ----------
    path
        Where the checkpoint is, once ``wait`` has returned.
    """

    def __init__(self, job: Job, comm: Comm, arrays: Mapping[str, StoredArray]) -> None:
        self.path = job.target
        self._job = job
        self._comm = comm
        self._arrays: Mapping[str, StoredArray] | None = arrays
        self._thread: _Thread | None = None
        self._done = False

    def start(self) -> None:
        """Start writing in the background. Done by ``save_checkpoint(wait=False)``."""
        if self._comm.rank == 0 or not self._job.replicated:
            self._thread = _Thread(self._work)
            self._thread.start()

    def wait(self) -> Path:
        """Return the path once the checkpoint is committed. Collective; may be called again.

        Raises
        ------
        CheckpointError
            On every rank, if writing failed on any.
        """
        if self._done:
            return self.path
        try:
            self._finish()
        except BaseException:
            if self._comm.rank == 0:
                self._job.abandon()
            raise
        self._done = True
        return self.path

    def _finish(self) -> None:
        if self._job.replicated:
            on_rank_zero(self._comm, f"writing the checkpoint {self.path}", self._outcome)
            return
        index: ShardIndex | None = None
        with together(self._comm, f"writing the checkpoint {self.path}"):
            index = self._outcome()
        # Without an index the block above has raised on every rank.
        assert index is not None
        shards: list[ShardEntry] = []
        arrays: list[ArrayEntry] = []
        for shard, entries in self._comm.allgather(_pack(index)):
            shards.append(ShardEntry(**shard))
            arrays.extend(_unpack(entry) for entry in entries)
        on_rank_zero(self._comm, f"committing the checkpoint {self.path}", self._job.commit, shards, arrays)

    def _outcome(self) -> Any:
        return self._work() if self._thread is None else self._thread.outcome()

    def _work(self) -> ShardIndex | None:
        if self._arrays is None:
            raise CheckpointError(f"writing the checkpoint {self.path} has failed before; save again")
        arrays, self._arrays = self._arrays, None
        index = self._job.write(0 if self._job.replicated else self._comm.rank, arrays)
        if not self._job.replicated:
            return index
        self._job.commit([index.shard], index.arrays)
        return None


class _Thread:
    """A thread whose result or exception is fetched later. Not a daemon: leaving the program lets it finish."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer")

    def start(self) -> None:
        self._thread.start()

    def outcome(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001
            # Raised again in outcome(); the log has it even if nobody asks.
            _log.error("writing a checkpoint in the background failed: %s", error)
            self._error = error


def _pack(index: ShardIndex) -> list[Any]:
    return [vars(index.shard), [array.to_json() for array in index.arrays]]


def _unpack(entry: Mapping[str, Any]) -> ArrayEntry:
    layout = Layout(entry["dtype"], tuple(entry["shape"]), entry.get("prng"))
    return ArrayEntry(entry["key"], entry["shard"], layout, entry["sha256"])
