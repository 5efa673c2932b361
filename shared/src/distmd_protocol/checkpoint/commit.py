"""The steps of one save on the file system, in the order that makes it safe."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmd_protocol.checkpoint.discover import find
from distmd_protocol.checkpoint.layout import (
    MANIFEST,
    PARTIAL,
    REMOVED,
    REPLACED,
    Writer,
    check_name,
    leftover_path,
    shard_name,
)
from distmd_protocol.checkpoint.limits import VISIBLE_WITHIN_S
from distmd_protocol.checkpoint.manifest import ArrayEntry, Manifest, ShardEntry
from distmd_protocol.checkpoint.shard import ShardIndex, write_all, write_shard
from distmd_protocol.checkpoint.sweep import sweep
from distmd_protocol.dtypes import StoredArray
from distmd_protocol.errors import CheckpointError

_log = logging.getLogger(__name__)


def open_partial(target: Path) -> Path:
    """Make the folder into which everything is written, after sweeping what dead writers left. Rank zero only.

    Raises
    ------
    CheckpointError
        If the name or the place will not do.
    """
    check_name(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            raise CheckpointError(f"{target} is a symbolic link; save to a name of its own")
        if target.exists() and not (target / MANIFEST).exists() and not _is_empty_folder(target):
            raise CheckpointError(f"{target} exists and is not a checkpoint; choose another name or move it away")
        sweep(target.parent)
        partial = leftover_path(target, PARTIAL, Writer.current())
        partial.mkdir()
    except OSError as error:
        raise explain(error, target.parent) from error
    return partial


def see_partial(partial: Path, within: float = VISIBLE_WITHIN_S) -> None:
    """Check that this rank sees the folder that rank zero made; its name holds a random token.

    Raises
    ------
    CheckpointError
        If it does not appear within ``within`` seconds.
    """
    deadline = time.monotonic() + within
    while not partial.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"this rank does not see {partial}, which rank zero has made: {partial.parent} is not on a file "
                "system that all ranks share. Save to a shared file system, or use replicated=True"
            )
        time.sleep(0.05)


@dataclass(frozen=True)
class Job:
    """One save: where it goes, and what the manifest will say."""

    target: Path
    partial: Path
    shards: int
    kind: str
    step: int
    world_size: int
    replicated: bool
    meta: Mapping[str, Any]
    packages: Mapping[str, str]
    precision: Mapping[str, Any]
    keep_last: int | None

    def write(self, index: int, arrays: Mapping[str, StoredArray]) -> ShardIndex:
        """Write shard ``index``.

        Raises
        ------
        CheckpointError
            If the file system refuses.
        """
        try:
            folder = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return write_shard(folder, shard_name(index, self.shards), index, arrays)
            finally:
                os.close(folder)
        except OSError as error:
            raise explain(error, self.target) from error

    def commit(self, shards: Sequence[ShardEntry], arrays: Sequence[ArrayEntry]) -> Path:
        """Write the manifest, give the folder its name, and prune. Rank zero only.

        Raises
        ------
        CheckpointError
            If a shard is not where rank zero can see it, or the file system refuses.
        """
        manifest = Manifest(
            kind=self.kind,
            step=self.step,
            world_size=self.world_size,
            replicated=self.replicated,
            created=time.time(),
            packages=self.packages,
            precision=self.precision,
            meta=self.meta,
            shards=tuple(shards),
            arrays=tuple(arrays),
        )
        try:
            self._see_shards(shards)
            _write_file(self.partial / MANIFEST, manifest.dump())
            sync_folder(self.partial)
            self._take_name()
        except OSError as error:
            raise explain(error, self.target) from error
        if self.keep_last is not None:
            prune(self.target, self.kind, self.keep_last)
        return self.target

    def abandon(self) -> None:
        """Remove what was written so far. Rank zero only; what cannot be removed is swept later."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _see_shards(self, shards: Sequence[ShardEntry], within: float = VISIBLE_WITHIN_S) -> None:
        deadline = time.monotonic() + within
        for shard in shards:
            while _size(self.partial / shard.name) != shard.bytes:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"rank zero does not see the {shard.bytes} bytes of {self.partial / shard.name}: the ranks do "
                        "not share a file system there. Save to a shared file system"
                    )
                time.sleep(0.05)

    def _take_name(self) -> None:
        # A folder cannot be renamed onto one that is not empty, and no moment may pass without a good copy: the old
        # one steps aside under a name that readers still accept, and goes when the new one has its name.
        replaced: Path | None = None
        if (self.target / MANIFEST).exists():
            replaced = leftover_path(self.target, REPLACED, Writer.current())
            self.target.rename(replaced)
        try:
            self.partial.rename(self.target)
        except OSError:
            if replaced is not None:
                replaced.rename(self.target)
            raise
        sync_folder(self.target.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)


def prune(target: Path, kind: str, keep_last: int) -> None:
    """Remove all but the newest ``keep_last`` checkpoints of a kind beside ``target``, never ``target`` itself."""
    others = [found.path for found in find(target.parent, kind) if found.path != target]
    for path in others[: max(0, len(others) - (keep_last - 1))]:
        removed = leftover_path(path, REMOVED, Writer.current())
        try:
            # Renamed first: a folder that is half removed must not carry the name of a checkpoint.
            path.rename(removed)
            shutil.rmtree(removed)
        except OSError as error:
            _log.warning("the old checkpoint %s could not be removed: %s", path, error)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do this for a folder, and need not.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def explain(error: OSError, place: Path) -> CheckpointError:
    """Turn an error of the operating system into one that names the place and the remedy."""
    reasons = {
        errno.ENOSPC: "the disk is full; free space or save elsewhere",
        errno.EDQUOT: "the disk quota is used up; free space or save elsewhere",
        errno.EACCES: "permission denied; choose a folder that this user may write to",
        errno.EROFS: "the file system is read-only; save elsewhere",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    return CheckpointError(f"the checkpoint cannot be written to {place}: {reason}")


def _write_file(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, memoryview(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
