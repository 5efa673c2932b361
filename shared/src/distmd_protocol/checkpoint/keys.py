"""What a key of an array may look like."""

from __future__ import annotations

from distmd_protocol.checkpoint.limits import MAX_KEY_BYTES, MAX_KEY_DEPTH
from distmd_protocol.errors import CheckpointError

_RESERVED = "__metadata__"


def check_key(key: object) -> str:
    """Return the key if it is one: non-empty segments joined by ``/``, within the limits.

    Raises
    ------
    CheckpointError
        Saying what is wrong with it.
    """
    if not isinstance(key, str):
        raise CheckpointError(f"key {key!r} is a {type(key).__name__}; keys are strings")
    try:
        length = len(key.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise CheckpointError(f"key {key!r} is not Unicode text") from error
    segments = key.split("/")
    if length > MAX_KEY_BYTES:
        raise CheckpointError(f"key {key[:60]!r}… has {length} bytes, the limit is {MAX_KEY_BYTES}; shorten it")
    if len(segments) > MAX_KEY_DEPTH:
        raise CheckpointError(f"key {key[:60]!r}… has {len(segments)} segments, the limit is {MAX_KEY_DEPTH}")
    if "" in segments or key == _RESERVED or "\0" in key:
        raise CheckpointError(f"key {key!r}: use non-empty segments joined by '/', without NUL, other than {_RESERVED}")
    return key
