"""Operations along a dimension: over features row by row, or over rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.domain.reduce import MeshReducer
from nvalchemi_distributed.shard_tensor.operands import (
    argument,
    common,
    mark_all,
    positive,
    refuse,
    settled,
    shards,
    with_rows,
)
from nvalchemi_distributed.shard_tensor.registry import REGISTRY, register
from nvalchemi_distributed.shard_tensor.rows import RowInfo, RowKind
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, mark, owned_rows

# name: (position of dim, its default, whether the dimension goes away)
_ALONG: dict[str, tuple[int, int | None, bool]] = {
    **{n: (1, None, True) for n in ("prod", "argmax", "argmin", "logsumexp", "nansum", "count_nonzero", "median",
                                  "mode")},
    **{n: (1, None, True) for n in ("std", "var")},
    "norm": (2, None, True),
    "linalg_norm": (2, None, True),
    "linalg_vector_norm": (2, None, True),
    **{n: (1, -1, False) for n in ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "glu", "flip", "sort",
                                   "argsort", "logcumsumexp", "cummax", "cummin")},
    "topk": (2, -1, False),
    "normalize": (2, 1, False),
    "cross": (2, -1, False),
    "linalg_cross": (2, -1, False),
    "cosine_similarity": (2, 1, True),
    "diff": (2, -1, False),
    "roll": (2, None, False),
}  # fmt: skip


@register("along features", "Row by row over other dimensions; over the rows themselves refused", *_ALONG)
def _along(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    at, default, reduces = _ALONG[name]
    out = _over_features(name, func, args, kwargs, at, default, reduces)
    if out is NotImplemented:
        raise refuse(name, "a reduction or scan over rows")
    return out


@register(
    "along features",
    "Row by row over other dimensions; over rows owned ones count once: this rank's part of a sum",
    "sum",
)
def _sum(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = _over_features(name, func, args, kwargs, 1, None, True)
    if out is not NotImplemented:
        return out
    x = args[0]
    return mark(func(_counted(x), *args[1:], **kwargs), RowInfo(RowKind.SYSTEM, partial=True), x._context)


@register(
    "along features", "Row by row over other dimensions; over rows the mean over all ranks' atoms or edges", "mean"
)
def _mean(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = _over_features(name, func, args, kwargs, 1, None, True)
    if out is not NotImplemented:
        return out
    x = args[0]
    dim, keepdim = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "keepdim", False)
    rows = _counted(x).to(argument(args, kwargs, 3, "dtype") or x.dtype)
    dims = list(range(x.dim())) if dim is None else [positive(d, x.dim()) for d in _listed(dim)]
    one = torch.tensor(float(math.prod(rows.shape[d] for d in dims)), dtype=torch.float64)
    whole = x._context.total(rows.sum(dims, keepdim=keepdim)) / x._context.total(one).to(rows.dtype)
    return mark(whole, RowInfo(RowKind.SYSTEM), x._context)


@register("along features", "Row by row over other dimensions; over rows the extreme of all ranks, without a gradient",
          "amax", "amin", "max", "min", "any", "all")  # fmt: skip
def _extreme(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(list(shards((args, kwargs)))) > 1 or (len(args) > 1 and isinstance(args[1], Tensor)):
        return REGISTRY["maximum"].handler(name, func, args, kwargs)
    out = _over_features(name, func, args, kwargs, 1, None, True)
    if out is not NotImplemented:
        return out
    x = args[0]
    dims = argument(args, kwargs, 1, "dim")
    if dims is not None and name in ("max", "min"):
        raise refuse(name, "the position of an extreme among rows")
    if x.requires_grad and torch.is_grad_enabled():
        raise refuse(name, "a differentiable extreme over rows (detach() it, or)")
    rows = _counted(x).detach()
    sign = -1.0 if name in ("amin", "min", "all") else 1.0
    wide = sign * rows.to(torch.float64)
    fill = wide.new_full((), -math.inf)
    keepdim = argument(args, kwargs, 2, "keepdim", False)
    axes = tuple(range(x.dim())) if dims is None else tuple(_listed(dims))
    # A rank without rows has no say.
    empty = rows.new_zeros(rows.shape, dtype=torch.float64).sum(axes, keepdim=keepdim) + fill
    local = wide.amax(axes, keepdim=keepdim) if rows.numel() else empty
    transport = x._context.transport
    whole = local if transport is None else MeshReducer(transport).max(local, name)
    if name in ("any", "all"):
        whole = torch.where(
            torch.isinf(whole), torch.tensor(0.0 if name == "any" else -1.0, dtype=torch.float64), whole
        )
    return mark((sign * whole).to(rows.dtype), RowInfo(RowKind.SYSTEM), x._context)


def _over_features(
    name: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    at: int,
    default: int | None,
    reduces: bool,
) -> Any:
    """The result when no row dimension is involved, else ``NotImplemented``."""
    rows = with_rows((args, kwargs))
    info, _ = common(name, rows)
    x = rows[0]
    row, ndim = x._info.dim, x.dim()
    dim = kwargs.get("dims", argument(args, kwargs, at, "dim", default))
    if isinstance(dim, bool) or dim is None:
        return NotImplemented
    dims = [positive(d, ndim) for d in _listed(dim)]
    if row in dims or not dims:
        return NotImplemented
    out = func(*settled(args), **settled(kwargs))
    first = out if isinstance(out, Tensor) else out[0]
    gone = sum(d < row for d in dims) if reduces and first.dim() < ndim else 0
    return mark_all(out, lambda _: replace(info, dim=row - gone), x)


def _listed(dim: Any) -> list[int]:
    return list(dim) if isinstance(dim, tuple | list) else [int(dim)]


def _counted(x: ShardTensor) -> Tensor:
    """The rows that this rank counts: its owned atoms, or its edges."""
    if x._info.kind is RowKind.NODE and x._context.is_distributed:
        return owned_rows(x)
    return x.as_subclass(torch.Tensor)
