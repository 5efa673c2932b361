"""Functions by name, so that a spec is data: ``"module:function"``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from nvalchemi_distributed.errors import AdapterError


def qualified(function: str | Callable[..., Any]) -> str:
    """``"module:name"`` of a function at the top level of a module; a string is checked and returned.

    Raises:
        AdapterError: a lambda, a closure or a bound method, which another process cannot find; or a malformed name.
    """
    if isinstance(function, str):
        module, colon, name = function.partition(":")
        if not (module and colon and name):
            raise AdapterError(f"{function!r} names no function; write 'module:function'")
        return function
    home, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not home or not name or "<" in name or "." in name:
        raise AdapterError(
            f"{function!r} cannot be found by name in another process; use a function at the top level of a module"
        )
    return f"{home}:{name}"


def split(name: str) -> tuple[Any, str]:
    """The object that holds the last part of ``"module:a.b"``, and that part.

    Raises:
        AdapterError: no such module or attribute.
    """
    path, _, rest = name.partition(":")
    *parents, last = rest.split(".")
    try:
        holder: Any = importlib.import_module(path)
        for part in parents:
            holder = getattr(holder, part)
        getattr(holder, last)
    except (ImportError, AttributeError) as error:
        raise AdapterError(f"{name!r} cannot be found: {error}; name what the model calls") from error
    return holder, last


def resolve(name: str) -> Callable[..., Any]:
    """The function of that name.

    Raises:
        AdapterError: no such function, or something that cannot be called.
    """
    holder, last = split(name)
    function = getattr(holder, last)
    if not callable(function):
        raise AdapterError(f"{name!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]
