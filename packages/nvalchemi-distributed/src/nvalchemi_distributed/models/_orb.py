"""What the wrappers of conservative and of direct ORB models share: the network, and sums over a whole system.

Rhodes et al., arXiv:2504.06231 (2025). Needs the ``models`` extra.

Letters: N rows (owned atoms, then ghosts), M receivers (the first M rows), F features, S systems.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_distributed._typing import ModelOutputs
from nvalchemi_distributed.context import current_dd_context
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.models._ghost_exchange import ghost_exchange
from nvalchemi_distributed.models._graph import Graph, GraphPotential, stand_ins

_ATOMS = "orb_atoms"
_ELEMENTS = 118


class ORBPotential(GraphPotential):
    """Base of the two wrappers.

    A layer of ORB adds messages to receivers and to senders. An edge between an owned atom and a ghost is therefore
    computed on both ranks, in both directions, so that owned rows are complete without a way back; ghost features are
    fetched before every layer but the first. ORB's energy is a function of the mean of all atoms' features: the mean is
    taken over ranks within the forward.

    Args:
        model: the regressor, not compiled. It may be converted with ``.double()``.
        cutoff: Å.

    Raises:
        ModelError: a model that is conditioned on charge and spin.
    """

    def __init__(self, model: nn.Module, cutoff: float) -> None:
        if getattr(model.model, "conditioner", None) is not None:
            raise ModelError("this ORB model is conditioned on charge and spin, which a batch does not carry")
        super().__init__(cutoff, next(model.parameters()).dtype)
        self.model = model.eval()
        config = getattr(model, "system_config", None)
        self._most_neighbors = None if config is None else int(config.max_num_neighbors)

    def system_fields(self, batch: Batch) -> dict[str, Tensor]:
        """``orb_atoms`` (S, 1) float64: atoms of each whole system, over which features are averaged."""
        counts = torch.bincount(batch.batch_idx, minlength=batch.num_graphs)
        return {_ATOMS: counts.to(torch.float64).unsqueeze(-1)}

    def network_input(self, data: Batch, graph: Graph) -> dict[str, Any]:
        """What ORB's modules read of an ``AtomGraphs``, with edges of both directions where a ghost takes part.

        Raises:
            ModelError: more neighbours than the model was made for: it would have dropped the farthest.
        """
        m = graph.n_receivers
        self._check_neighbors(graph)
        crossing = (graph.senders >= m).nonzero().squeeze(-1)
        senders = torch.cat([graph.senders, graph.receivers[crossing]])
        receivers = torch.cat([graph.receivers, graph.senders[crossing]])
        vectors = torch.cat([graph.vectors, -graph.vectors[crossing]])
        numbers = data.atomic_numbers.to(torch.int64)
        one_hot = nn.functional.one_hot(numbers, _ELEMENTS).to(data.dtype)
        return {
            "graph": SimpleNamespace(
                senders=senders,
                receivers=receivers,
                node_features={"atomic_numbers": numbers, "atomic_numbers_embedding": one_hot},
                # From sender to receiver.
                edge_features={"vectors": -vectors},
            ),
            "owned_edges": graph.receivers.shape[0],
            "exchange": ghost_exchange(data),
            "data": data,
            "n_receivers": m,
        }

    def node_features(self, inputs: dict[str, Any]) -> Tensor:
        """(M, F) features of the receivers after the last layer."""
        graph, exchange, net = inputs["graph"], inputs["exchange"], self.model.model
        m: int = inputs["n_receivers"]
        nodes, edges = net._encoder(net.featurize_nodes(graph), net.featurize_edges(graph))
        weight = _envelope(net, graph.edge_features["vectors"])
        for layer, block in enumerate(net.gnn_stacks):
            if layer:
                nodes = exchange.refresh(nodes[:m])
            nodes, edges = block(nodes, edges, graph.senders, graph.receivers, weight)
        return nodes[:m]

    def atoms(self, data: Batch) -> Tensor:
        """(S, 1) float64 atoms of each whole system.

        Raises:
            ModelError: a decomposed batch that does not say.
        """
        counts = data.system_fields.get(_ATOMS)
        if counts is not None:
            return counts
        if current_dd_context().is_distributed:
            raise ModelError(f"{_ATOMS} is missing on a decomposed batch; use DomainParallel.partition")
        own = data.batch_idx[stand_ins(data) :]
        return torch.bincount(own, minlength=data.num_graphs).to(torch.float64).unsqueeze(-1)

    def system_sums(self, data: Batch, *rows: Tensor) -> list[Tensor]:
        """Each (M, K) of the receivers to (S, K), summed over all ranks. Collective over the mesh: one reduction."""
        # Rows that stand in for a rank's missing atoms belong to no system.
        first, idx = stand_ins(data), data.batch_idx[: rows[0].shape[0]]
        parts = [r.new_zeros(data.num_graphs, r.shape[1]).index_add(0, idx[first:], r[first:]) for r in rows]
        sums = current_dd_context().total(torch.cat([p.to(torch.float64) for p in parts], 1))
        split = sums.split([p.shape[1] for p in parts], 1)
        return [total.to(part.dtype) for total, part in zip(split, parts, strict=True)]

    def head_energies(self, head: nn.Module, sums: Tensor, inputs: dict[str, Any]) -> Tensor:
        """(M,) eV: reference of each atom, and its equal share of what the head makes of the mean.

        Args:
            head: ORB's ``EnergyHead``.
            sums: (S, F) features summed over each whole system.
            inputs: of the forward.
        """
        data, m = inputs["data"], inputs["n_receivers"]
        counts = self.atoms(data).to(sums.dtype)
        per_system = head.normalizer.inverse(head.mlp(aggregated(head, sums, counts))).reshape(-1)
        if not head.atom_avg:
            per_system = per_system / counts.squeeze(-1)
        numbers = inputs["graph"].node_features["atomic_numbers"][:m]
        single = torch.ones(m, dtype=torch.int64, device=sums.device)
        return per_system[data.batch_idx[:m]] + head.reference(numbers, single)

    def pair_repulsion(self, view: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """What ORB's pair repulsion (Ziegler, Biersack and Littmark) gives, its energy as (M,) eV of each receiver.

        Args:
            view: of an ``AtomGraphs``, each of whose N atoms is a system of its own.
            inputs: of the forward.
        """
        out = self.model.pair_repulsion_fn(view)
        data, m = inputs["data"], inputs["n_receivers"]
        energy = out["energy"].reshape(-1)[:m]
        # ORB's conservative models add the mean over a system's atoms, the direct ones the sum.
        if self.model.pair_repulsion_fn.node_aggregation == "mean":
            energy = energy / self.atoms(data).to(energy.dtype).squeeze(-1)[data.batch_idx[:m]]
        return {**out, "energy": energy}

    def _evaluate(self, data: Batch) -> ModelOutputs:
        # ORB makes constants in the default dtype: those of float32 would be 5e-8 off in a model of float64.
        with _default_dtype(next(self.model.parameters()).dtype):
            return super()._evaluate(data)

    def _check_neighbors(self, graph: Graph) -> None:
        if self._most_neighbors is None or not graph.receivers.numel():
            return
        most = int(torch.bincount(graph.receivers).max())
        if most > self._most_neighbors:
            raise ModelError(
                f"an atom has {most} neighbours within {self.cutoff} Å, but this ORB model keeps the nearest "
                f'{self._most_neighbors}, which is not decomposed; use a model without that limit ("inf")'
            )


def aggregated(head: nn.Module, sums: Tensor, counts: Tensor) -> Tensor:
    """(S, F) what a head of the whole system reads: the mean over atoms, or the sum.

    Args:
        head: it says which.
        sums: (S, F).
        counts: (S, 1) atoms.
    """
    return sums / counts if head.node_aggregation == "mean" else sums


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _envelope(net: nn.Module, vectors: Tensor) -> Tensor:
    """(E, 1) ORB's weight of an edge, zero at 6 Å."""
    from orb_models.forcefield.nn_util import get_cutoff

    return get_cutoff(vectors.norm(dim=-1))
