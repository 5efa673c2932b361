"""``refresh`` (owner → ghosts) and ``fold`` (ghosts → owner): each is the other's adjoint.

Rows are the padded ones, N owned then G ghosts; the output has the input's shape. Both are custom ops with fake
kernels,
so that eager code, double backward and ``torch.compile`` share one implementation. Routing travels as tensor arguments.

| | owned row of the result | ghost row of the result |
|---|---|---|
| refresh(x) | x | its owner's x |
| fold(x) | x + the sum of its ghosts' x | 0 |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.domain.plan import HaloPlan
from nvalchemi_distributed.domain.transport import Transport, live_transport


@torch.library.custom_op("nvalchemi_distributed::refresh", mutates_args=())
def _refresh(x: Tensor, send_index: Tensor, peers: Tensor, send: Tensor, recv: Tensor, key: str) -> Tensor:
    out = x.clone()
    n_ghost = int(recv.sum())
    parts = list(x[send_index].split(send.tolist())) if send.numel() else []
    got = live_transport(key).exchange(parts, peers.tolist(), recv.tolist(), "refresh")
    if n_ghost:
        out[x.shape[0] - n_ghost :] = torch.cat(got)
    return out


@torch.library.custom_op("nvalchemi_distributed::fold", mutates_args=())
def _fold(x: Tensor, send_index: Tensor, peers: Tensor, send: Tensor, recv: Tensor, key: str) -> Tensor:
    out = x.clone()
    first = x.shape[0] - int(recv.sum())
    parts = list(x[first:].split(recv.tolist())) if recv.numel() else []
    back = live_transport(key).exchange(parts, peers.tolist(), send.tolist(), "fold")
    out[first:] = 0
    return out.index_add(0, send_index, torch.cat(back)) if back else out


def _fake(x: Tensor, send_index: Tensor, peers: Tensor, send: Tensor, recv: Tensor, key: str) -> Tensor:
    return torch.empty_like(x)


_refresh.register_fake(_fake)
_fold.register_fake(_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:5])
    ctx.key = inputs[5]


def _refresh_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _fold(grad.contiguous(), *ctx.saved_tensors, ctx.key), None, None, None, None, None


def _fold_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _refresh(grad.contiguous(), *ctx.saved_tensors, ctx.key), None, None, None, None, None


_refresh.register_autograd(_refresh_backward, setup_context=_setup)
_fold.register_autograd(_fold_backward, setup_context=_setup)


def refresh(x: Tensor, plan: HaloPlan, transport: Transport) -> Tensor:
    """Copy owners' rows to their ghosts. Collective among ranks that share a halo, forward and backward.

    Args:
        x: (N + G, …) rows; ghost rows are ignored.
        plan: routing of the epoch.
        transport: the mesh.
    """
    return _refresh(x, plan.send_index, plan.peers, plan.send_counts, plan.recv_counts, transport.key)


def fold(x: Tensor, plan: HaloPlan, transport: Transport) -> Tensor:
    """Add ghost rows to their owners and clear them. Arguments as in :func:`refresh`."""
    return _fold(x, plan.send_index, plan.peers, plan.send_counts, plan.recv_counts, transport.key)


def pad(x: Tensor, plan: HaloPlan) -> Tensor:
    """(N, …) owned rows with G zero rows after them."""
    if plan.n_ghost == 0:
        return x
    return torch.cat([x, x.new_zeros((plan.n_ghost, *x.shape[1:]))])


def refresh_owned(x: Tensor, plan: HaloPlan, transport: Transport) -> Tensor:
    """(N, …) owned rows to (N + G, …): :func:`pad`, then :func:`refresh`. Differentiable."""
    return refresh(pad(x, plan), plan, transport)


def copy_to_ghosts(x: Tensor, plan: HaloPlan, transport: Transport) -> Tensor:
    """As :func:`refresh_owned` for any dtype and without a gradient: one message a peer and no padded intermediate."""
    peers, send, recv = plan.numbers
    parts = list(x.index_select(0, plan.send_index).split(send)) if peers else []
    got = transport.exchange(parts, peers, recv, "refresh")
    return torch.cat([x, *got]) if got else x
