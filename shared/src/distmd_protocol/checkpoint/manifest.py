"""``manifest.json``: what a checkpoint holds, and the digests that prove it.

The file is one JSON object whose last member, ``manifest_sha256``, is the SHA-256 of all bytes before the comma that
precedes it. So every byte of the file is covered, and a truncated manifest is never taken for a whole one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distmd_protocol import strict_json
from distmd_protocol.checkpoint import limits
from distmd_protocol.checkpoint.header import check_shape
from distmd_protocol.checkpoint.keys import check_key
from distmd_protocol.checkpoint.layout import is_shard_name, shard_name
from distmd_protocol.checkpoint.migrate import FORMAT, VERSION, migrate
from distmd_protocol.dtypes import BY_NAME, Layout
from distmd_protocol.errors import CheckpointError, ProtocolError
from distmd_protocol.precision import PrecisionPolicy

ERROR_STATE = "error-state"

_KIND = re.compile(r"[a-z][a-z0-9-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PRNG = re.compile(r"[A-Za-z0-9_]{1,64}")
_TAIL = re.compile(rb',"manifest_sha256":"([0-9a-f]{64})"\}')
_TAIL_BYTES = len(b',"manifest_sha256":""}') + 64
_MEMBERS = {
    "format", "version", "kind", "step", "complete", "world_size", "replicated", "created", "packages", "precision",
    "meta", "shards", "arrays",
}  # fmt: skip


@dataclass(frozen=True)
class ShardEntry:
    """A shard: file name, size in bytes, SHA-256 of its first ``8 + N`` bytes (length and header)."""

    name: str
    bytes: int
    header_sha256: str


@dataclass(frozen=True)
class ArrayEntry:
    """An array: key, index of its shard, layout, SHA-256 of its bytes."""

    key: str
    shard: int
    layout: Layout
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it stands in the manifest."""
        entry: dict[str, Any] = {
            "key": self.key,
            "shard": self.shard,
            "dtype": self.layout.dtype,
            "shape": list(self.layout.shape),
            "sha256": self.sha256,
        }
        if self.layout.prng is not None:
            entry["prng"] = self.layout.prng
        return entry


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``, checked.

    Parameters
    ----------
    kind, step, world_size
        As given to ``save_checkpoint``; ``world_size`` is the number of ranks that took part.
    replicated
        One shard for all ranks; otherwise shard ``r`` is rank ``r``'s.
    created
        Time of the commit in seconds since 1970 (UTC), by the clock of the writer.
    packages
        Versions of the packages that wrote.
    precision
        ``PrecisionPolicy.to_json()`` of the writer.
    meta
        Free-form JSON object.
    shards, arrays
        Contents.
    """

    kind: str
    step: int
    world_size: int
    replicated: bool
    created: float
    packages: Mapping[str, str]
    precision: Mapping[str, Any]
    meta: Mapping[str, Any]
    shards: tuple[ShardEntry, ...]
    arrays: tuple[ArrayEntry, ...]

    def dump(self) -> bytes:
        """Return the bytes of the file.

        Raises
        ------
        CheckpointError
            If something in it is not JSON or exceeds a limit.
        """
        content = {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "step": self.step,
            "complete": True,
            "world_size": self.world_size,
            "replicated": self.replicated,
            "created": self.created,
            "packages": self.packages,
            "precision": self.precision,
            "meta": self.meta,
            "shards": [vars(shard) for shard in self.shards],
            "arrays": [array.to_json() for array in self.arrays],
        }
        try:
            body = strict_json.dumps(content)[:-1]
        except ProtocolError as error:
            raise CheckpointError(f"the manifest cannot be written: {error}") from error
        data = body + b',"manifest_sha256":"%s"}' % hashlib.sha256(body).hexdigest().encode()
        # What is written must be readable, so the writer obeys the reader's checks.
        parse_manifest(data)
        return data


def check_kind(kind: object) -> None:
    """Refuse what is not a kind.

    Raises
    ------
    CheckpointError
    """
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise CheckpointError(f"kind {kind!r}: use lower-case letters, digits and '-', such as 'dynamics'")


def parse_manifest(data: bytes) -> Manifest:
    """Read the bytes of a manifest.

    Raises
    ------
    CheckpointError
        If anything in it is not as the format says.
    """
    if len(data) > limits.MAX_MANIFEST_BYTES:
        raise CheckpointError(f"manifest of {len(data)} bytes, the limit is {limits.MAX_MANIFEST_BYTES}")
    tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
    body = data[:-_TAIL_BYTES]
    if tail is None:
        raise CheckpointError("the manifest does not end in its own SHA-256: truncated, damaged or not a manifest")
    if hashlib.sha256(body).hexdigest().encode() != tail[1]:
        raise CheckpointError("the manifest does not have the SHA-256 that it states: it was damaged or changed")
    try:
        content = strict_json.loads(body + b"}", limits.MAX_JSON_DEPTH)
    except ProtocolError as error:
        raise CheckpointError(f"the manifest is {error}") from error
    return _build(migrate(content))


def _build(content: dict[str, Any]) -> Manifest:
    missing = sorted(_MEMBERS - set(content))
    if missing:
        raise CheckpointError(f"the manifest lacks {', '.join(missing)}")
    if content["complete"] is not True:
        raise CheckpointError("the manifest does not say that the checkpoint is complete")
    check_kind(content["kind"])
    for name, least, most in (("step", 0, limits.MAX_STEP), ("world_size", 1, 2**31 - 1)):
        if type(content[name]) is not int or not least <= content[name] <= most:
            raise CheckpointError(f"{name} is {content[name]!r}, not an integer from {least} to {most}")
    for name in ("packages", "precision", "meta"):
        if not isinstance(content[name], dict):
            raise CheckpointError(f"{name} in the manifest is not a JSON object")
    try:
        PrecisionPolicy.from_json(content["precision"])
    except ProtocolError as error:
        raise CheckpointError(f"precision in the manifest: {error}") from error
    if not all(isinstance(version, str) for version in content["packages"].values()):
        raise CheckpointError("a version in the manifest's packages is not a string")
    if type(content["created"]) not in (int, float) or type(content["replicated"]) is not bool:
        raise CheckpointError("created is not a number or replicated not a boolean")
    shards = _build_shards(content)
    return Manifest(
        kind=content["kind"],
        step=content["step"],
        world_size=content["world_size"],
        replicated=content["replicated"],
        created=float(content["created"]),
        packages=content["packages"],
        precision=content["precision"],
        meta=content["meta"],
        shards=shards,
        arrays=_build_arrays(content["arrays"], len(shards)),
    )


def _build_shards(content: dict[str, Any]) -> tuple[ShardEntry, ...]:
    listed = content["shards"]
    count = 1 if content["replicated"] else content["world_size"]
    if not isinstance(listed, list) or len(listed) != count or count > limits.MAX_SHARDS:
        raise CheckpointError(f"the manifest does not list {count} shards (at most {limits.MAX_SHARDS})")
    shards = []
    for index, entry in enumerate(listed):
        if not isinstance(entry, dict) or not {"name", "bytes", "header_sha256"} <= set(entry):
            raise CheckpointError(f"shard {index} in the manifest lacks name, bytes or header_sha256")
        if not is_shard_name(entry["name"]) or entry["name"] != shard_name(index, count):
            found = str(entry["name"])[:80]
            raise CheckpointError(f"shard {index} is named {found!r}, not {shard_name(index, count)!r}")
        if type(entry["bytes"]) is not int or not 0 <= entry["bytes"] < 2**63:
            raise CheckpointError(f"shard {index} has {entry['bytes']!r} bytes")
        shards.append(ShardEntry(entry["name"], entry["bytes"], _digest(entry["header_sha256"], entry["name"])))
    return tuple(shards)


def _build_arrays(listed: Any, shards: int) -> tuple[ArrayEntry, ...]:
    if not isinstance(listed, list) or len(listed) > limits.MAX_ARRAYS:
        raise CheckpointError(f"the manifest does not list at most {limits.MAX_ARRAYS} arrays")
    arrays: list[ArrayEntry] = []
    seen: set[tuple[int, str]] = set()
    for entry in listed:
        if not isinstance(entry, dict) or not {"key", "shard", "dtype", "shape", "sha256"} <= set(entry):
            raise CheckpointError("an array in the manifest lacks key, shard, dtype, shape or sha256")
        key, shard, dtype, prng = check_key(entry["key"]), entry["shard"], entry["dtype"], entry.get("prng")
        if type(shard) is not int or not 0 <= shard < shards:
            raise CheckpointError(f"{key!r} is in shard {shard!r} of {shards}")
        if not isinstance(dtype, str) or dtype not in BY_NAME:
            raise CheckpointError(f"{key!r} has the unknown type {str(dtype)[:40]!r}")
        if prng is not None and (not isinstance(prng, str) or not _PRNG.fullmatch(prng) or dtype != "uint32"):
            raise CheckpointError(f"{key!r} is no PRNG key of implementation {str(prng)[:80]!r}")
        if (shard, key) in seen:
            raise CheckpointError(f"{key!r} is listed twice in shard {shard}")
        seen.add((shard, key))
        layout = Layout(dtype, check_shape(entry["shape"], key), prng)
        arrays.append(ArrayEntry(key, shard, layout, _digest(entry["sha256"], key)))
    return tuple(arrays)


def _digest(value: object, name: str) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise CheckpointError(f"the SHA-256 of {name!r} is not 64 hexadecimal digits")
    return value
