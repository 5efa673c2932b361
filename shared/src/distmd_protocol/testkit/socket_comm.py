"""A communicator over Unix sockets, so that the protocol's own tests run on several ranks without MPI or torch.

Rank zero is the hub. Every call carries its number and name, so ranks that enter different calls get an error that
names both instead of waiting for ever. For tests: it moves small messages and knows nothing of networks.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from distmd_protocol.comm import Control, decode, encode
from distmd_protocol.errors import ProtocolError
from distmd_protocol.failures import abort_on_uncaught
from distmd_protocol.testkit import wire

RANK_VARIABLE = "DISTMD_LOCAL_RANK"
SIZE_VARIABLE = "DISTMD_LOCAL_SIZE"
ADDRESS_VARIABLE = "DISTMD_LOCAL_ADDRESS"

_CONNECT_WITHIN_S = 30.0


class SocketComm:
    """See the module's text."""

    def __init__(self, rank: int, size: int, address: str, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self._calls = 0
        self._peers: dict[int, socket.socket] = {}
        if rank == 0 and size > 1:
            self._accept(address, timeout)
        elif size > 1:
            self._peers[0] = _connect(address, timeout)
            wire.send(self._peers[0], rank)

    def barrier(self) -> None:
        """Return on no rank before every rank has called."""
        self._exchange("barrier", b"")

    def broadcast(self, obj: Control, root: int = 0) -> Control:
        """Return ``root``'s object on every rank."""
        return decode(self._exchange(f"broadcast from {root}", encode(obj) if self.rank == root else b"")[root])

    def allgather(self, obj: Control) -> list[Control]:
        """Return every rank's object, by rank, on every rank."""
        return [decode(part) for part in self._exchange("allgather", encode(obj))]

    def close(self) -> None:
        """Leave; the others get an error in their next call."""
        for peer in self._peers.values():
            peer.close()

    def _exchange(self, name: str, part: bytes) -> list[bytes]:
        self._calls += 1
        call = f"{name} (call {self._calls})"
        if self.rank == 0:
            calls, parts = [call], [part]
            for peer in range(1, self.size):
                calls.append(str(self._receive(peer)))
                parts.append(wire.receive_exactly(self._peers[peer], self._receive(peer)))
            for peer in range(1, self.size):
                wire.send(self._peers[peer], calls)
                for item in parts:
                    _send_bytes(self._peers[peer], item)
        else:
            wire.send(self._peers[0], call)
            _send_bytes(self._peers[0], part)
            calls = self._receive(0)
            parts = [wire.receive_exactly(self._peers[0], self._receive(0)) for _ in range(self.size)]
        if len(set(calls)) > 1:
            listed = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(calls))
            raise ProtocolError(f"the ranks entered different collectives: {listed}")
        return parts

    def _receive(self, peer: int) -> Any:
        try:
            return wire.receive(self._peers[peer])
        except EOFError as error:
            raise ProtocolError(f"rank {peer} has left") from error

    def _accept(self, address: str, timeout: float) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(self.size)
            listener.settimeout(timeout)
            for _ in range(1, self.size):
                connection, _peer = listener.accept()
                connection.settimeout(None)
                self._peers[int(wire.receive(connection))] = connection


def world_comm() -> SocketComm:
    """Return the communicator that the environment describes, as the launcher ``"local"`` sets it."""
    comm = SocketComm(
        int(os.environ[RANK_VARIABLE]),
        int(os.environ[SIZE_VARIABLE]),
        os.environ[ADDRESS_VARIABLE],
        _CONNECT_WITHIN_S,
    )

    def abort(_code: int) -> None:
        comm.close()

    abort_on_uncaught(abort)
    return comm


def _send_bytes(connection: socket.socket, data: bytes) -> None:
    wire.send(connection, len(data))
    connection.sendall(data)


def _connect(address: str, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
