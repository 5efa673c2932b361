"""Frozen declarations as JSON and back, without loss. Nothing is executed: names stay names.

A declaration is ``{"type": name, "fields": {…}}``, a mapping ``{"pairs": [[key, value], …]}``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from nvalchemi_distributed.errors import ModelError


def to_plain(value: Any) -> Any:
    """JSON-able form of a declaration.

    Raises:
        ModelError: a value that is no declaration, number, text, list or mapping of them.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, "fields": fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {"pairs": sorted(([k, to_plain(v)] for k, v in value.items()), key=lambda pair: str(pair[0]))}
    if isinstance(value, tuple | list):
        return [to_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ModelError(f"{value!r} cannot be written into a spec; use names, numbers and the declared types")


def from_plain(plain: Any, types: Mapping[str, type]) -> Any:
    """The reverse of :func:`to_plain`.

    Args:
        plain: decoded JSON.
        types: declarations by name; anything else is refused.

    Raises:
        ModelError: an unknown type, or fields that are unknown or missing.
    """
    if isinstance(plain, list):
        return tuple(from_plain(v, types) for v in plain)
    if not isinstance(plain, dict):
        return plain
    if set(plain) == {"pairs"}:
        return {k: from_plain(v, types) for k, v in plain["pairs"]}
    if set(plain) != {"type", "fields"} or plain["type"] not in types:
        raise ModelError(f"spec holds {plain.get('type', sorted(plain))!r}, which this release does not know")
    cls = types[plain["type"]]
    known = {f.name for f in dataclasses.fields(cls)}
    if set(plain["fields"]) != known:
        raise ModelError(f"{cls.__name__} fields {sorted(set(plain['fields']) ^ known)} are unknown or missing")
    return cls(**{k: from_plain(v, types) for k, v in plain["fields"].items()})
