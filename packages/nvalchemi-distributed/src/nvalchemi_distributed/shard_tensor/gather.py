"""Reading rows by an index: atoms by edges, systems by atoms, tables by species."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.errors import UnsupportedRowOp
from nvalchemi_distributed.shard_tensor.operands import argument, mark_all, plain, positive, refuse, same_rows, shards
from nvalchemi_distributed.shard_tensor.registry import register
from nvalchemi_distributed.shard_tensor.rows import RowInfo, RowKind
from nvalchemi_distributed.shard_tensor.shape import layer
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, complete, fresh_rows, is_fresh, mark

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_MEANING = "Atoms read by edges are refreshed first if they are out of date, once; the result has the rows of the index"


def source_rows(name: str, x: Tensor, index: ShardTensor) -> Tensor:
    """``x`` ready to be read by ``index``.

    Raises:
        UnsupportedRowOp: an index that numbers something else, or nothing that is known.
    """
    refers = index._info.refers
    if not isinstance(x, ShardTensor):
        if refers is RowKind.NODE:
            raise UnsupportedRowOp(
                f"{name} reads a plain tensor by an index of atoms, and nothing says whether its ghosts are up to "
                "date; make it from a row tensor (torch.zeros_like(x)), or mark it with ShardTensor.wrap"
            )
        return x
    if x._info.kind is RowKind.SYSTEM:
        if refers is RowKind.NODE:
            raise UnsupportedRowOp(f"{name} reads per-system values by an index of atoms; use batch_idx")
        return complete(x)
    if refers is not x._info.kind:
        what = "nothing known" if refers is None else f"{refers.value}s"
        raise UnsupportedRowOp(
            f"{name} reads {x._info.kind.value} rows by an index that numbers {what}; use an index that comes from the "
            "batch (neighbors.senders, neighbors.receivers, batch_idx), or mark it with ShardTensor.wrap and refers="
        )
    # An index without ghosts reads none.
    return plain(x) if index._info.owned else fresh_rows(x)  # type: ignore[no-any-return]


def read(out: Tensor, x: Tensor, index: ShardTensor, dim: int) -> ShardTensor:
    """Mark what was read: the index's rows along ``dim``; integers keep what they number."""
    refers = x._info.refers if isinstance(x, ShardTensor) else None
    info = RowInfo(index._info.kind, dim, fresh=is_fresh(index), refers=refers)
    return mark(out, info, index._context)


