"""Reading a checkpoint: every byte is verified before it is handed out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from distmd_protocol.arrays import layout_of, restore_leaf
from distmd_protocol.checkpoint.discover import open_folder, read_manifest_at, replaced_siblings
from distmd_protocol.checkpoint.layout import MANIFEST, REPLACED, parse_leftover
from distmd_protocol.checkpoint.manifest import ERROR_STATE, Manifest
from distmd_protocol.checkpoint.shard import read_shard
from distmd_protocol.checkpoint.together import together
from distmd_protocol.comm import Comm, LocalComm
from distmd_protocol.dtypes import Layout, StoredArray
from distmd_protocol.errors import AgreementError, CheckpointError, ProtocolError
from distmd_protocol.precision import PrecisionPolicy, warn_if_other_policy
from distmd_protocol.trees import difference_text, flatten, unflatten

T = TypeVar("T")

PORTABLE_KINDS = frozenset({"potential", "model-spec"})
"""Kinds that are handed over rather than continued from: reading one under another precision policy is no matter."""
_LOOKS = 5


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes
    ----------
    path, manifest
        Where it was read from, and its manifest.
    stored
        Arrays with their type names, by key.
    """

    path: Path
    manifest: Manifest
    stored: Mapping[str, StoredArray] = field(repr=False)

    @property
    def kind(self) -> str:
        """What is stored."""
        return self.manifest.kind

    @property
    def step(self) -> int:
        """Position of the run."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote."""
        return self.manifest.world_size

    @property
    def meta(self) -> Mapping[str, Any]:
        """The JSON object that was stored beside the arrays."""
        return self.manifest.meta

    @property
    def packages(self) -> Mapping[str, str]:
        """Versions of the packages that wrote."""
        return self.manifest.packages

    @property
    def precision(self) -> PrecisionPolicy:
        """The arithmetic in force when it was written."""
        return PrecisionPolicy.from_json(self.manifest.precision)

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays as numpy arrays, by key; bfloat16 as uint16, float8 as uint8, a PRNG key as its key data."""
        return {key: array.data for key, array in self.stored.items()}

    @property
    def layouts(self) -> dict[str, Layout]:
        """Type name, shape and PRNG implementation of each array, by key."""
        return {key: array.layout for key, array in self.stored.items()}

    def restore(self, template: T) -> T:
        """Return a tree like ``template`` with the stored arrays in it, each as the kind of array it replaces.

        Parameters
        ----------
        template
            Tree of arrays (or of ``jax.ShapeDtypeStruct`` and the like) with the wanted structure, types and shapes;
            or a flat mapping of exactly the stored keys.

        Raises
        ------
        CheckpointError
            Naming every path that is missing, left over or different. Nothing is cast.
        """
        check_template(template, self.layouts, self.path)
        if isinstance(template, dict) and template.keys() == self.stored.keys():
            return {key: restore_leaf(leaf, self.stored[key]) for key, leaf in template.items()}  # type: ignore[return-value]
        return unflatten(template, self.stored, lambda _path, leaf, stored: restore_leaf(leaf, stored))


def check_template(template: Any, layouts: Mapping[str, Layout], path: Path) -> None:
    """Compare a template with the layouts of stored arrays.

    Raises
    ------
    CheckpointError
        Naming every path that is missing, left over or different.
    """
    try:
        # A flat mapping with the stored keys is taken as it is: flatten would escape the slashes in its keys.
        flat = isinstance(template, dict) and template.keys() == layouts.keys()
        leaves = template if flat else flatten(template)
        wanted = {key: layout_of(leaf, key) for key, leaf in leaves.items()}
    except ProtocolError as error:
        raise CheckpointError(f"{path} cannot be restored into this template: {error}") from error
    missing = [key for key in wanted if key not in layouts]
    left_over = [key for key in layouts if key not in wanted]
    different = [
        f"{key} (stored {layouts[key]}, wanted {layout})"
        for key, layout in wanted.items()
        if key in layouts and layouts[key] != layout
    ]
    if missing or left_over or different:
        raise CheckpointError(f"{path}: {difference_text(missing, left_over, different)}")


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    kind: str | None = None,
    comm: Comm | None = None,
    template: Any = None,
    shard: int | None = None,
    allow_error_state: bool = False,
) -> Checkpoint:
    """Read a checkpoint and verify every byte. Collective if ``comm`` is given.

    Parameters
    ----------
    path
        The checkpoint's folder.
    kind
        The kind that is expected.
    comm
        Ranks that read together. Each reads for itself; all must find the same checkpoint.
    template
        Compared with the manifest before anything large is read.
    shard
        The shard to read, which may differ from rank to rank. ``None`` reads the only shard.
    allow_error_state
        Accept a state that was saved after a failure.

    Raises
    ------
    CheckpointError
        On every rank (as a ``RankError`` naming the failed ranks, if there are several), if anything is not as the
        format says or not as expected.
    AgreementError
        If the ranks read different checkpoints.

    Warns
    -----
    PrecisionWarning
        Once, if it was written under another precision policy.
    """
    comm = LocalComm() if comm is None else comm
    result: tuple[Checkpoint, str] | None = None
    with together(comm, f"reading the checkpoint {path}"):
        result = _load(Path(path), kind, template, shard, allow_error_state)
    assert result is not None
    checkpoint, digest = result
    if comm.size > 1:
        digests = comm.allgather(digest)
        if len(set(digests)) > 1:
            odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
            raise AgreementError(
                f"ranks {odd} read another checkpoint at {path} than rank 0; read from a file system that all share"
            )
    if checkpoint.kind not in PORTABLE_KINDS:
        warn_if_other_policy(checkpoint.precision, f"the checkpoint {checkpoint.path}")
    return checkpoint


def _load(
    path: Path, kind: str | None, template: Any, shard: int | None, allow_error_state: bool
) -> tuple[Checkpoint, str]:
    for _ in range(_LOOKS):
        found, folder = _open(path)
        try:
            manifest, data = read_manifest_at(folder, found)
            _check_kind(found, manifest, kind, allow_error_state)
            index = _check_shard(found, manifest, shard)
            entries = [entry for entry in manifest.arrays if entry.shard == index]
            if template is not None:
                check_template(template, {entry.key: entry.layout for entry in entries}, found)
            try:
                stored = read_shard(folder, manifest.shards[index], entries)
            except CheckpointError as error:
                raise CheckpointError(f"{found}: {error}") from error
            return Checkpoint(found, manifest, stored), hashlib.sha256(data).hexdigest()
        except CheckpointError:
            # A writer that replaces this very checkpoint removes the old one: look for the new one.
            if _is_still(found, folder):
                raise
        finally:
            os.close(folder)
    raise CheckpointError(f"{path} was replaced {_LOOKS} times while it was read; read it when it is not being written")


def _is_still(path: Path, folder: int) -> bool:
    try:
        now, then = os.stat(path), os.fstat(folder)
    except OSError:
        return False
    return (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino)


def _open(path: Path) -> tuple[Path, int]:
    """Open a checkpoint, or the one that is making way for a successor of that name."""
    leftover = parse_leftover(path)
    if leftover is not None and leftover.role == REPLACED and not os.path.exists(path):
        path = path.with_name(leftover.name)
    # A writer may rename between two looks.
    for _ in range(_LOOKS):
        for candidate in (path, *replaced_siblings(path)):
            if os.path.exists(candidate / MANIFEST):
                with suppress(CheckpointError):
                    return candidate, open_folder(candidate)
    return path, open_folder(path)


def _check_kind(path: Path, manifest: Manifest, kind: str | None, allow_error_state: bool) -> None:
    if manifest.kind == ERROR_STATE and kind != ERROR_STATE and not allow_error_state:
        raise CheckpointError(
            f"{path} is an error-state, saved after a failure: do not continue from it. Use the newest complete "
            "checkpoint, or pass allow_error_state=True to look at it"
        )
    if kind is not None and manifest.kind != kind and not (allow_error_state and manifest.kind == ERROR_STATE):
        raise CheckpointError(f"{path} is of kind {manifest.kind!r}, expected was {kind!r}")


def _check_shard(path: Path, manifest: Manifest, shard: int | None) -> int:
    count = len(manifest.shards)
    if shard is None and count > 1:
        raise CheckpointError(f"{path} has {count} shards, one a rank; pass shard=0 … {count - 1}")
    if shard is not None and not 0 <= shard < count:
        raise CheckpointError(f"{path} has {count} shards, there is no shard {shard}")
    return shard or 0
