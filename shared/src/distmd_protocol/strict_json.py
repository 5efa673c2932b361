"""JSON as RFC 8259 has it, and no more: what another language's parser may read otherwise is refused.

Refused on reading: duplicate names, NaN and Infinity, numbers that overflow a float64, lone surrogates, text that is
not UTF-8, nesting deeper than ``max_depth``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from distmd_protocol.errors import ProtocolError

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects."""


def dumps(value: Any) -> bytes:
    """Write a JSON value. numpy scalars become numbers; tuples become arrays.

    Raises
    ------
    ProtocolError
        For what JSON cannot hold: NaN, Infinity, keys that are not strings, other objects, nesting beyond the limit.
    """
    try:
        text = json.dumps(_plain(value, 0), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8")
    except ValueError as error:
        raise ProtocolError(f"not JSON: {error}; write None for a number that is not finite") from error


def loads(data: bytes, max_depth: int = MAX_DEPTH) -> Any:
    """Read a JSON value.

    Raises
    ------
    ProtocolError
        Saying what is wrong with the text.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except RecursionError as error:
        raise ProtocolError(f"JSON is nested deeper than {max_depth} levels") from error
    except ValueError as error:
        raise ProtocolError(f"not JSON: {error}") from error
    _check(value, max_depth)
    return value


def _plain(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ProtocolError(f"nested deeper than {MAX_DEPTH} levels; flatten it")
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ProtocolError(f"key {key!r} is a {type(key).__name__}; JSON objects have strings as keys")
        return {key: _plain(child, depth + 1) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child, depth + 1) for child in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ProtocolError(f"a {type(value).__name__} is not JSON; put arrays among the arrays")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name[:80]!r} appears twice in one object")
            seen.add(name)
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is beyond the range of float64")
    return value


def _check(value: Any, max_depth: int) -> None:
    # Level by level rather than recursively: the depth is what is being checked.
    level: list[Any] = [value]
    depth = 0
    while level:
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _no_surrogates(item)
            elif isinstance(item, dict):
                for name in item:
                    _no_surrogates(name)
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        depth += any(isinstance(item, dict | list) for item in level)
        if depth > max_depth:
            raise ProtocolError(f"JSON is nested deeper than {max_depth} levels")
        level = deeper


def _no_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ProtocolError("JSON text holds half of a surrogate pair") from error
