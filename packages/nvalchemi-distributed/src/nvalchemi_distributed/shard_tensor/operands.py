"""Finding the row tensors among the arguments of an operation, and what their combination is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.errors import UnsupportedRowOp
from nvalchemi_distributed.shard_tensor.registry import REMEDIES
from nvalchemi_distributed.shard_tensor.rows import RowInfo, RowKind
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, complete, is_fresh, mark


def shards(value: Any) -> Iterator[ShardTensor]:
    """Every row tensor inside nested arguments."""
    if isinstance(value, ShardTensor):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from shards(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from shards(v)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from tensors(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors(v)


def settled(value: Any) -> Any:
    """Arguments with per-system parts summed over ranks; what has rows is left as it is."""
    if isinstance(value, ShardTensor) and value._info.kind is RowKind.SYSTEM:
        return complete(value)
    if isinstance(value, tuple | list):
        return rebuilt(value, [settled(v) for v in value])
    if isinstance(value, dict):
        return {k: settled(v) for k, v in value.items()}
    return value


def rebuilt(value: Any, parts: list[Any]) -> Any:
    """A tuple or list like ``value`` with other entries."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def with_rows(args: Any) -> list[ShardTensor]:
    """The node and edge tensors among the arguments."""
    return [s for s in shards(args) if s._info.kind is not RowKind.SYSTEM]


def common(name: str, rows: list[ShardTensor]) -> tuple[RowInfo, int]:
    """Kind and freshness of elementwise results, and the row dimension counted from the last (−1 is the last).

    Raises:
        UnsupportedRowOp: rows of different kinds, or rows along different dimensions.
    """
    kinds = {r._info.kind for r in rows}
    if len(kinds) > 1:
        raise UnsupportedRowOp(
            f"{name} mixes {' and '.join(sorted(k.value for k in kinds))} rows; gather or scatter one of them by an "
            "index first"
        )
    places = {r._info.dim - r.dim() for r in rows}
    if len(places) > 1:
        shapes = [tuple(r.shape) for r in rows]
        raise UnsupportedRowOp(
            f"{name} would combine rows along different dimensions of shapes {shapes}; unsqueeze one"
        )
    fresh = all(is_fresh(r) for r in rows)
    return RowInfo(kinds.pop(), fresh=fresh), places.pop()


def brings_rows(args: Any, place: int, n_rows: int) -> bool:
    """Whether a plain tensor has an entry a row: its ghosts are nobody's copy."""
    return any(
        not isinstance(t, ShardTensor) and t.dim() >= -place and t.shape[place] == n_rows and n_rows != 1
        for t in tensors(args)
    )


def mark_all(out: Any, info: Callable[[Tensor], RowInfo], like: ShardTensor) -> Any:
    """Mark every tensor of a result, tuples included."""
    if isinstance(out, Tensor):
        return mark(out, info(out), like._context)
    if isinstance(out, tuple | list):
        parts = [mark_all(o, info, like) for o in out]
        # Named results of torch (values, indices) take one sequence.
        return type(out)(parts)
    return out


def same_rows(out: Any, like: ShardTensor, dim: int | None = None) -> Any:
    """Mark a result that has the rows of ``like``, along ``dim``."""
    info = like._info
    new = replace(info, dim=info.dim if dim is None else dim, fresh=is_fresh(like), layered=None)
    return mark_all(out, lambda _: new, like)


def positive(dim: int, ndim: int) -> int:
    """``dim`` counted from the first."""
    return dim + ndim if dim < 0 else dim


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], k: int, name: str, default: Any = None) -> Any:
    """Positional argument ``k``, or the keyword."""
    return args[k] if len(args) > k else kwargs.get(name, default)


def refuse(name: str, what: str) -> UnsupportedRowOp:
    """The error for an operation that has no meaning on these rows, with both remedies."""
    return UnsupportedRowOp(f"{name}: {what} has no declared meaning over ranks; {REMEDIES}")


def plain(x: Any) -> Any:
    """A row tensor as a plain one; anything else as it is."""
    return x.as_subclass(torch.Tensor) if isinstance(x, ShardTensor) else x
