"""Forging checkpoints: what an attacker, or a broken disk, could put there."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path


def manifest_bytes(content) -> bytes:
    """Return a manifest with a right digest of its own, whatever the content."""
    body = (content if isinstance(content, bytes) else json.dumps(content).encode())[:-1]
    return body + b',"manifest_sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'


def read_content(path: Path) -> dict:
    """Return a manifest's content without its digest."""
    content = json.loads((path / "manifest.json").read_bytes())
    del content["manifest_sha256"]
    return content


def change_manifest(path: Path, change) -> None:
    """Change a manifest's content in place, by a function, and sign it again."""
    content = read_content(path)
    result = change(content)
    (path / "manifest.json").write_bytes(manifest_bytes(content if result is None else result))


def shard_bytes(header, data: bytes, length: int | None = None) -> bytes:
    """Return a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def put_shard(path: Path, content: bytes) -> None:
    """Replace the only shard, and make the manifest's size and header digest fit it."""
    (path / "shard-00000-of-00001.safetensors").write_bytes(content)
    length = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else 0

    def change(manifest):
        manifest["shards"][0]["bytes"] = len(content)
        manifest["shards"][0]["header_sha256"] = hashlib.sha256(content[: 8 + length]).hexdigest()

    change_manifest(path, change)
