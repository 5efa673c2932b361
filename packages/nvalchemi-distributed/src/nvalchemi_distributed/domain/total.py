"""``total``: the sum over ranks, differentiable. Its adjoint is itself.

With y = Σ_r x_r on every rank and a loss that is the sum of all ranks' losses, ∂L/∂x_r = Σ_s ∂L_s/∂y: every rank's use
of the sum counts. A quantity that every rank holds whole must therefore enter the loss of one rank only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.domain.transport import Transport, live_transport


@torch.library.custom_op("nvalchemi_distributed::total", mutates_args=())
def _total(x: Tensor, key: str) -> Tensor:
    transport = live_transport(key)
    if transport.size == 1:
        return x.clone()
    transport.roll_call("system_sum")
    transport.traffic.reductions += 1
    transport.traffic.note("system_sum")
    # Summed in float64: a float32 sum would depend on how many ranks took part.
    wide = torch.float64 if x.is_floating_point() else torch.int64
    # A custom op may not return its argument.
    return transport.all_reduce(x.to(wide).contiguous(), torch.add).to(x.dtype, copy=True)


@_total.register_fake
def _(x: Tensor, key: str) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.key = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _total(grad.contiguous(), ctx.key), None


_total.register_autograd(_backward, setup_context=_setup)


def total(x: Tensor, transport: Transport) -> Tensor:
    """Sum of ``x`` over ranks, on every rank. Collective over the mesh, forward and backward.

    Args:
        x: the same shape on every rank; accumulated in float64 (integers in int64), returned in its own dtype.
        transport: the mesh.
    """
    return _total(x, transport.key)
