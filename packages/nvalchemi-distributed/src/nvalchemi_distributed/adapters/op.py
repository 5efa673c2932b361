"""Custom ops, whose kernels see plain memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.context import DistributedContext
from nvalchemi_distributed.errors import AdapterError, UnsupportedRowOp
from nvalchemi_distributed.shard_tensor.rows import RowKind
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, complete, fresh_rows
from nvalchemi_distributed.transforms import Transform


@dataclass(frozen=True)
class OpAdapter:
    """Says what a custom op (``torch.library``, Triton, Warp, …) means over ranks.

    A node argument without a transform reaches the kernel with (N + G, …) rows and fresh ghosts; edge rows as they are;
    per-system values summed over ranks. Every output needs a transform: it says what the rows of the output are.

    Attributes:
        op: the op, or its qualified name ``"namespace::name"`` (all overloads). Who registers it must be imported
            before the first forward; constructing the model usually does that.
        arg_transforms: what is done to arguments, by position.
        output_transforms: what is done to outputs, by position.

    Raises:
        AdapterError: a name that is no op's, an output transform among the arguments, or the reverse.
    """

    op: Any
    arg_transforms: Mapping[int, Transform] = field(default_factory=dict)
    output_transforms: Mapping[int, Transform] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", _op_name(self.op))
        for name, wanted in (("arg_transforms", True), ("output_transforms", False)):
            mapping = dict(getattr(self, name))
            for k, t in mapping.items():
                if not isinstance(k, int) or not isinstance(t, Transform) or t.on_input is not wanted:
                    raise AdapterError(f"OpAdapter {self.op}: {name}[{k!r}] = {t!r} does not belong there")
            object.__setattr__(self, name, MappingProxyType(mapping))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpAdapter) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return (self.op, tuple(sorted(self.arg_transforms.items())), tuple(sorted(self.output_transforms.items())))

    def handler(self, context: DistributedContext) -> Callable[..., Any]:
        """What runs in place of the op when an argument is a :class:`ShardTensor`.

        Raises:
            AdapterError: the op is not registered.
        """
        find_op(self.op)

        def handle(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            plain = [self._argument(k, a, context) for k, a in enumerate(args)]
            named = {k: _ready(v) for k, v in kwargs.items()}
            out = func(*plain, **named)
            if not isinstance(out, tuple | list):
                return self._output(0, out, context)
            return type(out)(self._output(k, o, context) for k, o in enumerate(out))

        return handle

    def _argument(self, k: int, value: Any, context: DistributedContext) -> Any:
        transform = self.arg_transforms.get(k)
        return _ready(value) if transform is None else _ready(transform.change(value, context))

    def _output(self, k: int, value: Any, context: DistributedContext) -> Any:
        if not isinstance(value, Tensor):
            return value
        transform = self.output_transforms.get(k)
        if transform is None:
            raise UnsupportedRowOp(
                f"{self.op}: output {k} has no transform, so nothing says what its rows are; add ScatterOutputs(), "
                "AllReduceSum() or KeepRows(kind) to output_transforms"
            )
        return transform.change(value.as_subclass(ShardTensor), context)


def _ready(value: Any) -> Any:
    if not isinstance(value, ShardTensor) or not hasattr(value, "_info"):
        return value
    if value._info.kind is RowKind.NODE:
        return fresh_rows(value)
    return complete(value) if value._info.kind is RowKind.SYSTEM else value.as_subclass(torch.Tensor)


def _op_name(op: Any) -> str:
    if isinstance(op, str):
        if op.count("::") != 1:
            raise AdapterError(f"{op!r} names no op; write 'namespace::name'")
        return op
    opoverload = getattr(op, "_opoverload", op)
    schema = getattr(opoverload, "_schema", None)
    name = schema.name if schema is not None else getattr(op, "_qualified_op_name", None)
    if not isinstance(name, str):
        raise AdapterError(f"{op!r} is no registered op; give torch.ops.namespace.name or its qualified name")
    return name


def find_op(name: str) -> Any:
    """The op of that qualified name.

    Raises:
        AdapterError: not registered in this process.
    """
    namespace, _, short = name.partition("::")
    try:
        return getattr(getattr(torch.ops, namespace), short)
    except AttributeError:
        raise AdapterError(f"the op {name} is not registered; import the module that registers it") from None
