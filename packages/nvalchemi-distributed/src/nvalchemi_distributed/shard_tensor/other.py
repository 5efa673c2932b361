"""What has no entry of its own: adapted custom ops, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvalchemi_distributed.errors import UnsupportedRowOp
from nvalchemi_distributed.shard_tensor.operands import refuse, with_rows
from nvalchemi_distributed.shard_tensor.registry import OTHER, register


@register("any other", "A custom op with an OpAdapter goes by it; everything else raises UnsupportedRowOp", OTHER)
def _other(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = with_rows((args, kwargs))
    handler = rows[0]._context.custom_ops.get(name)
    if handler is not None:
        return handler(func, args, kwargs)
    if "::" in name:
        raise UnsupportedRowOp(
            f"{name}: a custom op on {rows[0]._info.kind.value} rows has no declared meaning over ranks; add an "
            "OpAdapter for it to the model's spec, or give it x.to_local() if it concerns this rank's rows alone"
        )
    raise refuse(name, f"this operation on {rows[0]._info.kind.value} rows")
