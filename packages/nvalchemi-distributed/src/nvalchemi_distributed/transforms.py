"""What an adapter does to an argument before a call, or to an output after it. Frozen data, saved with the spec.

Letters: N owned atoms, G ghosts, S systems.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvalchemi_distributed.context import DistributedContext
from nvalchemi_distributed.errors import AdapterError
from nvalchemi_distributed.shard_tensor.rows import RowInfo, RowKind
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, fresh_rows, mark

__all__ = [
    "AllReduceSum",
    "GatherInputs",
    "KeepRows",
    "RefreshInputs",
    "RefreshOutputs",
    "ScatterOutputs",
    "SliceOutputsOwned",
    "SliceOwned",
    "Transform",
]


@dataclass(frozen=True)
class Transform:
    """One change of one tensor at a call.

    Attributes:
        at: which argument (its name or position) or which output (its position; all of it when left out). May be left
            out where an adapter gives the position itself.
        key: where the argument or output is a mapping or an object: the entry or attribute that is changed, in place.
    """

    at: str | int | None = None
    key: str | None = None

    on_input: ClassVar[bool] = True

    def change(self, x: Tensor, context: DistributedContext) -> Tensor:
        """The tensor after the change; inside, torch functions on row tensors are plain."""
        raise NotImplementedError

    def apply(self, value: Any, context: DistributedContext) -> Any:
        """Change ``value``, or its entry ``key``.

        Raises:
            AdapterError: no such entry, or no tensor there.
        """
        if self.key is None:
            return self._changed(value, context, str(self.at))
        where = f"{self.at}[{self.key!r}]"
        is_mapping = hasattr(value, "__getitem__") and hasattr(value, "keys")
        found = value.get(self.key) if is_mapping else getattr(value, self.key, None)
        changed = self._changed(found, context, where)
        if is_mapping:
            value[self.key] = changed
        elif hasattr(value, "_replace"):
            return value._replace(**{self.key: changed})
        else:
            setattr(value, self.key, changed)
        return value

    def _changed(self, x: Any, context: DistributedContext, where: str) -> Tensor:
        if not isinstance(x, Tensor):
            raise AdapterError(
                f"{type(self).__name__} of {where}: there is no tensor but {type(x).__name__}; name another argument, "
                "output or key"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return self.change(x, context)


def _rows(x: Tensor, context: DistributedContext, what: str, allowed: tuple[int, ...]) -> None:
    if x.dim() == 0 or x.shape[0] not in allowed:
        raise AdapterError(
            f"{what}: shape {tuple(x.shape)}; expected {' or '.join(map(str, dict.fromkeys(allowed)))} rows "
            f"({context.n_owned} owned, {context.n_padded} with ghosts)"
        )


def _plain(x: Tensor) -> Tensor:
    return x.as_subclass(torch.Tensor) if isinstance(x, ShardTensor) else x


@dataclass(frozen=True)
class GatherInputs(Transform):
    """The argument with a row for every owned atom and ghost, ghosts equal to their owners.

    Given (N, …) owned rows or (N + G, …) rows with ghosts out of date, the call gets (N + G, …).
    """

    def change(self, x: Tensor, context: DistributedContext) -> Tensor:
        """One exchange; none for a :class:`ShardTensor` that is fresh."""
        if isinstance(x, ShardTensor):
            return mark(fresh_rows(x), RowInfo(RowKind.NODE, x._info.dim), context)
        _rows(x, context, "GatherInputs", (context.n_owned, context.n_padded))
        return context.refresh(x) if x.shape[0] == context.n_padded else context.refresh_owned(x)


@dataclass(frozen=True)
class RefreshInputs(Transform):
    """As :class:`GatherInputs`, but the argument has all N + G rows already; owned rows alone are an error."""

    def change(self, x: Tensor, context: DistributedContext) -> Tensor:
        """One exchange."""
        if isinstance(x, ShardTensor):
            return mark(fresh_rows(x), RowInfo(RowKind.NODE, x._info.dim), context)
        _rows(x, context, "RefreshInputs", (context.n_padded,))
        return context.refresh(x)


@dataclass(frozen=True)
class SliceOwned(Transform):
    """The (N, …) owned rows of an argument, so that a kernel counts each atom once."""

    def change(self, x: Tensor, context: DistributedContext) -> Tensor:
        """No exchange."""
        _rows(_plain(x), context, "SliceOwned", (context.n_owned, context.n_padded))
        return _plain(x)[: context.n_owned]


@dataclass(frozen=True)
class ScatterOutputs(Transform):
    """An (N + G, …) output whose ghost rows hold parts: they are added to their owners.

    Plain ghosts then get the sums; those of a :class:`ShardTensor` when they are next read.
    """

    on_input: ClassVar[bool] = False

    def change(self, x: Tensor, context: DistributedContext) -> Tensor:
        """Two exchanges, or one."""
        _rows(_plain(x), context, "ScatterOutputs", (context.n_padded,))
        folded = context.fold(_plain(x))
        if isinstance(x, ShardTensor):
            return mark(folded, RowInfo(RowKind.NODE, fresh=False), context)
        return context.refresh(folded)


@dataclass(frozen=True)
class RefreshOutputs(Transform):
    """An (N + G, …) output whose owned rows are complete: ghosts get their owners' rows."""

    on_input: ClassVar[bool] = False

    def change(self, x: Tensor, context: DistributedContext) -> Tensor:
        """One exchange."""
        _rows(_plain(x), context, "RefreshOutputs", (context.n_owned, context.n_padded))
        if isinstance(x, ShardTensor):
            x = _plain(x)
        return context.refresh(x) if x.shape[0] == context.n_padded else context.refresh_owned(x)


@dataclass(frozen=True)
class SliceOutputsOwned(Transform):
    """The (N, …) owned rows of an output."""

    on_input: ClassVar[bool] = False

    def change(self, x: Tensor, context: DistributedContext) -> Tensor:
        """No exchange."""
        _rows(_plain(x), context, "SliceOutputsOwned", (context.n_owned, context.n_padded))
        return _plain(x)[: context.n_owned]


@dataclass(frozen=True)
class AllReduceSum(Transform):
    """An output that is this rank's part of a sum: every rank gets the whole. Differentiable."""

    on_input: ClassVar[bool] = False

    def change(self, x: Tensor, context: DistributedContext) -> Tensor:
        """One reduction."""
        whole = context.total(_plain(x))
        return mark(whole, RowInfo(RowKind.SYSTEM), context) if isinstance(x, ShardTensor) else whole


@dataclass(frozen=True)
class KeepRows(Transform):
    """An output of a custom op, with what its rows are and nothing else.

    Attributes:
        kind: ``node`` (owned rows complete, ghosts out of date), ``edge``, or ``system`` (this rank's part of a sum).
    """

    kind: RowKind = RowKind.NODE

    on_input: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.kind not in list(RowKind):
            raise AdapterError(
                f"KeepRows kind={self.kind!r} is an unknown kind; use one of {[k.value for k in RowKind]}"
            )
        object.__setattr__(self, "kind", RowKind(self.kind))

    def change(self, x: Tensor, context: DistributedContext) -> Tensor:
        """No exchange."""
        if self.kind is RowKind.NODE:
            _rows(_plain(x), context, "KeepRows", (context.n_padded,))
        return mark(_plain(x), RowInfo(self.kind, fresh=False, partial=self.kind is RowKind.SYSTEM), context)
