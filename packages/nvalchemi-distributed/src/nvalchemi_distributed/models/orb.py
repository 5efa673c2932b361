"""ORB models (orb-models), conservative.

Rhodes et al., arXiv:2504.06231 (2025). Needs the ``models`` extra.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.models._orb import ORBPotential


class ORBWrapper(ORBPotential):
    """Energy, forces and stress of a ``ConservativeForcefieldRegressor``: forces and stress are derivatives of the
    energy. The mean of features that the energy is a function of is one reduction over ranks, and its adjoint. ORB adds
    the mean, not the sum, of its atoms' pair repulsion to the energy of a conservative model, and so does this.

    Args:
        model: the regressor, not compiled. It may be converted with ``.double()``.
        cutoff: Å; 6 in every published model, where ORB's own envelope has its end.

    Raises:
        ModelError: a direct model, or one that is conditioned on charge and spin.
    """

    def __init__(self, model: nn.Module, *, cutoff: float = 6.0) -> None:
        if not hasattr(model, "grad_forces_name"):
            raise ModelError(
                f"{type(model).__name__} is no conservative ORB model, whose forces are the gradient of its energy; "
                "wrap a direct one in ORBDirectWrapper"
            )
        super().__init__(model, cutoff)

    def node_energies(self, inputs: dict[str, Any]) -> Tensor:
        """(M,) eV: reference and pair repulsion of each atom, and its equal share of what the mean gives."""
        (sums,) = self.system_sums(inputs["data"], self.node_features(inputs))
        energies = self.head_energies(self.model.heads[self.model.energy_name], sums, inputs)
        if self.model.pair_repulsion:
            energies = energies + self._repulsion(inputs)
        return energies

    def _repulsion(self, inputs: dict[str, Any]) -> Tensor:
        """(M,) eV: half of each edge's repulsion to its receiver. Edges that were mirrored count elsewhere."""
        graph, n_edges = inputs["graph"], inputs["owned_edges"]
        embedding = graph.node_features["atomic_numbers_embedding"]
        view = SimpleNamespace(
            senders=graph.receivers[:n_edges],
            receivers=graph.senders[:n_edges],
            node_features={"atomic_numbers_embedding": embedding},
            edge_features={"vectors": graph.edge_features["vectors"][:n_edges]},
            n_node=torch.ones(embedding.shape[0], dtype=torch.int64, device=embedding.device),
        )
        return self.pair_repulsion(view, inputs)["energy"]
