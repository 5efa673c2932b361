"""Messages between the test process and its workers: a length and JSON, on a stream socket."""

from __future__ import annotations

import json
import signal
import socket
import struct
from typing import Any

import numpy as np

STACK_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of its threads to its file beside the control socket."""

_LENGTH = struct.Struct("<Q")


def send(connection: socket.socket, message: Any) -> None:
    """Send a JSON-able object; numpy arrays and scalars travel as lists and numbers."""
    data = json.dumps(message, default=_plain).encode("utf-8")
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Wait for an object.

    Raises
    ------
    EOFError
        If the other side is gone.
    """
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    return json.loads(receive_exactly(connection, length))


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Wait for ``count`` bytes.

    Raises
    ------
    EOFError
        If the other side is gone.
    """
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 1 << 20))
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if not part:
            raise EOFError("the other side has closed the connection")
        parts += part
    return bytes(parts)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot travel between a rank and the test; return JSON-able values")
