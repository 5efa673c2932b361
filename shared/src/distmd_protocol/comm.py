"""The communicator that the protocol needs: control data only, never bulk arrays, never a pickle.

An object that travels is JSON-able (``None``, ``bool``, ``int``, ``float``, ``str``, lists and string-keyed dicts
of these) or ``bytes``. Tuples arrive as lists, as JSON has no tuple. ``encode`` and ``decode`` are what an adapter
of a real communicator puts on its wire.
"""

from __future__ import annotations

import json
from typing import Any, Protocol, TypeAlias, runtime_checkable

from distmd_protocol.errors import ProtocolError

Control: TypeAlias = Any
"""A JSON-able object or ``bytes``."""

_JSON = b"J"
_BYTES = b"B"


@runtime_checkable
class Comm(Protocol):
    """What an adapter provides. Every method but the properties is collective: all ranks call, in the same order."""

    @property
    def rank(self) -> int:
        """This process's rank, 0 ≤ rank < size."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def barrier(self) -> None:
        """Return on no rank before every rank has called."""
        ...

    def broadcast(self, obj: Control, root: int = 0) -> Control:
        """Return ``root``'s object on every rank; the argument of the other ranks is ignored."""
        ...

    def allgather(self, obj: Control) -> list[Control]:
        """Return every rank's object, by rank, on every rank."""
        ...


class LocalComm:
    """One rank. Objects still go through ``encode``/``decode``, so that what works here works on many ranks."""

    rank = 0
    size = 1

    def barrier(self) -> None:
        """Return at once."""

    def broadcast(self, obj: Control, root: int = 0) -> Control:
        """Return a copy of ``obj`` as another rank would see it."""
        if root != 0:
            raise ProtocolError(f"root is {root}, but a LocalComm has one rank; pass root=0")
        return decode(encode(obj))

    def allgather(self, obj: Control) -> list[Control]:
        """Return ``[obj]``, the object as another rank would see it."""
        return [decode(encode(obj))]


def encode(obj: Control) -> bytes:
    """Turn a control object into bytes.

    Raises
    ------
    ProtocolError
        If ``obj`` is neither ``bytes`` nor JSON-able.
    """
    if isinstance(obj, bytes | bytearray | memoryview):
        return _BYTES + bytes(obj)
    try:
        return _JSON + json.dumps(obj, separators=(",", ":")).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(
            f"a {type(obj).__name__} cannot travel between ranks ({error}); send bytes, or None, numbers, strings, "
            "lists and string-keyed dicts"
        ) from error


def decode(data: bytes) -> Control:
    """Turn the bytes of ``encode`` back into the object.

    Raises
    ------
    ProtocolError
        If ``data`` was not made by ``encode``.
    """
    tag, body = bytes(data[:1]), bytes(data[1:])
    if tag == _BYTES:
        return body
    try:
        if tag == _JSON:
            return json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"damaged control message of {len(data)} bytes: {error}") from error
    raise ProtocolError(f"control message of {len(data)} bytes has the unknown tag {tag!r}; use encode() on all ranks")
