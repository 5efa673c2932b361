"""The tensor subclass: a plain tensor and a note of what its rows are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.context import DistributedContext
from nvalchemi_distributed.errors import UnsupportedRowOp
from nvalchemi_distributed.policy import GatherMode
from nvalchemi_distributed.shard_tensor.registry import dispatch
from nvalchemi_distributed.shard_tensor.rows import RowInfo, RowKind


class ShardTensor(torch.Tensor):
    """A tensor that knows what its rows are (:class:`~nvalchemi_distributed.shard_tensor.rows.RowInfo`).

    It shares its memory with the tensor it was made from and is computed with like any other. Where an operation has
    a meaning over ranks, that meaning is carried out: a gather of atom rows first refreshes ghosts that are out of
    date, a scatter by edges gives atom rows whose ghosts are out of date, a sum over atoms counts owned ones. An
    operation without a declared meaning raises :class:`~nvalchemi_distributed.errors.UnsupportedRowOp`.

    Made by the framework for the fields of a batch, or with :meth:`wrap`.
    """

    _info: RowInfo
    _context: DistributedContext
    _seen: int
    _read: tuple[int, Tensor] | None

    @staticmethod
    def wrap(tensor: Tensor, info: RowInfo, context: DistributedContext) -> ShardTensor:
        """``tensor`` with its rows declared; no copy, same place in the autograd graph.

        Args:
            tensor: any tensor; ``NODE`` needs N + G rows along ``info.dim``.
            info: what the rows are.
            context: the forward they belong to.

        Raises:
            UnsupportedRowOp: another number of rows.
        """
        if info.kind is RowKind.NODE and context.is_distributed and tensor.shape[info.dim] != context.n_padded:
            raise UnsupportedRowOp(
                f"shape {tuple(tensor.shape)} cannot hold node rows along dimension {info.dim}: there are "
                f"{context.n_padded}, {context.n_owned} owned and {context.n_padded - context.n_owned} ghosts"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return mark(tensor, info, context)

    @property
    def row_info(self) -> RowInfo:
        """What the rows are; ``fresh`` takes into account what has been written through views."""
        with torch._C.DisableTorchFunctionSubclass():
            return replace(self._info, fresh=is_fresh(self))

    def to_local(self) -> Tensor:
        """This rank's values as a plain tensor: no copy, still differentiable, and without further meaning over ranks.

        Atom rows: owned, then ghosts, which may be out of date (``refresh_neighbors(x).to_local()`` has them fresh).
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Handlers compute on the tensors themselves; results are plain until they are marked.
        with torch._C.DisableTorchFunctionSubclass():
            return dispatch(func, args, dict(kwargs or {}))


# What follows runs inside handlers, where torch functions are plain.


def mark(tensor: Tensor, info: RowInfo, context: DistributedContext) -> ShardTensor:
    """A new :class:`ShardTensor` over ``tensor``."""
    out = tensor.as_subclass(ShardTensor)
    out._info, out._context, out._seen, out._read = info, context, out._version, None
    return out


def remark(tensor: Tensor, info: RowInfo, context: DistributedContext) -> ShardTensor:
    """``tensor`` itself, after a change in place: the caller's own object says what its rows are from now on.

    Raises:
        UnsupportedRowOp: a parameter, which is no place for rows.
    """
    if not isinstance(tensor, ShardTensor):
        if type(tensor) is not torch.Tensor:
            raise UnsupportedRowOp(f"a {type(tensor).__name__} was written to in place; write to a new tensor")
        # As torch does for lazily initialised parameters. A new object would leave the caller's name without its rows.
        tensor.__class__ = ShardTensor
    assert isinstance(tensor, ShardTensor)
    tensor._info, tensor._context, tensor._seen, tensor._read = info, context, tensor._version, None
    return tensor


def is_fresh(x: ShardTensor) -> bool:
    """Whether ghost rows equal their owners'. A write through a view counts as a change: views share the version."""
    return x._info.fresh and x._version == x._seen


def fresh_rows(x: ShardTensor) -> Tensor:
    """Plain node rows with ghosts up to date; a tensor that is read twice is refreshed once."""
    context = x._context
    if is_fresh(x) or context.policy.gather_mode is GatherMode.LOCAL:
        return x.as_subclass(torch.Tensor)
    return _once(x, lambda: _along(x, context.refresh))


def complete(x: ShardTensor) -> Tensor:
    """Plain per-system or global numbers, summed over ranks if they are a part; once for each tensor."""
    if not x._info.partial:
        return x.as_subclass(torch.Tensor)
    return _once(x, lambda: x._context.total(x.as_subclass(torch.Tensor)))


def _along(x: ShardTensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    plain, dim = x.as_subclass(torch.Tensor), x._info.dim
    return op(plain) if dim == 0 else op(plain.movedim(dim, 0)).movedim(0, dim)


def _once(x: ShardTensor, make: Callable[[], Tensor]) -> Tensor:
    # Inside activation checkpointing the recomputation must issue the same operations as the forward did.
    if _checkpointing():
        return make()
    if x._read is None or x._read[0] != x._version or (torch.is_grad_enabled() and not _usable(x._read[1], x)):
        x._read = (x._version, make())
    return x._read[1]


def _usable(cached: Tensor, x: Tensor) -> bool:
    """A result made under ``no_grad`` does not serve a differentiable read."""
    return cached.requires_grad or not x.requires_grad


# torch 2.6 cannot say whether checkpointing is on; every read refreshes there: right, with more exchanges.
_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _checkpointing() -> bool:
    return _TOP_HOOKS is None or _TOP_HOOKS(True) is not None


def owned_rows(x: ShardTensor, dim: int | None = None) -> Tensor:
    """Plain owned rows."""
    return x.as_subclass(torch.Tensor).narrow(x._info.dim if dim is None else dim, 0, x._context.n_owned)
