"""The header of a shard: a safetensors file's table of contents, checked before anything is believed.

A safetensors file is an unsigned 64-bit little-endian length ``N``, ``N`` bytes of JSON, then the arrays' bytes. The
JSON maps each key to ``dtype``, ``shape`` and ``data_offsets`` (begin and end, from the first byte after the header).
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distmd_protocol import strict_json
from distmd_protocol.checkpoint.keys import check_key
from distmd_protocol.checkpoint.limits import (
    MAX_ARRAYS_PER_SHARD,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_JSON_DEPTH,
)
from distmd_protocol.dtypes import BY_NAME, BY_TAG, Layout
from distmd_protocol.errors import CheckpointError, ProtocolError

PREFIX_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True)
class Extent:
    """Where an array lies: bytes ``begin`` to ``end`` after the header, and its type and shape."""

    key: str
    layout: Layout
    begin: int
    end: int


def count_bytes(layout: Layout) -> int:
    """Return the size of an array's data in bytes."""
    size = BY_NAME[layout.dtype].itemsize
    for extent in layout.shape:
        size *= extent
    return size


def build_header(layouts: Mapping[str, Layout]) -> tuple[bytes, list[Extent]]:
    """Return the bytes before the data, and where each array goes: widest type first, so that all are aligned.

    Raises
    ------
    CheckpointError
        If the header would exceed a limit.
    """
    if len(layouts) > MAX_ARRAYS_PER_SHARD:
        raise CheckpointError(
            f"{len(layouts)} arrays in one shard, the limit is {MAX_ARRAYS_PER_SHARD}; stack some of them"
        )
    extents: list[Extent] = []
    begin = 0
    for key in sorted(layouts, key=lambda key: (-BY_NAME[layouts[key].dtype].itemsize, key)):
        if len(layouts[key].shape) > MAX_DIMENSIONS:
            raise CheckpointError(f"{key!r} has {len(layouts[key].shape)} dimensions, the limit is {MAX_DIMENSIONS}")
        end = begin + count_bytes(layouts[key])
        extents.append(Extent(key, layouts[key], begin, end))
        begin = end
    table = {
        extent.key: {
            "dtype": BY_NAME[extent.layout.dtype].tag,
            "shape": extent.layout.shape,
            "data_offsets": (extent.begin, extent.end),
        }
        for extent in extents
    }
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the shard's header has {len(text)} bytes, the limit is {MAX_HEADER_BYTES}")
    return struct.pack("<Q", len(text)) + text, extents


def header_length(prefix: bytes, file_bytes: int) -> int:
    """Return the length of the JSON, from the first 8 bytes and the size of the file.

    Raises
    ------
    CheckpointError
        If the file is shorter than it says, or the length exceeds the limit. Nothing has been allocated by then.
    """
    if len(prefix) < PREFIX_BYTES:
        raise CheckpointError(f"it has {file_bytes} bytes, too few for a header")
    length = int(struct.unpack("<Q", prefix)[0])
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"its header claims {length} bytes, the limit is {MAX_HEADER_BYTES}")
    if PREFIX_BYTES + length > file_bytes:
        raise CheckpointError(f"its header claims {length} bytes, the whole file has {file_bytes}")
    return length


def parse_header(text: bytes, data_bytes: int) -> list[Extent]:
    """Read the JSON of a header, for a file with ``data_bytes`` bytes after it.

    Raises
    ------
    CheckpointError
        If it is not what the safetensors format allows: duplicate keys, unknown types, offsets that overlap, leave a
        gap, do not fit the shape or lie outside the file.
    """
    if not text.startswith(b"{"):
        raise CheckpointError("its header does not start with '{': not a safetensors file")
    try:
        table = strict_json.loads(text.rstrip(b" "), MAX_JSON_DEPTH)
    except ProtocolError as error:
        raise CheckpointError(f"its header is {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError("its header is not a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("its __metadata__ is not a mapping of strings to strings")
    if len(table) > MAX_ARRAYS_PER_SHARD:
        raise CheckpointError(f"its header lists {len(table)} arrays, the limit is {MAX_ARRAYS_PER_SHARD}")
    extents = sorted(
        (_parse_entry(key, entry) for key, entry in table.items()), key=lambda extent: (extent.begin, extent.end)
    )
    _check_cover(extents, data_bytes)
    return extents


def _parse_entry(key: str, entry: Any) -> Extent:
    check_key(key)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"the entry of {key!r} does not consist of dtype, shape and data_offsets")
    stored = BY_TAG.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if stored is None:
        raise CheckpointError(f"{key!r} has the unknown type {str(entry['dtype'])[:40]!r}")
    shape = check_shape(entry["shape"], key)
    offsets = entry["data_offsets"]
    if not is_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"the data_offsets of {key!r} are not two counts of bytes")
    extent = Extent(key, Layout(stored.name, shape), *offsets)
    if extent.end - extent.begin != count_bytes(extent.layout):
        raise CheckpointError(
            f"{key!r} claims bytes {extent.begin} to {extent.end}, but {extent.layout} has {count_bytes(extent.layout)}"
        )
    return extent


def check_shape(value: Any, key: str) -> tuple[int, ...]:
    """Return a shape read from JSON.

    Raises
    ------
    CheckpointError
        If it is not a list of at most ``MAX_DIMENSIONS`` counts.
    """
    if not is_counts(value) or len(value) > MAX_DIMENSIONS:
        raise CheckpointError(f"the shape of {key!r} is not a list of at most {MAX_DIMENSIONS} counts")
    return tuple(value)


def is_counts(value: Any) -> bool:
    """Whether a JSON value is a list of integers from 0 to 2^63 − 1."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_cover(extents: Sequence[Extent], data_bytes: int) -> None:
    position = 0
    for extent in extents:
        if extent.begin != position:
            fault = "overlaps the array before it" if extent.begin < position else "leaves a gap before it"
            raise CheckpointError(f"{extent.key!r} at bytes {extent.begin} to {extent.end} {fault}")
        position = extent.end
    if position != data_bytes:
        raise CheckpointError(f"its arrays end at byte {position}, but {data_bytes} bytes follow the header")
