"""Which operation has which meaning over ranks: the one table that dispatch and documentation read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from nvalchemi_distributed.shard_tensor.rows import RowKind

Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""``handler(name, func, args, kwargs)``; inside, torch functions on row tensors are plain."""


@dataclass(frozen=True)
class Entry:
    """One group of operations with one meaning.

    Attributes:
        group: heading in the documentation.
        meaning: one sentence.
        handler: what carries it out.
    """

    group: str
    meaning: str
    handler: Handler


REGISTRY: dict[str, Entry] = {}
"""Entry of each operation by name; in-place forms end in an underscore, properties begin with ``property:``."""

SYSTEM = "<per-system and global numbers only>"
"""Entry for every operation that no node or edge rows take part in."""
OTHER = "<any other operation>"
"""Entry for operations that are in no other."""

REMEDIES = (
    "use x.to_local() if it concerns this rank's rows alone, or give it a meaning with an adapter in the model's spec "
    "(OpAdapter for a custom op, FunctionAdapter or MethodAdapter around the code that calls it)"
)


def names(text: str) -> tuple[str, ...]:
    """Names separated by spaces."""
    return tuple(text.split())


def register(group: str, meaning: str, *names: str) -> Callable[[Handler], Handler]:
    """Enter a handler for ``names``. A name has one meaning.

    Raises:
        ValueError: a name that is there already.
    """

    def enter(handler: Handler) -> Handler:
        for name in names:
            if name in REGISTRY:
                raise ValueError(f"{name} has a meaning already: {REGISTRY[name].meaning}")
            REGISTRY[name] = Entry(group, meaning, handler)
        return handler

    return enter


@lru_cache(maxsize=4096)
def name_of(func: Callable[..., Any]) -> str:
    """The name an operation is registered under."""
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(getattr(func, "__self__", None), "__name__", "unknown")
        return f"property:{owner}" if name == "__get__" else f"property:{owner}:{name.strip('_')}"
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return str(schema.name)
    qualified = getattr(func, "_qualified_op_name", None)
    return str(qualified) if qualified is not None else str(name)


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out one operation.

    Raises:
        UnsupportedRowOp: an operation without a declared meaning.
    """
    name = name_of(func)
    entry = REGISTRY.get(name)
    if entry is None or entry.group != "metadata":
        if not _has_rows((args, kwargs)):
            entry = REGISTRY[SYSTEM]
        elif entry is None:
            entry = REGISTRY[OTHER]
    return entry.handler(name, func, args, kwargs)


def _has_rows(value: Any) -> bool:
    """Whether a node or edge tensor is among the arguments."""
    if isinstance(value, Tensor):
        info = value.__dict__.get("_info")
        return info is not None and info.kind is not RowKind.SYSTEM
    if isinstance(value, tuple | list):
        return any(_has_rows(v) for v in value)
    return isinstance(value, dict) and any(_has_rows(v) for v in value.values())
