"""Names of folders and files, and whether the writer of a leftover is still alive.

``.NAME.partial-PID-START-TOKEN-HOST`` is being written, ``.NAME.replaced-…`` makes way for a new checkpoint of the
same name, ``.NAME.removed-…`` is being pruned. HOST identifies host, boot and process namespace, so that a process
number is only ever looked up where it has a meaning.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distmd_protocol.checkpoint.limits import MAX_NAME_BYTES
from distmd_protocol.errors import CheckpointError

MANIFEST = "manifest.json"
PARTIAL = "partial"
REPLACED = "replaced"
REMOVED = "removed"

_WRITER = r"\d+-\d+-[0-9a-f]{8}-[0-9a-f]{12}"
_LEFTOVER = re.compile(rf"\.(?P<name>.+)\.(?P<role>partial|replaced|removed)-(?P<writer>{_WRITER})")
_SHARD = re.compile(r"shard-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Writer:
    """Who writes a checkpoint: process number, its start time in clock ticks since boot, a token, the host."""

    pid: int
    start: int
    token: str
    host: str

    @classmethod
    def current(cls) -> Writer:
        """Describe this process, with a new token."""
        return cls(os.getpid(), _start_of(os.getpid()) or 0, secrets.token_hex(4), _host())

    @classmethod
    def parse(cls, text: str) -> Writer:
        """Read what ``str`` wrote."""
        pid, start, token, host = text.split("-")
        return cls(int(pid), int(start), token, host)

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}-{self.token}-{self.host}"

    def is_gone(self) -> bool:
        """Whether the process is provably gone: same host, boot and namespace, and no such process any more."""
        if self.host != _host():
            return False
        start = _start_of(self.pid)
        return start is None or (start != self.start and start != 0 and self.start != 0)


@dataclass(frozen=True)
class Leftover:
    """A folder that a writer made beside the checkpoint ``name``."""

    path: Path
    name: str
    role: str
    writer: Writer


def leftover_path(path: Path, role: str, writer: Writer) -> Path:
    """Return the path beside the checkpoint ``path`` for a folder in that role."""
    return path.with_name(f".{path.name}.{role}-{writer}")


def parse_leftover(path: Path) -> Leftover | None:
    """Read a folder's name; ``None`` if it is not a leftover's."""
    match = _LEFTOVER.fullmatch(path.name)
    if match is None:
        return None
    return Leftover(path, match["name"], match["role"], Writer.parse(match["writer"]))


def shard_name(index: int, count: int) -> str:
    """Return the file name of shard ``index`` of ``count``."""
    return f"shard-{index:05d}-of-{count:05d}.safetensors"


def is_shard_name(name: object) -> bool:
    """Whether a manifest may name this file: a shard's name and nothing else, so neither ``..`` nor a path."""
    return isinstance(name, str) and _SHARD.fullmatch(name) is not None


def check_name(path: Path) -> None:
    """Refuse a checkpoint name that could be taken for a leftover or cannot be a folder.

    Raises
    ------
    CheckpointError
    """
    name = path.name
    if not name or name.startswith(".") or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise CheckpointError(
            f"{name!r} cannot name a checkpoint: use 1 to {MAX_NAME_BYTES} printable bytes that do not start with a dot"
        )


def _start_of(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; 0 where that is not known; ``None`` if there is no such process."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        # It is there, and another user's. /proc may hide it (mount option hidepid), so absence there says nothing.
        pass
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in parentheses may hold anything; state and the rest follow the last parenthesis.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _host() -> str:
    parts = [socket.gethostname()]
    # Two nodes, or two containers, may share a host name and a file system.
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]
