"""What surrounds one decomposed forward: the context, the adapters, and the fields as row tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from nvalchemi_distributed.context import DistributedContext, activate
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.domain.plan import HaloPlan
from nvalchemi_distributed.domain.transport import Transport
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.neighbors.neighbor_list import NeighborList
from nvalchemi_distributed.shard_tensor import RowInfo, RowKind, ShardTensor
from nvalchemi_distributed.spec import DistributionSpec

_NODE, _EDGE, _SYSTEM = RowInfo(RowKind.NODE), RowInfo(RowKind.EDGE), RowInfo(RowKind.SYSTEM)


@contextmanager
def forward_scope(
    model: nn.Module, distribution: DistributionSpec, plan: HaloPlan, transport: Transport
) -> Iterator[DistributedContext]:
    """Adapters are in place inside the block and gone after it, also after an error.

    The gradient belongs inside too: activation checkpointing calls the model again from there.

    Raises:
        AdapterError: an adapter that cannot be installed; nothing stays behind.
    """
    ops: dict[str, Callable[..., Any]] = {}
    context = DistributedContext(plan, transport, distribution.policy, ops)
    with ExitStack() as stack:
        stack.enter_context(activate(context))
        for op in distribution.custom_ops:
            ops[op.op] = op.handler(context)
        for adapter in distribution.third_party_helpers:
            adapter.install(model, context, stack)
        yield context


def as_row_tensors(view: Batch, context: DistributedContext) -> Batch:
    """``view`` with every field declared: per-atom, per-system, and the edges of its list.

    Raises:
        ModelError: a list that has no edges to declare.
    """

    def wrap(t: Tensor, info: RowInfo) -> Tensor:
        return ShardTensor.wrap(t, info, context)

    node = {k: wrap(v, _NODE) for k, v in view.node_fields.items()}
    system = {k: wrap(v, _SYSTEM) for k, v in view.system_fields.items()}
    out = Batch(node, system, wrap(view.batch_idx, replace(_NODE, refers=RowKind.SYSTEM)))
    edges = view.neighbors
    if isinstance(edges, NeighborList):
        to_nodes = replace(_EDGE, refers=RowKind.NODE)
        out.neighbors = replace(
            edges,
            receivers=wrap(edges.receivers, replace(to_nodes, owned=True)),
            senders=wrap(edges.senders, to_nodes),
            images=wrap(edges.images, _EDGE),
        )
    elif edges is not None:
        raise ModelError(
            f"row tensors need a list of edges, not a {type(edges).__name__}; ask for NeighborListFormat.COO, or set "
            "DistributionSpec(shard_tensors=False)"
        )
    return out
