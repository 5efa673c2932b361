"""Products: weights act on features, rows go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nvalchemi_distributed.errors import UnsupportedRowOp
from nvalchemi_distributed.shard_tensor.operands import (
    argument,
    brings_rows,
    common,
    mark_all,
    refuse,
    same_rows,
    settled,
    with_rows,
)
from nvalchemi_distributed.shard_tensor.registry import register
from nvalchemi_distributed.shard_tensor.rows import RowKind
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, is_fresh

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _is_row(x: Any) -> bool:
    return isinstance(x, ShardTensor) and x._info.kind is not RowKind.SYSTEM


@register("products", "A weight acts on the last dimension", "linear")
def _linear(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x = argument(args, kwargs, 0, "input")
    if not _is_row(x) or len(with_rows((args, kwargs))) > 1 or x._info.dim == x.dim() - 1:
        raise refuse(name, "a weight with rows, or a product over rows")
    return same_rows(func(*settled(args), **settled(kwargs)), x)


@register("products", "A matrix acts on features, or one matrix a row; a product over rows is refused",
          "matmul", "mm", "bmm", "mv", "__matmul__", "__rmatmul__", "dot", "baddbmm")  # fmt: skip
def _matmul(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    a, b = (args[1], args[0]) if name == "__rmatmul__" else (args[-2], args[-1])
    rows = with_rows((args, kwargs))
    contracted = (_is_row(a) and a._info.dim == a.dim() - 1) or (_is_row(b) and b._info.dim == max(b.dim() - 2, 0))
    # In the other operand's place for features: (N, F) @ (F, K) keeps N first, (K, F) @ (F, N) keeps N last.
    if contracted or (_is_row(a) and _is_row(b) and min(a._info.dim - a.dim(), b._info.dim - b.dim()) > -3):
        raise refuse(f"{name} of {tuple(a.shape)} and {tuple(b.shape)}", "a product over rows or of all pairs of rows")
    out = func(*settled(args), **settled(kwargs))
    info, place = common(name, rows)
    if place <= -3 and brings_rows((args, kwargs), place, rows[0].shape[rows[0]._info.dim]):
        info = replace(info, fresh=False)
    x = rows[0]
    if place == -1:
        dim = out.dim() - 1
    elif place == -2:
        # A vector on the right takes the last dimension away.
        dim = out.dim() - (1 if b.dim() == 1 else 2)
    else:
        gone = int(a.dim() == 1 or b.dim() == 1)
        dim = out.dim() + place + gone
    return mark_all(out, lambda _: replace(info, dim=dim), x)


@register(
    "products", "Rows carry one letter, which stays in the result; without it the sum over rows is refused", "einsum"
)
def _einsum(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation:
        raise refuse("einsum", "an equation with dots or in sublist form (write letters, or)")
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted(set(left) - {","})
        right = "".join(c for c in letters if left.count(c) == 1)
    rows = [(t, o) for t, o in zip(terms, operands, strict=True) if _is_row(o)]
    letters_of_rows = {t[o._info.dim] for t, o in rows}
    kinds = {o._info.kind for _, o in rows}
    if len(kinds) > 1 or len(letters_of_rows) > 1:
        raise UnsupportedRowOp(f"einsum {equation!r} puts rows of {sorted(kinds)} under the letters {letters_of_rows}")
    letter = letters_of_rows.pop()
    if letter not in right or any(o._info.dim != t.index(letter) or t.count(letter) > 1 for t, o in rows):
        raise refuse(f"einsum {equation!r}", "a sum over rows (multiply, then sum(0), or)")
    plain_rows = any(letter in t and not _is_row(o) for t, o in zip(terms, operands, strict=True))
    x = rows[0][1]
    fresh = all(is_fresh(o) for _, o in rows) and not plain_rows
    out = func(equation, *settled(operands))
    return mark_all(out, lambda _: replace(x._info, dim=right.index(letter), fresh=fresh, refers=None, layered=None), x)


@register("products", "One small matrix or vector a row", "det", "linalg_det", "inverse", "linalg_inv", "linalg_solve",
          "linalg_matrix_norm", "trace", "logdet", "linalg_eigh", "linalg_eigvalsh", "linalg_svd", "linalg_cholesky",
          "linalg_slogdet", "linalg_matrix_power")  # fmt: skip
def _batched(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    rows = with_rows((args, kwargs))
    x = rows[0]
    if any(r._info.dim > r.dim() - 3 for r in rows) or len({r._info.dim for r in rows}) > 1:
        raise refuse(name, "a matrix over rows")
    info, _ = common(name, rows)
    return mark_all(func(*settled(args), **settled(kwargs)), lambda _: replace(info, dim=x._info.dim), x)


@register("products", "Normalised over features", "layer_norm", "group_norm", "rms_norm")
def _norm(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x = argument(args, kwargs, 0, "input")
    if name == "group_norm":
        if x._info.dim != 0:
            raise refuse(name, "groups over rows")
    else:
        shape = argument(args, kwargs, 1, "normalized_shape")
        if x._info.dim >= x.dim() - len(shape):
            raise refuse(name, "a normalisation over rows")
    return same_rows(func(*settled(args), **settled(kwargs)), x)


@register("products", "With stored statistics (eval); statistics of this rank's rows are refused", "batch_norm")
def _batch_norm(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x = argument(args, kwargs, 0, "input")
    if argument(args, kwargs, 5, "training", False) or x._info.dim != 0:
        raise refuse(name, "statistics over this rank's rows (call .eval(), or)")
    return same_rows(func(*settled(args), **settled(kwargs)), x)
