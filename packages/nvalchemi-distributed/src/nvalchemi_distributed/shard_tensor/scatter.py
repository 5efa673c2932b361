"""Writing rows into others by an index: edges into atoms, atoms or edges into systems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.errors import UnsupportedRowOp
from nvalchemi_distributed.policy import ScatterMode
from nvalchemi_distributed.shard_tensor.operands import argument, plain, positive, refuse
from nvalchemi_distributed.shard_tensor.registry import register
from nvalchemi_distributed.shard_tensor.rows import RowInfo, RowKind
from nvalchemi_distributed.shard_tensor.system import is_zero
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, mark, remark

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_MEANING = (
    "Into atoms: owned rows complete, ghosts out of date; parts that an index writes to ghosts are folded to their "
    "owners. Into systems: owned atoms and edges once, this rank's part of a sum"
)


@register("scatter", _MEANING, "index_add", "index_add_", "scatter_add", "scatter_add_")
def _scatter_add(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    target, dim, index, source = _arguments(args, kwargs, "source" if name.startswith("index") else "src")
    if len(args) > 4 or set(kwargs) - {"input", "dim", "index", "source", "src", "alpha"}:
        raise refuse(name, "this form of the call")
    source = source * kwargs.get("alpha", 1) if kwargs.get("alpha", 1) != 1 else source
    base = name.rstrip("_")
    op = torch.index_add if base == "index_add" else torch.scatter_add
    return _sum_into(name, op, target, dim, index, source, in_place=name.endswith("_"))


@register(
    "scatter",
    "sum as index_add; mean, amax, amin and prod into atoms where the index holds no ghosts",
    "scatter_reduce",
    "scatter_reduce_",
    "index_reduce",
    "index_reduce_",
)
def _scatter_reduce(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    key = "source" if name.startswith("index") else "src"
    target, dim, index, source = _arguments(args, kwargs, key)
    reduce = argument(args, kwargs, 4, "reduce")
    include = kwargs.get("include_self", args[5] if len(args) > 5 else True)
    in_place = name.endswith("_")
    if reduce == "sum" and include:
        return _sum_into(name, torch.scatter_add, target, dim, index, source, in_place=in_place)
    index = _checked(name, index)
    local = index._info.owned or index._context.policy.scatter_mode is ScatterMode.LOCAL
    if index._info.refers is not RowKind.NODE or not local:
        raise refuse(
            f"{name} with {reduce!r}", "a reduction over ranks other than a sum (write it with sums and counts, or)"
        )
    src, idx = _counted(source, index, dim)
    _check_target(name, target, index, dim)
    out = func(target, dim, idx, src, reduce, include_self=include)
    return _mark(target, out, RowInfo(RowKind.NODE, dim, fresh=False), index, in_place)


@register("scatter", "Owned atoms, or edges, in each system: this rank's part of a sum", "bincount")
def _bincount(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    index = args[0]
    minlength = argument(args, kwargs, 2, "minlength", 0)
    if not isinstance(index, ShardTensor) or index._info.refers is not RowKind.SYSTEM:
        raise refuse(name, "counting anything but the rows of each system")
    if minlength == 0:
        raise refuse("bincount without minlength", "a number of systems that depends on this rank's rows")
    weights, idx = _counted(argument(args, kwargs, 1, "weights"), index, 0)
    counts = torch.bincount(idx, weights=weights, minlength=minlength)
    return mark(counts, RowInfo(RowKind.SYSTEM, partial=True), index._context)


@register("scatter", "With accumulate=True as index_add; otherwise refused", "index_put", "index_put_")
def _index_put(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    target, indices, values = args[:3]
    if not argument(args, kwargs, 3, "accumulate", False) or len(indices) != 1:
        raise refuse(name, "writing rows without adding them, or by several indices")
    if not isinstance(values, Tensor):
        raise refuse(name, "a value that is no tensor")
    index = _checked(name, indices[0])
    rows = plain(values).expand(index.shape[0], *plain(target).shape[1:])
    source = mark(rows, values._info, values._context) if isinstance(values, ShardTensor) else rows
    return _sum_into(name, torch.index_add, target, 0, index, source, in_place=name.endswith("_"))


def _arguments(args: Args, kwargs: Kwargs, source: str) -> tuple[Tensor, int, Any, Any]:
    target = argument(args, kwargs, 0, "input")
    dim = positive(argument(args, kwargs, 1, "dim"), target.dim())
    return target, dim, argument(args, kwargs, 2, "index"), argument(args, kwargs, 3, source)


def _sum_into(
    name: str, op: Callable[..., Tensor], target: Tensor, dim: int, index: Any, source: Any, *, in_place: bool
) -> Any:
    index = _checked(name, index)
    context = index._context
    if isinstance(source, ShardTensor) and source._info.kind is not index._info.kind:
        raise UnsupportedRowOp(
            f"{name} writes {source._info.kind.value} rows by an index with {index._info.kind.value} rows"
        )
    src, idx = _counted(source, index, dim)
    _check_target(name, target, index, dim)
    base = target
    if index._info.refers is RowKind.NODE:
        corrected = not index._info.owned and context.policy.scatter_mode is ScatterMode.HALO_CORRECTION
        if corrected:
            part = op(torch.zeros_like(base), dim, idx, src).movedim(dim, 0)
            part = context.fold(part).movedim(0, dim)
            out = base.add_(part) if in_place else base + part
        else:
            out = _apply(op, base, dim, idx, src, in_place)
        return _mark(target, out, RowInfo(RowKind.NODE, dim, fresh=False), index, in_place)
    if (isinstance(target, ShardTensor) and target._info.partial) or is_zero(target):
        out = _apply(op, base, dim, idx, src, in_place)
        return _mark(target, out, RowInfo(RowKind.SYSTEM, partial=True), index, in_place)
    # Something that every rank holds whole is in the target: it counts once, so what is added is summed first.
    whole = context.total(op(torch.zeros_like(base), dim, idx, src))
    out = base.add_(whole) if in_place else base + whole
    return _mark(target, out, RowInfo(RowKind.SYSTEM), index, in_place)


def _apply(op: Callable[..., Tensor], base: Tensor, dim: int, idx: Tensor, src: Tensor, in_place: bool) -> Tensor:
    if not in_place:
        return op(base, dim, idx, src)
    return base.index_add_(dim, idx, src) if op is torch.index_add else base.scatter_add_(dim, idx, src)


def _mark(target: Tensor, out: Tensor, info: RowInfo, index: ShardTensor, in_place: bool) -> ShardTensor:
    return remark(target, info, index._context) if in_place else mark(out, info, index._context)


def _checked(name: str, index: Any) -> ShardTensor:
    if not isinstance(index, ShardTensor) or index._info.refers not in (RowKind.NODE, RowKind.SYSTEM):
        raise UnsupportedRowOp(
            f"{name}: nothing says what the index numbers; use one that comes from the batch (neighbors.receivers, "
            "neighbors.senders, batch_idx), or mark it with ShardTensor.wrap and refers="
        )
    return index


def _counted(source: Any, index: ShardTensor, dim: int) -> tuple[Any, Tensor]:
    """Source and index without the rows that another rank counts."""
    idx = plain(index)
    if index._info.kind is not RowKind.NODE or not index._context.is_distributed:
        return plain(source), idx
    n = index._context.n_owned
    idx = idx.narrow(index._info.dim, 0, n)
    if not isinstance(source, Tensor):
        return source, idx
    return plain(source).narrow(source._info.dim if isinstance(source, ShardTensor) else dim, 0, n), idx


def _check_target(name: str, target: Tensor, index: ShardTensor, dim: int) -> None:
    """A target of atoms has a row for every owned atom and ghost.

    Raises:
        UnsupportedRowOp: another size, or rows of another kind.
    """
    kind = index._info.refers
    if isinstance(target, ShardTensor):
        if target._info.kind is not kind or (kind is RowKind.NODE and target._info.dim != dim):
            raise UnsupportedRowOp(
                f"{name} by an index of {kind.value if kind else '?'}s into {target._info.kind.value} rows"
            )
        return
    if kind is RowKind.NODE and index._context.is_distributed and target.shape[dim] != index._context.n_padded:
        raise UnsupportedRowOp(
            f"{name} by an index of atoms into a tensor of shape {tuple(target.shape)}: dimension {dim} needs "
            f"{index._context.n_padded} rows, {index._context.n_owned} owned and the rest ghosts; make it with "
            "torch.zeros_like(x) or x.shape[0]"
        )
