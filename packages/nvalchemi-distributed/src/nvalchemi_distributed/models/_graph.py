"""What wrappers of graph networks share: the graph of one forward, and energies and their derivatives from it.

Letters: N rows (owned atoms, then ghosts), M receivers (the first M rows), E edges, S systems.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_distributed._typing import ModelOutputs
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.models.base import BaseModelMixin, ModelConfig
from nvalchemi_distributed.models.gradient import evaluate
from nvalchemi_distributed.neighbors.config import NeighborConfig, NeighborListFormat
from nvalchemi_distributed.neighbors.neighbor_list import NeighborList
from nvalchemi_distributed.presets import SPEC_MPNN_HALO
from nvalchemi_distributed.spec import DistributionSpec, MLIPSpec

SPEC_GRAPH_POTENTIAL = replace(
    SPEC_MPNN_HALO, name="graph network, halo", distribution=DistributionSpec(shard_tensors=False)
)
"""Plain tensors: the wrapper itself sees to the ghosts, between the layers of its network."""


@dataclass(frozen=True)
class Graph:
    """The edges of one forward, none longer than the cutoff.

    Attributes:
        receivers, senders: (E,) int64 rows; receivers are below ``n_receivers`` and never decrease.
        vectors: (E, 3) Å, sender (with its image) minus receiver.
        n_receivers: M.
        n_rows: N.
    """

    receivers: Tensor
    senders: Tensor
    vectors: Tensor
    n_receivers: int
    n_rows: int


def edges_within(data: Batch, cutoff: float) -> Graph:
    """The edges of ``data.neighbors`` that are shorter than ``cutoff`` now.

    The list also holds the pairs of the skin. Most networks weigh an edge to zero at the cutoff; not all do so beyond
    it (a bare polynomial does not), and an edge dropped here costs nothing in the layers.

    Raises:
        ModelError: no COO list, or one that does not reach the cutoff.
    """
    edges = data.neighbors
    if not isinstance(edges, NeighborList):
        raise ModelError("no COO neighbour list on the batch; add a NeighborListHook(model.neighbor_config, …)")
    if edges.cutoff < cutoff:
        raise ModelError(f"the neighbour list reaches {edges.cutoff} Å, the model {cutoff} Å; widen the list")
    x, cell = data.positions, data.cell
    receivers, senders, images = edges.receivers, edges.senders, edges.images
    if edges.cutoff > cutoff:
        with torch.no_grad():
            d = _vectors(x, cell, data.batch_idx, receivers, senders, images)
            keep = (d.square().sum(-1) < cutoff * cutoff).nonzero().squeeze(-1)
        receivers, senders, images = receivers[keep], senders[keep], images[keep]
    vectors = _vectors(x, cell, data.batch_idx, receivers, senders, images)
    return Graph(receivers, senders, vectors, edges.n_receivers, x.shape[0])


def _vectors(x: Tensor, cell: Tensor, batch_idx: Tensor, receivers: Tensor, senders: Tensor, images: Tensor) -> Tensor:
    whole = images.to(x.dtype)
    if cell.shape[0] == 1:
        shift = whole @ cell[0]
    else:
        shift = torch.bmm(whole.unsqueeze(1), cell[batch_idx[senders]]).squeeze(1)
    # index_select: its adjoint is a plain index_add; that of indexing sorts the indices first.
    return x.index_select(0, senders) + shift - x.index_select(0, receivers)


STAND_INS = 2
"""Atoms that :func:`with_stand_ins` adds."""
_MARK = "stand_in"


def with_stand_ins(data: Batch, cutoff: float, number: int) -> Batch:
    """``data`` with two atoms before it that see each other and nothing else; their energy is to be left out.

    Their places depend on the positions (by zero), so that features have a gradient to hand back in every exchange.
    """
    edges = data.neighbors
    at = 0.0 * data.positions.sum(0, keepdim=True)
    apart = at + at.new_tensor([[0.5 * cutoff, 0.0, 0.0]])
    node = {
        _MARK: torch.arange(STAND_INS + data.num_nodes, device=data.device) < STAND_INS,
        "positions": torch.cat([at, apart, data.positions]),
        "atomic_numbers": torch.cat([data.atomic_numbers.new_full((STAND_INS,), number), data.atomic_numbers]),
    }
    filled = Batch(node, data.system_fields, torch.cat([data.batch_idx.new_zeros(STAND_INS), data.batch_idx]))
    pair = torch.arange(STAND_INS, device=data.device)
    images = torch.zeros(STAND_INS, 3, dtype=torch.int64, device=data.device)
    filled.neighbors = NeighborList(pair, pair.flip(0), images, edges.n_receivers + STAND_INS, cutoff)
    return filled


def stand_ins(data: Batch) -> int:
    """How many of the first rows of ``data`` stand in for atoms that are not there."""
    return STAND_INS if _MARK in data.node_fields else 0


class GraphPotential(nn.Module, BaseModelMixin):
    """Base of the wrappers: a network that gives each receiver an energy; forces and stress are its derivatives.

    A subclass implements :meth:`network_input` and :meth:`node_energies`.

    Args:
        cutoff: Å, of one message-passing layer.
        dtype: of the network's parameters, which batches must have too; ``None`` when the network converts by itself.
        atomic_numbers: the elements that the network knows, in its own order; ``None`` when it knows all.
    """

    def __init__(self, cutoff: float, dtype: torch.dtype | None, atomic_numbers: Tensor | None = None) -> None:
        super().__init__()
        self.model_config = ModelConfig(
            outputs=frozenset({"energy", "forces", "virial", "stress"}),
            autograd_outputs=frozenset({"forces", "virial", "stress"}),
            neighbor_config=NeighborConfig(float(cutoff), NeighborListFormat.COO),
        )
        self._dtype = dtype
        self._elements = atomic_numbers
        self._typed: tuple[Tensor, Tensor] | None = None

    @property
    def distribution_spec(self) -> MLIPSpec:
        """Halo storage: edges with owned receivers, ghost features exchanged before each layer but the first."""
        return SPEC_GRAPH_POTENTIAL

    def adapt_input(self, data: Batch) -> dict[str, Any]:
        """The network's own input for ``data``."""
        return self.network_input(data, edges_within(data, self.cutoff))

    def network_input(self, data: Batch, graph: Graph) -> dict[str, Any]:
        """The same, with the edges found already."""
        raise NotImplementedError

    def node_energies(self, inputs: dict[str, Any]) -> Tensor:
        """(M,) eV energies of the receivers; more columns where a subclass reads them in :meth:`adapt_output`."""
        raise NotImplementedError

    def adapt_output(self, energies: Tensor, data: Batch) -> ModelOutputs:
        """Energies of the receivers to ``energy`` (S, 1) eV, in float64: this rank's part of it under decomposition."""
        wide = energies.reshape(-1).to(torch.float64)
        idx = data.batch_idx[: wide.shape[0]]
        return {"energy": wide.new_zeros(data.num_graphs).index_add(0, idx, wide).unsqueeze(-1)}

    def forward(self, data: Batch) -> ModelOutputs:
        """The active outputs for ``data``, whose ``neighbors`` is a COO list reaching at least the cutoff.

        Where the positions already require a gradient, the caller differentiates (the framework does, once for all
        ranks) and only ``energy`` is given.

        Raises:
            ModelError: another dtype than the network's, an element that it does not know, or no fitting list.
        """
        if self._dtype is not None and data.dtype != self._dtype:
            raise ModelError(
                f"{type(self).__name__} holds {self._dtype} parameters, the batch is {data.dtype}; convert one of them "
                "(from_checkpoint(…, dtype=…), or Batch.to)"
            )
        if data.positions.requires_grad:
            return self._evaluate(data)
        if self.model_config.check_active() & self.model_config.autograd_outputs:
            outputs = evaluate(self, data)
            return {name: value.detach() for name, value in outputs.items()}
        with torch.no_grad():
            return self._evaluate(data)

    def _evaluate(self, data: Batch) -> ModelOutputs:
        graph = edges_within(data, self.cutoff)
        if graph.receivers.shape[0]:
            return self.adapt_output(self.node_energies(self.network_input(data, graph)), data)
        # Networks fail on a graph without edges; and a rank without atoms must still take part in every exchange.
        filled = with_stand_ins(data, self.cutoff, int(self._elements[0]) if self._elements is not None else 1)
        energies = self.node_energies(self.network_input(filled, edges_within(filled, self.cutoff)))
        return self.adapt_output(energies[STAND_INS:], data)

    def types(self, data: Batch) -> Tensor:
        """(N,) int64 number of each row's element in the network's order.

        Raises:
            ModelError: elements that the network does not know.
        """
        numbers = data.atomic_numbers
        # Numbers change only at a rebuild: looked up once for each tensor of them.
        if self._typed is not None and self._typed[0] is numbers:
            return self._typed[1]
        known = self._elements
        if known is None:
            types = numbers.to(torch.int64)
        else:
            match = numbers.unsqueeze(-1) == known.to(numbers)
            if not bool(match.any(-1).all()):
                strangers = sorted(set(numbers[~match.any(-1)].tolist()))
                raise ModelError(
                    f"{type(self).__name__} knows the atomic numbers {sorted(known.tolist())}, but the system holds "
                    f"{strangers}; use a checkpoint trained for them"
                )
            types = match.to(torch.int64).argmax(-1)
        self._typed = (numbers, types)
        return types
