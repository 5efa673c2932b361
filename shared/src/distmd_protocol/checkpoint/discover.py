"""Finding committed checkpoints by their manifests."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distmd_protocol.checkpoint.layout import MANIFEST, REPLACED, parse_leftover
from distmd_protocol.checkpoint.limits import MAX_MANIFEST_BYTES
from distmd_protocol.checkpoint.manifest import ERROR_STATE, Manifest, parse_manifest
from distmd_protocol.checkpoint.shard import open_regular
from distmd_protocol.errors import CheckpointError

_LOOKS = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A committed checkpoint: where it is, its name, its manifest."""

    path: Path
    name: str
    manifest: Manifest


def open_folder(path: Path) -> int:
    """Open a checkpoint's folder.

    Raises
    ------
    CheckpointError
        If that is not possible, saying why.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint at {path}") from error
    except NotADirectoryError as error:
        raise CheckpointError(f"{path} is not a folder, so not a checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"the folder {path} cannot be opened: {error.strerror}") from error


def read_manifest_at(folder: int, path: Path) -> tuple[Manifest, bytes]:
    """Read and check the manifest in an open folder; return it and its bytes.

    Raises
    ------
    CheckpointError
        Naming ``path``.
    """
    try:
        descriptor = open_regular(folder, MANIFEST)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} has no {MANIFEST}: it is not a checkpoint. For a folder of checkpoints ask latest() for the newest"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be opened: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        return parse_manifest(data), data
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a checkpoint, and none of its arrays.

    Raises
    ------
    CheckpointError
        If there is none, or it is not as the format says.
    """
    path = Path(path)
    folder = open_folder(path)
    try:
        return read_manifest_at(folder, path)[0]
    finally:
        os.close(folder)


def list_checkpoints(folder: str | os.PathLike[str], kind: str | None = None) -> list[Path]:
    """Return the committed checkpoints in a folder, oldest first: by step, then by time of commit.

    What has a damaged manifest, or lacks a shard, is left out with a warning in the log. Error-states are only listed
    when asked for by ``kind="error-state"``.

    Parameters
    ----------
    folder
        The folder; one that does not exist holds no checkpoint.
    kind
        Only checkpoints of that kind.

    Raises
    ------
    CheckpointError
        If the folder cannot be read.
    """
    return [found.path for found in find(Path(folder), kind)]


def latest(folder: str | os.PathLike[str], kind: str | None = None) -> Path | None:
    """Return the newest committed checkpoint in a folder, or ``None``: the last one of ``list_checkpoints``."""
    found = list_checkpoints(folder, kind)
    return found[-1] if found else None


def find(folder: Path, kind: str | None) -> list[Found]:
    """Return what ``list_checkpoints`` lists, with the manifests."""
    for _ in range(_LOOKS):
        entries = _folders(folder)
        present = _committed(entries)
        # A writer may have renamed or pruned between the two: what was seen is then neither the old nor the new state.
        if _folders(folder) == entries:
            break
    wanted = [
        found
        for found in present.values()
        if (found.manifest.kind == kind if kind is not None else found.manifest.kind != ERROR_STATE)
    ]
    return sorted(wanted, key=lambda found: (found.manifest.step, found.manifest.created, found.name))


def _folders(folder: Path) -> list[tuple[str, int]]:
    """Return the paths of the folders in a folder that can be checkpoints, with their inodes."""
    try:
        # Symbolic links are left out: a link "best" to a checkpoint is not another checkpoint.
        with os.scandir(folder) as entries:
            found = [(item.path, item.inode()) for item in entries if item.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"the folder {folder} cannot be read: {error.strerror}") from error
    return sorted((path, inode) for path, inode in found if _name(Path(path)) is not None)


def _committed(entries: Sequence[tuple[str, int]]) -> dict[str, Found]:
    present: dict[str, Found] = {}
    paths = [Path(path) for path, _ in entries]
    # Replaced checkpoints last: they count only where no successor took their name.
    for path in sorted(paths, key=lambda path: path.name.startswith(".")):
        name = _name(path)
        if name is None or name in present or not os.path.exists(path / MANIFEST):
            continue
        try:
            manifest = read_manifest(path)
            check_shards_present(path, manifest)
        except CheckpointError as error:
            if os.path.exists(path):
                _log.warning("passed over: %s", error)
            continue
        present[name] = Found(path, name, manifest)
    return present


def check_shards_present(path: Path, manifest: Manifest) -> None:
    """Check that each shard is there and has the size that the manifest states; the contents are not read.

    Raises
    ------
    CheckpointError
    """
    for shard in manifest.shards:
        try:
            size = os.lstat(path / shard.name).st_size
        except OSError as error:
            raise CheckpointError(f"{path} lacks its shard {shard.name}: {error.strerror}") from error
        if size != shard.bytes:
            raise CheckpointError(f"{path / shard.name} has {size} bytes, the manifest says {shard.bytes}")


def replaced_siblings(path: Path) -> list[Path]:
    """Return the replaced forms of a checkpoint whose successor has not arrived, newest first."""
    try:
        with os.scandir(path.parent) as entries:
            siblings = [Path(entry.path) for entry in entries]
    except OSError as error:
        _log.debug("no replaced forms of %s: %s", path, error)
        return []
    dated: list[tuple[float, Path]] = []
    for sibling in siblings:
        item = parse_leftover(sibling)
        if item is None or item.role != REPLACED or item.name != path.name:
            continue
        try:
            dated.append((sibling.stat().st_mtime, item.path))
        except OSError as error:
            # Its writer is done with it; the others still count.
            _log.debug("%s has gone: %s", sibling, error)
    return [item for _, item in sorted(dated, reverse=True)]


def _name(path: Path) -> str | None:
    if not path.name.startswith("."):
        return path.name
    leftover = parse_leftover(path)
    return leftover.name if leftover is not None and leftover.role == REPLACED else None
