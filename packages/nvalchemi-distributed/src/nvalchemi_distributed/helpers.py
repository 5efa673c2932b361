"""What a wrapper or an adapter says by intent. Outside a decomposed forward each is the identity (or the plain sum)."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from nvalchemi_distributed.context import current_dd_context
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.shard_tensor.rows import RowInfo, RowKind
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, fresh_rows, mark

__all__ = [
    "Scope",
    "autograd_target",
    "current_dd_context",
    "refresh_neighbors",
    "scatter_to_owners",
    "system_sum",
    "to_local",
]


class Scope(StrEnum):
    """Over which atoms a per-system sum goes: ``OWNED`` over those of all ranks, ``LOCAL`` over this rank's."""

    OWNED = "owned"
    LOCAL = "local"


def to_local(x: Tensor) -> Tensor:
    """This rank's rows as a plain tensor, owned first; no copy, differentiable."""
    return x.to_local() if isinstance(x, ShardTensor) else x


def autograd_target(x: Tensor) -> Tensor:
    """What to give ``torch.autograd.grad`` as ``inputs``.

    A :class:`ShardTensor` is a member of the graph itself, so this is ``x``; the gradient with respect to node rows
    comes back with the parts of all ranks added up.
    """
    return x


def refresh_neighbors(x: Tensor) -> Tensor:
    """Node rows with ghosts equal to their owners. Differentiable: ghosts' gradients go to their owners.

    Args:
        x: (N + G, …) node rows, plain or :class:`ShardTensor`; as it is outside a decomposed forward.

    Raises:
        ModelError: another number of rows, or rows that are not atoms.
    """
    context = current_dd_context()
    if isinstance(x, ShardTensor):
        _require_nodes(x, "refresh_neighbors")
        with torch._C.DisableTorchFunctionSubclass():
            return mark(fresh_rows(x), RowInfo(RowKind.NODE, x._info.dim), x._context)
    return context.refresh(x)


def scatter_to_owners(x: Tensor) -> Tensor:
    """Node rows whose ghosts hold parts: the parts are added to their owners, and ghosts get the sums. Differentiable.

    Args:
        x: (N + G, …) as in :func:`refresh_neighbors`.

    Raises:
        ModelError: another number of rows, or rows that are not atoms.
    """
    context = current_dd_context()
    if isinstance(x, ShardTensor):
        _require_nodes(x, "scatter_to_owners")
        with torch._C.DisableTorchFunctionSubclass():
            plain, dim = x.as_subclass(torch.Tensor), x._info.dim
            folded = x._context.fold(plain.movedim(dim, 0)).movedim(0, dim)
            return mark(folded, RowInfo(RowKind.NODE, dim, fresh=False), x._context)
    return context.refresh(context.fold(x)) if context.is_distributed else x


def system_sum(vals: Tensor, idx: Tensor, n: int, scope: Scope = Scope.OWNED) -> Tensor:
    """Per-system sums of per-atom values, each atom once.

    With ``OWNED`` every rank gets the sum over all ranks, differentiable with the right adjoint; such a value may be
    read anywhere in the forward. An energy made of it is whole on every rank: declare its output
    ``OutputSpec(OutputKind.GLOBAL)``, or use ``LOCAL`` and leave the sum to the framework.

    Args:
        vals: (N + G, …) or (N, …) values, owned atoms first; all rows outside a decomposed forward.
        idx: (N + G,) or (N,) system of each row.
        n: number of systems S.
        scope: see :class:`Scope`.

    Returns:
        (S, …) sums.

    Raises:
        ModelError: numbers of rows that are neither N + G nor N.
    """
    sharded = [t for t in (vals, idx) if isinstance(t, ShardTensor)]
    context = sharded[0]._context if sharded else current_dd_context()
    v, i = to_local(vals), to_local(idx)
    if context.is_distributed:
        for name, t in (("vals", v), ("idx", i)):
            if t.shape[0] not in (context.n_owned, context.n_padded):
                raise ModelError(
                    f"system_sum: {name} has {t.shape[0]} rows; expected {context.n_owned} owned ones or "
                    f"{context.n_padded} with ghosts"
                )
        v, i = v[: context.n_owned], i[: context.n_owned]
    sums = v.new_zeros((n, *v.shape[1:])).index_add(0, i, v)
    if scope is Scope.OWNED:
        sums = context.total(sums)
    if not sharded or not context.is_distributed:
        return sums
    return ShardTensor.wrap(sums, RowInfo(RowKind.SYSTEM, partial=Scope(scope) is Scope.LOCAL), context)


def _require_nodes(x: ShardTensor, name: str) -> None:
    if x._info.kind is not RowKind.NODE:
        raise ModelError(f"{name} needs node rows, got {x._info.kind.value} rows")
