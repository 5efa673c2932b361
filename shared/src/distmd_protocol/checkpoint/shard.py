"""Writing and reading a shard: a safetensors file whose bytes are hashed while they pass.

The safetensors library is not used here: it hashes nothing, its numpy interface lacks bfloat16, and it wants a second
copy of the data in memory. The files are the same; the tests read each with the other.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distmd_protocol.checkpoint.hashing import INLINE_BYTES, Hasher, digest
from distmd_protocol.checkpoint.header import (
    PREFIX_BYTES,
    Extent,
    build_header,
    count_bytes,
    header_length,
    parse_header,
)
from distmd_protocol.checkpoint.manifest import ArrayEntry, ShardEntry
from distmd_protocol.dtypes import BY_NAME, StoredArray
from distmd_protocol.errors import CheckpointError

CHUNK_BYTES = 1024**2
"""Bytes read at a time: few enough to be hashed while they are in the processor's cache."""


@dataclass(frozen=True)
class ShardIndex:
    """What a rank tells rank zero about the shard it wrote."""

    shard: ShardEntry
    arrays: tuple[ArrayEntry, ...]


def write_all(descriptor: int, data: memoryview) -> None:
    """Write every byte; ``os.write`` may write fewer."""
    while data:
        data = data[os.write(descriptor, data[: 1 << 30]) :]


def write_shard(folder: int, name: str, index: int, arrays: Mapping[str, StoredArray]) -> ShardIndex:
    """Write a shard, flushed to the disk.

    Parameters
    ----------
    folder
        Descriptor of the checkpoint's folder.
    name, index
        File name, and place among the shards.
    arrays
        By key.

    Raises
    ------
    CheckpointError
        If the header would exceed a limit.
    OSError
        If the file system refuses.
    """
    header, extents = build_header({key: array.layout for key, array in arrays.items()})
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666, dir_fd=folder)
    digests: list[list[str]] = []
    try:
        with Hasher() as hasher:
            write_all(descriptor, memoryview(header))
            for extent in extents:
                data = byte_view(arrays[extent.key].data)
                digests.append(hasher.submit(data))
                write_all(descriptor, data)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    entries = [
        ArrayEntry(extent.key, index, arrays[extent.key].layout, found)
        for extent, (found,) in zip(extents, digests, strict=True)
    ]
    size = len(header) + (extents[-1].end if extents else 0)
    return ShardIndex(ShardEntry(name, size, digest(header)), tuple(entries))


def read_shard(folder: int, shard: ShardEntry, arrays: Sequence[ArrayEntry]) -> dict[str, StoredArray]:
    """Read a shard and verify every byte of it.

    Parameters
    ----------
    folder
        Descriptor of the checkpoint's folder.
    shard, arrays
        What the manifest says of it.

    Raises
    ------
    CheckpointError
        If the file is not exactly what the manifest says.
    """
    try:
        descriptor = open_regular(folder, shard.name)
    except OSError as error:
        raise CheckpointError(f"shard {shard.name} cannot be opened: {error.strerror}") from error
    try:
        return _read(descriptor, shard, arrays)
    except CheckpointError as error:
        raise CheckpointError(f"shard {shard.name}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"shard {shard.name} cannot be read: {error.strerror}") from error
    except MemoryError as error:
        raise CheckpointError(f"shard {shard.name} has {shard.bytes} bytes, more than there is memory for") from error
    finally:
        os.close(descriptor)


def open_regular(folder: int, name: str) -> int:
    """Open a regular file inside a folder; neither a symbolic link nor a pipe or device is followed or waited for.

    Raises
    ------
    OSError
        If it cannot be opened.
    CheckpointError
        If it is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{name} is not a regular file")
    return descriptor


def byte_view(data: NDArray[np.generic]) -> memoryview:
    """Return the bytes of a C-contiguous array without copying them."""
    return data.reshape(-1).view(np.uint8).data


def _read(descriptor: int, shard: ShardEntry, arrays: Sequence[ArrayEntry]) -> dict[str, StoredArray]:
    size = os.fstat(descriptor).st_size
    if size != shard.bytes:
        raise CheckpointError(f"it has {size} bytes, the manifest says {shard.bytes}: truncated or damaged")
    prefix = os.pread(descriptor, PREFIX_BYTES, 0)
    length = header_length(prefix, size)
    text = _read_exactly(descriptor, length, PREFIX_BYTES)
    if digest(prefix + text) != shard.header_sha256:
        raise CheckpointError("its header does not have the SHA-256 that the manifest states")
    start = PREFIX_BYTES + length
    extents = {extent.key: extent for extent in parse_header(text, size - start)}
    _check_against_manifest(extents, arrays)
    large = [entry for entry in arrays if count_bytes(entry.layout) >= INLINE_BYTES]
    stored: dict[str, StoredArray] = {}
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "checkpoint-read") as pool:
        tasks = [pool.submit(_read_array, descriptor, start + extents[entry.key].begin, entry) for entry in large]
        for entry in arrays:
            if count_bytes(entry.layout) < INLINE_BYTES:
                stored[entry.key] = _read_array(descriptor, start + extents[entry.key].begin, entry)
        stored.update((entry.key, task.result()) for entry, task in zip(large, tasks, strict=True))
    return {entry.key: stored[entry.key] for entry in arrays}


def _read_exactly(descriptor: int, length: int, offset: int) -> bytes:
    buffer = bytearray(length)
    _fill(descriptor, memoryview(buffer), offset)
    return bytes(buffer)


def _fill(descriptor: int, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise CheckpointError("it became shorter while it was read")
        target, offset = target[count:], offset + count


def _check_against_manifest(extents: Mapping[str, Extent], arrays: Sequence[ArrayEntry]) -> None:
    listed = {entry.key: entry for entry in arrays}
    if extents.keys() != listed.keys():
        odd = sorted(extents.keys() ^ listed.keys())
        raise CheckpointError(f"its header and the manifest list different arrays: {', '.join(odd[:10])}")
    for key, extent in extents.items():
        layout = listed[key].layout
        if (extent.layout.dtype, extent.layout.shape) != (layout.dtype, layout.shape):
            raise CheckpointError(f"{key!r} is {extent.layout} in its header and {layout} in the manifest")


def _read_array(descriptor: int, offset: int, entry: ArrayEntry) -> StoredArray:
    data = np.empty(entry.layout.shape, BY_NAME[entry.layout.dtype].carrier)
    target = byte_view(data)
    running = hashlib.sha256()
    for begin in range(0, len(target), CHUNK_BYTES):
        chunk = target[begin : begin + CHUNK_BYTES]
        _fill(descriptor, chunk, offset + begin)
        # Hashed while the chunk is still in the processor's cache.
        running.update(chunk)
    if running.hexdigest() != entry.sha256:
        raise CheckpointError(f"{entry.key!r} does not have the SHA-256 that the manifest states: it was damaged")
    if entry.layout.dtype == "bool" and data.size and data.view(np.uint8).max() > 1:
        raise CheckpointError(f"{entry.key!r} holds bytes other than 0 and 1, which are no booleans")
    return StoredArray(entry.layout, data)
