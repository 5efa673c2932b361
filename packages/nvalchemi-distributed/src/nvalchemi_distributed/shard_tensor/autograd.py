"""Gradients taken inside a model.

A rank's loss is a part; the loss is the sum over ranks. A value that every rank holds whole enters on rank zero only.
The gradient with respect to node rows has the parts that other ranks' uses left in ghost rows folded to their owners.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from nvalchemi_distributed.shard_tensor.operands import plain, refuse
from nvalchemi_distributed.shard_tensor.registry import register
from nvalchemi_distributed.shard_tensor.rows import RowInfo, RowKind
from nvalchemi_distributed.shard_tensor.tensor import ShardTensor, mark

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@register(
    "autograd", "Parts of node gradients are folded to their owners; of replicated values a part of a sum", "grad"
)
def _grad(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused",
             "is_grads_batched", "materialize_grads")  # fmt: skip
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    if call.get("is_grads_batched"):
        raise refuse("autograd.grad(is_grads_batched=True)", "a batch of gradients")
    outputs, inputs = _listed(call["outputs"]), _listed(call["inputs"])
    given = call.get("grad_outputs")
    seeds = _listed(given) if given is not None else [None] * len(outputs)
    call["outputs"] = [plain(o) for o in outputs]
    # As edges of the graph: row tensors among the inputs would lead back to here.
    call["inputs"] = [get_gradient_edge(x) if isinstance(x, ShardTensor) else x for x in inputs]
    call["grad_outputs"] = [_seed(o, s) for o, s in zip(outputs, seeds, strict=True)]
    fill = call.pop("materialize_grads", False)
    # Activation checkpointing runs the model again inside: row tensors must be row tensors there.
    with torch._C._EnableTorchFunction():
        grads = torch.autograd.grad(**call, **({"allow_unused": True} if fill else {}))
    if fill:
        grads = tuple(torch.zeros_like(plain(x)) if g is None else g for g, x in zip(grads, inputs, strict=True))
    return tuple(_whole(g, x) for g, x in zip(grads, inputs, strict=True))


@register("autograd", "As grad; gradients of parameters are this rank's part", "backward")
def _backward(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    gradient = args[1] if len(args) > 1 else kwargs.pop("gradient", None)
    if kwargs.get("inputs") is not None:
        raise refuse("backward(inputs=…)", "a chosen set of gradients (use torch.autograd.grad, or)")
    seed = _seed(x, gradient)
    with torch._C._EnableTorchFunction():
        return torch.autograd.backward(plain(x), seed, **kwargs)


def _seed(output: Tensor, seed: Tensor | None) -> Tensor | None:
    """What flows back into an output on this rank."""
    if not isinstance(output, ShardTensor):
        return seed
    whole = output._info.kind is RowKind.SYSTEM and not output._info.partial
    if not whole or output._context.rank == 0:
        return plain(seed)  # type: ignore[no-any-return]
    return torch.zeros_like(plain(output))


def _whole(grad: Tensor | None, x: Tensor) -> Tensor | None:
    if grad is None or not isinstance(x, ShardTensor):
        return grad
    grad, info = plain(grad), x._info
    assert grad is not None
    if info.kind is RowKind.SYSTEM:
        return mark(grad, RowInfo(RowKind.SYSTEM, partial=True), x._context)
    if info.kind is RowKind.NODE:
        grad = x._context.fold(grad.movedim(info.dim, 0)).movedim(0, info.dim)
    return mark(grad, replace(info, fresh=False, refers=None), x._context)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]
