"""Views and joins: the rows stay rows, along a dimension that is followed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.shard_tensor.operands import (
    argument,
    brings_rows,
    common,
    mark_all,
    plain,
    positive,
    refuse,
    same_rows,
    settled,
    with_rows,
)
from nvalchemi_distributed.shard_tensor.registry import register
from nvalchemi_distributed.shard_tensor.rows import RowKind
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, mark

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@register(
    "shape",
    "Refused where it merges or splits the rows",
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "view_as",
    "reshape_as",
)
def _reshape(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if not isinstance(x, ShardTensor):
        return func(*map(plain, args), **kwargs)
    if name == "view" and any(isinstance(a, torch.dtype) for a in args):
        raise refuse("view(dtype)", "looking at rows as another type")
    out = func(x, *map(plain, args[1:]), **kwargs)
    row, n = x._info.dim, x.shape[x._info.dim]
    before, after = math.prod(x.shape[:row]), math.prod(x.shape[row + 1 :])
    places = [
        k
        for k in range(out.dim())
        if out.shape[k] == n and math.prod(out.shape[:k]) == before and math.prod(out.shape[k + 1 :]) == after
    ]
    if not places:
        raise refuse(f"{name} of {tuple(x.shape)} to {tuple(out.shape)}", "merging rows with another dimension")
    # Several only where rows and neighbours have size one: the nearest keeps their order.
    return same_rows(out, x, min(places, key=lambda k: abs(k - row)))


@register("shape", "The row dimension moves along", "unsqueeze")
def _unsqueeze(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x, dim = args[0], argument(args, kwargs, 1, "dim")
    row = x._info.dim
    return same_rows(func(*args, **kwargs), x, row + (positive(dim, x.dim() + 1) <= row))


@register("shape", "Never takes the row dimension, also where there is one row", "squeeze")
def _squeeze(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x, dim = args[0], argument(args, kwargs, 1, "dim")
    row = x._info.dim
    chosen = (
        range(x.dim()) if dim is None else [positive(d, x.dim()) for d in (dim if isinstance(dim, tuple) else (dim,))]
    )
    if dim is not None and row in chosen:
        raise refuse(name, "taking away the row dimension")
    gone = tuple(d for d in chosen if d != row and x.shape[d] == 1)
    return same_rows(
        torch.squeeze(x, gone) if gone else x.as_subclass(torch.Tensor), x, row - sum(d < row for d in gone)
    )


@register("shape", "The row dimension moves along", "transpose", "swapaxes", "swapdims", "permute", "movedim",
          "moveaxis", "t",           "property:T", "property:mT", "adjoint")  # fmt: skip
def _permute(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    # Where each dimension goes is read off a tensor whose sizes are all different.
    probe = torch.empty(tuple(range(2, x.dim() + 2)), device="meta")
    moved = func(probe, *args[1:], **kwargs)
    return same_rows(func(*args, **kwargs), x, list(moved.shape).index(x._info.dim + 2))


@register("shape", "Rows are not repeated", "expand", "expand_as", "broadcast_to", "repeat", "tile")
def _expand(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if not isinstance(x, ShardTensor) or x._info.kind is RowKind.SYSTEM:
        rows = with_rows((args, kwargs))
        info, place = common(name, rows)
        out = func(*settled(args), **kwargs)
        return mark_all(out, lambda t: replace(info, dim=t.dim() + place), rows[0])
    out = func(x, *map(plain, args[1:]), **kwargs)
    row = out.dim() - (x.dim() - x._info.dim)
    if out.shape[row] != x.shape[x._info.dim]:
        raise refuse(name, "repeating rows")
    return same_rows(out, x, row)


@register("shape", "Over other dimensions than the rows", "unbind", "split", "chunk", "tensor_split",
          "narrow", "select",           "diagonal", "__iter__", "split_with_sizes")  # fmt: skip
def _parts(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    at, default = {"unbind": (1, 0), "narrow": (1, None), "select": (1, None), "__iter__": (9, 0)}.get(name, (2, 0))
    dim = argument(args, kwargs, at, "dim", default)
    if name == "diagonal":
        return _diagonal(func, args, kwargs)
    dim = positive(dim, x.dim())
    if dim == x._info.dim:
        raise refuse(name, "taking rows apart")
    row = x._info.dim - (name in ("unbind", "select", "__iter__") and dim < x._info.dim)
    out = func(*args, **kwargs)
    if x._info.layered is not None and dim == 0 and name == "unbind":
        return tuple(layer(o, x, k) for k, o in enumerate(out))
    if x._info.layered is not None and dim == 0 and name == "select":
        return layer(out, x, argument(args, kwargs, 2, "index"))
    return same_rows(out, x, row)


def layer(out: Tensor, x: ShardTensor, k: int) -> ShardTensor:
    """One set of numbers out of a stack of them."""
    assert x._info.layered is not None
    return mark(out, replace(x._info, dim=x._info.dim - 1, owned=x._info.layered[k], layered=None), x._context)


def _diagonal(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    one = positive(argument(args, kwargs, 2, "dim1", 0), x.dim())
    two = positive(argument(args, kwargs, 3, "dim2", 1), x.dim())
    row = x._info.dim
    if row in (one, two):
        raise refuse("diagonal", "a diagonal through the rows")
    return same_rows(func(*args, **kwargs), x, row - (one < row) - (two < row))


@register(
    "shape",
    "Along other dimensions; along rows only edges are joined",
    "cat",
    "concat",
    "concatenate",
    "hstack",
    "vstack",
)
def _cat(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    parts: Sequence[Tensor] = argument(args, kwargs, 0, "tensors")
    if name in ("hstack", "vstack"):
        raise refuse(name, "joining along a dimension that depends on the shapes (use cat with a dim, or)")
    rows = with_rows(parts)
    info, place = common(name, rows)
    dim = positive(argument(args, kwargs, 1, "dim", 0), rows[0].dim())
    row = rows[0]._info.dim
    if dim == row:
        if info.kind is not RowKind.EDGE or len(rows) != len(parts):
            raise refuse(name, f"joining {info.kind.value} rows")
        refers = {r._info.refers for r in rows}
        owned = all(r._info.owned for r in rows)
        info = replace(info, refers=refers.pop() if len(refers) == 1 else None, owned=owned)
    elif brings_rows(parts, place, rows[0].shape[row]):
        info = replace(info, fresh=False)
    return mark_all(func(*settled(args), **kwargs), lambda _: replace(info, dim=row), rows[0])


@register("shape", "A new dimension beside the rows", "stack")
def _stack(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    parts: Sequence[Tensor] = argument(args, kwargs, 0, "tensors")
    rows = with_rows(parts)
    info, place = common(name, rows)
    refers = {r._info.refers for r in rows}
    info = replace(info, refers=refers.pop() if len(refers) == 1 and len(rows) == len(parts) else None)
    if brings_rows(parts, place, rows[0].shape[rows[0]._info.dim]):
        info = replace(info, fresh=False)
    dim = positive(argument(args, kwargs, 1, "dim", 0), rows[0].dim() + 1)
    row = rows[0]._info.dim
    if dim == 0 and rows[0].dim() == 1 and len(rows) == len(parts):
        info = replace(info, layered=tuple(r._info.owned for r in rows))
    out = func(*settled(args), **kwargs)
    return mark_all(out, lambda _: replace(info, dim=row + (dim <= row)), rows[0])
