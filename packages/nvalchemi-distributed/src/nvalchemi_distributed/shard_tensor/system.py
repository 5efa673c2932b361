"""Per-system and global numbers: whole on every rank, or this rank's part, summed once before it is read.

A part stays one through what is linear in it, so that several sums become one; anything else completes it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.shard_tensor.operands import mark_all, plain, settled, shards, tensors
from nvalchemi_distributed.shard_tensor.registry import REGISTRY, SYSTEM, names, register
from nvalchemi_distributed.shard_tensor.rows import RowInfo, RowKind
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, complete, remark

_UNARY = frozenset(
    names(
        "clone detach contiguous view reshape flatten unsqueeze squeeze transpose permute movedim swapaxes t expand "
        "expand_as "
        "unbind split chunk narrow select __getitem__ sum mean neg positive to type double float view_as "
        "reshape_as unflatten repeat property:T property:mT property:data __iter__ diagonal trace index_select flip "
        "tril triu cumsum property:real"
    )
)
_ADDITIVE = frozenset(names("add sub rsub add_ sub_ __iadd__ __isub__ cat stack"))
_PRODUCT = frozenset(names("mul multiply mul_ __imul__ matmul mm bmm mv dot __matmul__ einsum outer"))
_QUOTIENT = frozenset(names("div true_divide truediv div_ __itruediv__"))
_ZEROS = frozenset(names("zeros_like new_zeros zero_"))
_TO_PYTHON = frozenset(
    names("item tolist numpy __bool__ __float__ __int__ __index__ __contains__ __array__ is_nonzero")
)


@register(
    "system",
    "A part stays a part through what is linear in it; anything else sums it over ranks first, once",
    SYSTEM,
)
def system_op(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any operation whose row tensors are all per-system or global."""
    entry = REGISTRY.get(name)
    if entry is not None and entry.group in ("metadata", "autograd"):
        return entry.handler(name, func, args, kwargs)
    every = list(shards((args, kwargs)))
    like = every[0]
    if name in _TO_PYTHON:
        return func(*settled(args), **settled(kwargs))
    if (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name not in _TO_PYTHON | {"__iter__"}
    ):
        return _in_place(name, func, args, kwargs)
    if _stays_partial(name, every, args, kwargs):
        out = func(*args, **kwargs)
        # Rounding a part to an integer is not linear.
        if not isinstance(out, Tensor) or out.is_floating_point() == like.is_floating_point():
            return mark_all(out, lambda _: RowInfo(RowKind.SYSTEM, partial=True), like)
    out = func(*settled(args), **settled(kwargs))
    info = RowInfo(RowKind.SYSTEM, zero=name in _ZEROS, refers=like._info.refers if name in _UNARY else None)
    return mark_all(out, lambda _: info, like)


def _stays_partial(name: str, every: list[ShardTensor], args: Any, kwargs: Any) -> bool:
    parts = [s for s in every if s._info.partial]
    if not parts:
        return False
    if name in _UNARY:
        return len(every) == 1
    if name in _ADDITIVE:
        # A constant would be counted once a rank. Zeros are no constant.
        others = [t for t in tensors((args, kwargs)) if not (isinstance(t, ShardTensor) and _additive(t))]
        numbers = [a for a in args if isinstance(a, int | float) and name not in ("cat", "stack")]
        return not others and not numbers
    if name in _PRODUCT:
        return len(parts) == 1
    if name in _QUOTIENT:
        return len(parts) == 1 and args[0] is parts[0]
    return False


def _additive(t: ShardTensor) -> bool:
    return t._info.partial or (t._info.zero and t._version == t._seen)


def _in_place(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    every = list(shards((args, kwargs)))
    like = every[0]
    if name in _ZEROS:
        func(target)
        return remark(target, RowInfo(RowKind.SYSTEM, zero=True), like._context)
    if isinstance(target, ShardTensor) and name in _ADDITIVE | _PRODUCT | _QUOTIENT:
        partial = _stays_partial(name, every, args, kwargs)
        if partial and _additive(target):
            func(target, *(plain(a) for a in args[1:]), **kwargs)
            return remark(target, RowInfo(RowKind.SYSTEM, partial=True), like._context)
    if isinstance(target, ShardTensor) and target._info.partial:
        whole = complete(target)
        target.copy_(whole)
    func(target, *settled(args[1:]), **settled(kwargs))
    return remark(target, RowInfo(RowKind.SYSTEM), like._context)


def is_zero(t: Tensor) -> bool:
    """Whether a target of a sum is all zeros: its own sum over ranks. A plain one is looked at."""
    if isinstance(t, ShardTensor):
        return t._info.zero and t._version == t._seen
    return not t.requires_grad and int(torch.count_nonzero(t)) == 0
