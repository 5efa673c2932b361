"""Operations that treat each row by itself: the result has the operands' rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from nvalchemi_distributed.errors import UnsupportedRowOp
from nvalchemi_distributed.shard_tensor.operands import (
    argument,
    brings_rows,
    common,
    mark_all,
    plain,
    refuse,
    same_rows,
    settled,
    tensors,
    with_rows,
)
from nvalchemi_distributed.shard_tensor.registry import names, register
from nvalchemi_distributed.shard_tensor.rows import RowInfo, RowKind
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, is_fresh, mark, remark

ELEMENTWISE = names(
    "add sub rsub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power "
    "__add__ __sub__ __mul__ __truediv__ __div__ __floordiv__ __mod__ __pow__ __neg__ __pos__ __abs__ "
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __rxor__ "
    "__radd__ __rsub__ __rmul__ __rdiv__ __rtruediv__ __rfloordiv__ __rmod__ __rpow__ "
    "neg negative abs absolute sign sgn sqrt rsqrt square reciprocal exp exp2 expm1 log log2 log10 log1p logaddexp "
    "sin cos tan asin acos atan arcsin arccos arctan atan2 arctan2 sinh cosh tanh asinh acosh atanh sinc hypot "
    "erf erfc erfinv lgamma digamma special_expit special_erf special_erfc special_xlogy special_gammaln sigmoid logit "
    "floor ceil round trunc frac clamp clamp_min clamp_max clip minimum maximum fmin fmax where lerp addcmul addcdiv "
    "masked_fill eq ne lt le gt ge isnan isinf isfinite isclose logical_and logical_or logical_not logical_xor "
    "bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__ __invert__ __rand__ __ror__ heaviside "
    "nan_to_num xlogy copysign deg2rad rad2deg "
    "relu relu6 elu selu celu gelu silu mish softplus softsign tanhshrink hardtanh leaky_relu logsigmoid log_sigmoid "
    "hardswish hardsigmoid threshold softshrink hardshrink positive"
)
CONVERSIONS = names(
    "to type type_as double float half bfloat16 int long short bool cpu contiguous clone detach alias property:data "
    "property:real conj resolve_conj __copy__"
)
CONSTANTS = ("zeros_like", "ones_like", "full_like")


@register("row by row", "Each row by itself; kinds must agree, ghosts stay fresh if all operands' are", *ELEMENTWISE)
def _elementwise(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else None
    if isinstance(x, ShardTensor) and x._info.kind is not RowKind.SYSTEM and not kwargs and _by_itself(args[1:], x):
        # The many: a function of one tensor, or of two with the same note.
        info = x._info
        if info.refers is not None or info.fresh is not is_fresh(x):
            info = RowInfo(info.kind, info.dim, fresh=is_fresh(x))
        return mark(func(*args), info, x._context)
    if "out" in kwargs and kwargs["out"] is not None:
        raise refuse(f"{name}(out=…)", "writing into a given tensor")
    rows = with_rows((args, kwargs))
    info, place = common(name, rows)
    if brings_rows((args, kwargs), place, rows[0].shape[rows[0]._info.dim]):
        info = replace(info, fresh=False)
    out = func(*settled(args), **settled(kwargs))
    return mark_all(out, lambda t: replace(info, dim=t.dim() + place), rows[0])


def _by_itself(others: tuple[Any, ...], x: ShardTensor) -> bool:
    """Whether nothing but numbers and row tensors just like ``x`` takes part."""
    return all(
        type(o) in (int, float)
        or (isinstance(o, ShardTensor) and o._info == x._info and o.dim() == x.dim() and is_fresh(o) is is_fresh(x))
        for o in others
    )


@register("row by row", "A copy or another dtype; integers keep what they number", *CONVERSIONS)
def _conversion(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not isinstance(x, ShardTensor) or x._info.kind is RowKind.SYSTEM:
        # Only asked for another tensor's dtype.
        return func(*args, **kwargs)
    return mark(func(*args, **kwargs), replace(x._info, fresh=is_fresh(x)), x._context)


@register("allocation", "Zeros, ones or a constant with the rows of the argument", *CONSTANTS)
def _constant(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs["input"]
    return mark(func(*args, **kwargs), RowInfo(x._info.kind, x._info.dim), x._context)


@register("allocation", "Memory with the rows of the argument, ghosts out of date", "empty_like")
def _empty(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    return mark(func(*args, **kwargs), RowInfo(x._info.kind, x._info.dim, fresh=False), x._context)


@register(
    "allocation",
    "A plain tensor; it takes on rows when it is scattered into or changed in place",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "new_tensor",
)
def _new(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


_IN_PLACE = names(
    "add_ sub_ mul_ div_ pow_ neg_ abs_ sqrt_ rsqrt_ square_ reciprocal_ exp_ log_ sin_ cos_ tanh_ sigmoid_ relu_ "
    "clamp_ "
    "clamp_min_ clamp_max_ clip_ masked_fill_ addcmul_ addcdiv_ lerp_ nan_to_num_ floor_ ceil_ round_ trunc_ "
    "__iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ "
    "logical_and_ logical_or_ logical_not_ bitwise_and_ bitwise_or_ floor_divide_ remainder_ threshold_ silu_"
)


@register(
    "in place", "As the operation itself; a plain target takes on the rows", *_IN_PLACE, "copy_", "zero_", "fill_"
)
def _in_place(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    rows = with_rows((args, kwargs))
    info, place = common(name, rows)
    n_rows = rows[0].shape[rows[0]._info.dim]
    if target.dim() < -place or target.shape[place] != n_rows:
        raise UnsupportedRowOp(f"{name}: a target of shape {tuple(target.shape)} has no place for {n_rows} rows")
    others = (args[1:], kwargs)
    if name in ("copy_", "zero_", "fill_"):
        # What was there before is gone.
        fresh = all(is_fresh(r) for r in with_rows(others)) and not brings_rows(others, place, n_rows)
    else:
        fresh = info.fresh and not brings_rows((args, kwargs), place, n_rows)
    func(target, *settled(args[1:]), **settled(kwargs))
    return remark(target, replace(info, dim=target.dim() + place, fresh=fresh), rows[0]._context)


@register("in place", "Entries of every row, or masked rows", "__setitem__")
def _setitem(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, index, value = args
    if not isinstance(target, ShardTensor) or target._info.kind is RowKind.SYSTEM:
        raise refuse(name, "writing rows into a tensor without rows")
    dim, entries = target._info.dim, index if isinstance(index, tuple) else (index,)
    fresh = is_fresh(target)
    if target._info.kind is RowKind.NODE:
        entry = _entry_at(entries, dim, target.dim())
        masks = (
            isinstance(entry, ShardTensor)
            and entry.dtype.is_floating_point is False
            and str(entry.dtype) == "torch.bool"
        )
        if masks and entry._info.kind is RowKind.NODE and not any(True for _ in tensors(value) if _.dim()):
            fresh = fresh and is_fresh(entry)
        elif not (isinstance(entry, slice) and entry == slice(None)):
            raise refuse("x[rows] = …", "writing chosen node rows")
    for v in with_rows(value):
        if v._info.kind is not target._info.kind:
            raise UnsupportedRowOp(f"{name} writes {v._info.kind.value} rows into {target._info.kind.value} rows")
        fresh = fresh and is_fresh(v)
    if isinstance(value, Tensor) and not isinstance(value, ShardTensor):
        fresh = fresh and value.dim() == 0
    new = tuple(plain(e) for e in entries)
    func(target, new if isinstance(index, tuple) else new[0], settled(plain(value)))
    remark(target, replace(target._info, fresh=fresh), target._context)


def _entry_at(entries: tuple[Any, ...], dim: int, ndim: int) -> Any:
    """What an index says about dimension ``dim``; a full slice where it says nothing."""
    used = sum(e.dim() if isinstance(e, Tensor) and str(e.dtype) == "torch.bool" else 1 for e in entries
               if e is not None and e is not Ellipsis)  # fmt: skip
    at = 0
    for e in entries:
        if e is None:
            continue
        if e is Ellipsis:
            at += ndim - used
            if at > dim:
                return slice(None)
            continue
        if at == dim:
            return e
        at += e.dim() if isinstance(e, Tensor) and str(e.dtype) == "torch.bool" else 1
        if at > dim:
            return e
    return slice(None)


@register("row by row", "Refused while it draws at random: ghosts would differ from their owners", "dropout",
          "feature_dropout",           "alpha_dropout", "feature_alpha_dropout", "native_dropout")  # fmt: skip
def _dropout(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    p, training = argument(args, kwargs, 1, "p", 0.5), argument(args, kwargs, 2, "training", True)
    if training and p > 0:
        raise refuse(name, f"drawing at random for each row (p={p}, training; call .eval(), or)")
    return same_rows(func(*args, **kwargs), x)