@register("gather", _MEANING, "__getitem__")
def _getitem(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x, index = args
    entries = index if isinstance(index, tuple) else (index,)
    chosen = [e for e in entries if isinstance(e, ShardTensor)]
    if not isinstance(x, ShardTensor) or x._info.kind is RowKind.SYSTEM:
        return _table(x, entries, chosen)
    ints = [e for e in entries if isinstance(e, Tensor) and e.dtype is not torch.bool]
    at, dims = 0, x.dim() - sum(1 for e in entries if e is not None and e is not Ellipsis)
    out_dim, row, place = 0, x._info.dim, None
    rows_entry: Any = slice(None)
    plain_entries: list[Any] = []
    for e in entries:
        if e is None:
            out_dim += 1
        elif e is Ellipsis:
            if at <= row < at + dims:
                place = out_dim + row - at
            at, out_dim = at + dims, out_dim + dims
        else:
            if isinstance(e, Tensor) and e.dtype is torch.bool and e.dim() != 1:
                raise refuse(
                    "x[mask]", "choosing entries of rows by a mask of several dimensions (use torch.where, or)"
                )
            if at == row:
                place, rows_entry = out_dim, e
            at += 1
            out_dim += e.dim() if isinstance(e, Tensor) else 0 if isinstance(e, int) else 1
        plain_entries.append(plain(e))
    if place is None:
        place = out_dim + row - at
    if len(ints) > 1 or (len(ints) == 1 and any(isinstance(e, int) for e in entries)):
        raise refuse("x[i, j]", "several indices at once (index one dimension after the other, or)")
    key = tuple(plain_entries)
    if isinstance(rows_entry, slice) and rows_entry == slice(None):
        if chosen:
            raise refuse("x[:, index]", "a row index in another dimension")
        if x._info.layered is not None and len(entries) == 1 and isinstance(entries[0], int):
            return layer(plain(x)[key], x, entries[0])
        return same_rows(plain(x)[key], x, place)
    if x._info.kind is RowKind.EDGE and not (isinstance(rows_entry, ShardTensor) and rows_entry._info.refers):
        # Any choice of edges is a set of edges: each is on one rank alone.
        if isinstance(rows_entry, int):
            raise refuse("x[k]", "one edge")
        return mark(plain(x)[key], replace(x._info, dim=place, layered=x._info.layered if row else None), x._context)
    if not isinstance(rows_entry, ShardTensor) or rows_entry.dtype is torch.bool:
        raise refuse(
            "x[mask]" if _is_mask(rows_entry) else f"x[{rows_entry!r}]"[:60],
            "choosing atom rows by number or mask (all rows are kept under decomposition: use torch.where, a product, "
            "or "
            "sums, which count owned rows; or)",
        )
    ready = source_rows("x[index]", x, rows_entry)
    return read(ready[key], x, rows_entry, place + rows_entry._info.dim)


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype is torch.bool


def _table(x: Tensor, entries: tuple[Any, ...], chosen: list[ShardTensor]) -> Any:
    """A plain or per-system table looked up by row indices."""
    first = chosen[0]
    if first.dtype is torch.bool or len(chosen) > 1 or entries[0] is not first:
        raise refuse("table[…]", "a look-up by masks, by several row indices, or in a later dimension")
    out = source_rows("table[index]", x, first)[tuple(plain(e) for e in entries)]
    return read(out, x, first, first._info.dim)


@register("gather", _MEANING, "index_select", "take_along_dim", "gather")
def _along_dim(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x = argument(args, kwargs, 0, "input")
    if name == "take_along_dim":
        raise refuse(name, "reading rows by this form (use gather or index_select, or)")
    dim, index = positive(argument(args, kwargs, 1, "dim"), x.dim()), argument(args, kwargs, 2, "index")
    if isinstance(x, ShardTensor) and x._info.kind is not RowKind.SYSTEM and dim != x._info.dim:
        return same_rows(func(x, dim, plain(index)), x)
    if not isinstance(index, ShardTensor):
        if isinstance(x, ShardTensor) and x._info.kind is RowKind.EDGE:
            return same_rows(func(x, dim, index), x)
        raise refuse(name, "reading rows by an index that is no row tensor")
    if isinstance(x, ShardTensor) and x._info.kind is RowKind.EDGE and index._info.refers is None:
        return same_rows(func(x, dim, plain(index)), x)
    ready = source_rows(name, x, index)
    return read(func(ready, dim, plain(index)), x, index, dim if name == "index_select" else index._info.dim)


@register("gather", "A table looked up row by row", "embedding")
def _embedding(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    index = argument(args, kwargs, 0, "input")
    weight = argument(args, kwargs, 1, "weight")
    if isinstance(weight, ShardTensor) or not isinstance(index, ShardTensor):
        raise refuse(name, "an embedding whose table has rows")
    return (
        same_rows(func(*args, **kwargs), index, index._info.dim)
        if index._info.refers is None
        else read(func(*args, **kwargs), weight, index, index._info.dim)
    )


@register("gather", "One-hot rows of integers", "one_hot")
def _one_hot(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x, classes = args[0], argument(args, kwargs, 1, "num_classes", -1)
    if classes == -1:
        raise refuse("one_hot without num_classes", "a number of columns that depends on this rank's rows")
    return mark_all(
        func(*args, **kwargs), lambda _: replace(x._info, refers=None, fresh=is_fresh(x)), next(shards(args))
    )
