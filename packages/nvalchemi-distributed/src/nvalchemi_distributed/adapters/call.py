"""A call with transforms before and after it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from nvalchemi_distributed.context import DistributedContext
from nvalchemi_distributed.errors import AdapterError
from nvalchemi_distributed.shard_tensor.operands import rebuilt
from nvalchemi_distributed.transforms import Transform


def with_transforms(
    function: Callable[..., Any], transforms: Sequence[Transform], context: DistributedContext, where: str
) -> Callable[..., Any]:
    """``function`` whose arguments and outputs are changed as ``transforms`` say.

    Args:
        function: what is called.
        transforms: in their order; those of outputs after the call.
        context: the forward it belongs to.
        where: for messages.

    Raises:
        AdapterError: at the call: no such argument, output or tensor.
    """
    before = [t for t in transforms if t.on_input]
    after = [t for t in transforms if not t.on_input]
    names = _parameters(function)
    for t in before:
        if t.at is None:
            raise AdapterError(f"{where}: {type(t).__name__} does not say which argument; give its name or position")
        if isinstance(t.at, str) and names is not None and t.at not in names:
            raise AdapterError(f"{where}: no argument {t.at!r}; there are {names}")

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        positional = list(args)
        for t in before:
            assert t.at is not None
            if isinstance(t.at, str) and t.at in kwargs:
                kwargs[t.at] = t.apply(kwargs[t.at], context)
                continue
            k = t.at if isinstance(t.at, int) else names.index(t.at) if names is not None else len(positional)
            if not 0 <= k < len(positional):
                raise AdapterError(
                    f"{where}: argument {t.at!r} was not passed; there were {len(positional)} positional"
                )
            positional[k] = t.apply(positional[k], context)
        out = function(*positional, **kwargs)
        for t in after:
            out = _output(out, t, context, where)
        return out

    return call


def _output(out: Any, t: Transform, context: DistributedContext, where: str) -> Any:
    if t.at is None or not isinstance(out, tuple | list):
        if t.at not in (None, 0):
            raise AdapterError(f"{where}: output {t.at!r}, but there is one output, a {type(out).__name__}")
        return t.apply(out, context)
    if not isinstance(t.at, int) or not 0 <= t.at < len(out):
        raise AdapterError(f"{where}: output {t.at!r}; there are {len(out)}, give a position")
    parts = list(out)
    parts[t.at] = t.apply(parts[t.at], context)
    return rebuilt(out, parts)


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    """Names of the positional parameters; ``None`` where they cannot be known."""
    schema = getattr(function, "schema", None)
    if schema is not None and hasattr(schema, "arguments"):
        names = [a.name for a in schema.arguments]
        return names[1:] if names[:1] == ["self"] else names
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values()):
        return None
    return [p.name for p in signature.parameters.values() if p.kind in kinds]
