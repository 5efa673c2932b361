"""ORB models (orb-models), direct: forces and stress come from heads of their own.

Rhodes et al., arXiv:2504.06231 (2025). Needs the ``models`` extra.

Letters: N rows (owned atoms, then ghosts), M receivers (the first M rows), F features, S systems.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_distributed._typing import ModelOutputs
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.models._orb import ORBPotential, aggregated
from nvalchemi_distributed.models.base import ModelConfig
from nvalchemi_distributed.presets import SPEC_LJ_HALO
from nvalchemi_distributed.spec import MLIPSpec

SPEC_ORB_DIRECT = replace(SPEC_LJ_HALO, name="direct ORB, halo")
"""As of a pair potential: owned rows of the forces are complete, energy and virial are parts of sums over ranks."""

_FULL = [0, 5, 4, 5, 1, 3, 4, 3, 2]
"""Of xx, yy, zz, yz, xz, xy (ASE's and ORB's order), which element is where in a row-major 3 × 3 matrix."""
_LINEAR = 1e-10
"""Smallest to largest moment of inertia below which atoms lie on a line, about which nothing can turn."""


class ORBDirectWrapper(ORBPotential):
    """Energy, forces and, where the model has a head for it, stress of a ``DirectForcefieldRegressor``. No autograd.

    Direct forces are not the gradient of the energy. Nothing makes them conserve it: the energy of an NVE run drifts,
    also with an ideal time step, and virial and stress are not derivatives either.

    The mean of features, which energy and stress are functions of, and the net force and torque, which ORB takes out of
    the forces, are sums over the whole system: one reduction over ranks in a forward, of all of them. As in ORB, the
    net torque is taken out of systems without a cell (all of ``cell`` zero) only. Such a system has neither virial nor
    stress (zero), whatever the head says.

    Args:
        model: the regressor, not compiled, with heads ``energy`` and ``forces``; others than these and ``stress`` are
            not used. It may be converted with ``.double()``.
        cutoff: Å; 6 in every published model, where ORB's own envelope has its end.

    Raises:
        ModelError: a conservative model, one without those heads, or one that is conditioned on charge and spin.
    """

    def __init__(self, model: nn.Module, *, cutoff: float = 6.0) -> None:
        if hasattr(model, "grad_forces_name"):
            raise ModelError(
                f"{type(model).__name__} is a conservative ORB model: its forces are the gradient of its energy; wrap "
                "it in ORBWrapper"
            )
        heads = sorted(getattr(model, "heads", ()))
        if not {"energy", "forces"} <= set(heads):
            raise ModelError(
                f"{type(model).__name__} has the heads {heads}; a direct ORB model with heads 'energy' and 'forces' is "
                "needed"
            )
        super().__init__(model, cutoff)
        self.model_config = ModelConfig(
            outputs=frozenset({"energy", "forces"} | ({"virial", "stress"} if "stress" in heads else set())),
            neighbor_config=self.model_config.neighbor_config,
        )

    @property
    def distribution_spec(self) -> MLIPSpec:
        """Halo storage: edges with owned receivers, ghost features exchanged before each layer but the first."""
        return SPEC_ORB_DIRECT

    def node_energies(self, inputs: dict[str, Any]) -> Tensor:
        """(M, 10) of each receiver: energy (eV), force (eV/Å), and its share of the virial (eV, ASE's Voigt order)."""
        data, heads, m = inputs["data"], self.model.heads, inputs["n_receivers"]
        nodes, idx, counts = self.node_features(inputs), data.batch_idx[:m], self.atoms(data)
        raw, open_systems = heads["forces"].mlp(nodes), _without_cell(data)
        terms = [nodes, raw.to(torch.float64)]
        torque = heads["forces"].remove_torque_for_nonpbc_systems and bool(open_systems.any())
        if torque:
            x = data.positions[:m].to(torch.float64)
            terms += [x, torch.linalg.cross(x, terms[1]), (x.unsqueeze(2) * x.unsqueeze(1)).reshape(m, 9)]
        features, force, *moments = self.system_sums(data, *terms)
        if heads["forces"].remove_mean:
            raw = raw - (force / counts).to(raw.dtype)[idx]
        if torque:
            raw = raw + _against_torque(x, idx, force, moments, counts, open_systems).to(raw.dtype)
        rows = torch.zeros(m, 10, dtype=nodes.dtype, device=nodes.device)
        rows[:, 0] = self.head_energies(heads["energy"], features, inputs)
        rows[:, 1:4] = heads["forces"].normalizer.inverse(raw)
        if "stress" in heads:
            whole = SimpleNamespace(n_node=torch.ones(data.num_graphs, dtype=torch.int64, device=nodes.device))
            stress = heads["stress"].predict(aggregated(heads["stress"], features, counts.to(nodes.dtype)), whole)
            rows[:, 4:] = (-stress * (_volume(data) / counts).to(nodes.dtype))[idx]
        return rows + self._repulsion(inputs) if self.model.pair_repulsion else rows

    def adapt_output(self, rows: Tensor, data: Batch) -> ModelOutputs:
        """The active ones of energy (S, 1), forces (M, 3), virial and stress (S, 3, 3) from the rows of the receivers.

        Per-system ones are this rank's part under decomposition.
        """
        active = self.model_config.check_active()
        out = super().adapt_output(rows[:, 0], data)
        out["forces"] = rows[:, 1:4]
        if active & {"virial", "stress"}:
            share = rows[:, 4:].to(torch.float64)
            sums = share.new_zeros(data.num_graphs, 6).index_add(0, data.batch_idx[: share.shape[0]], share)
            virial = sums[:, _FULL].reshape(-1, 3, 3)
            volume = _volume(data).unsqueeze(-1)
            # A cluster has no volume, hence no stress.
            out["virial"] = torch.where(volume > 0, virial, torch.zeros_like(virial))
            out["stress"] = torch.where(volume > 0, -virial / volume, torch.zeros_like(virial))
        return {name: value for name, value in out.items() if name in active}

    def _repulsion(self, inputs: dict[str, Any]) -> Tensor:
        """(M, 10) as :meth:`node_energies`, of ORB's pair repulsion.

        Every edge at an owned atom is there in both directions, and half of the pair's energy and force is in each: an
        owned row is complete. The virial is counted where the receiver is owned.
        """
        graph, m, n_edges = inputs["graph"], inputs["n_receivers"], inputs["owned_edges"]
        embedding, vectors = graph.node_features["atomic_numbers_embedding"], graph.edge_features["vectors"]
        view = SimpleNamespace(
            senders=graph.senders,
            receivers=graph.receivers,
            node_features={"atomic_numbers_embedding": embedding},
            edge_features={"vectors": vectors},
            # Each atom and each edge a system of its own, in a cell of volume 1.
            n_node=torch.ones(embedding.shape[0], dtype=torch.int64, device=vectors.device),
            n_edge=torch.ones(vectors.shape[0], dtype=torch.int64, device=vectors.device),
            system_features={"cell": torch.eye(3, dtype=vectors.dtype, device=vectors.device).unsqueeze(0)},
        )
        out = self.pair_repulsion(view, inputs)
        virial = vectors.new_zeros(m, 6).index_add(0, graph.receivers[:n_edges], -out["stress"][:n_edges])
        return torch.cat([out["energy"].unsqueeze(-1), out["forces"][:m], virial], 1)


def _volume(data: Batch) -> Tensor:
    """(S, 1) Å³, float64; 0 of a system without a cell."""
    return data.cell.to(torch.float64).det().abs().unsqueeze(-1)


def _without_cell(data: Batch) -> Tensor:
    """(S,) whether ORB takes the net torque out of a system's forces."""
    return (data.cell == 0).flatten(1).all(-1)


def _against_torque(
    x: Tensor, idx: Tensor, force: Tensor, moments: list[Tensor], counts: Tensor, where: Tensor
) -> Tensor:
    """(M, 3) the smallest change of the forces that leaves their sum and takes their torque away: r × μ.

    With r = x − mean(x) and S = Σ r rᵀ, μ solves (S − tr S) μ = −Σ r × f, as in ORB.

    Args:
        x: (M, 3) Å.
        idx: (M,) system of each.
        force: (S, 3) Σ f.
        moments: Σ x (S, 3), Σ x × f (S, 3) and Σ x xᵀ (S, 9).
        counts: (S, 1) atoms.
        where: (S,) systems that are changed.
    """
    center = moments[0] / counts
    # Whether a mean was taken out of f does not matter: Σ r = 0.
    torque = moments[1] - torch.linalg.cross(center, force)
    second = moments[2].reshape(-1, 3, 3) - counts.unsqueeze(-1) * center.unsqueeze(2) * center.unsqueeze(1)
    trace = second.diagonal(dim1=1, dim2=2).sum(-1).reshape(-1, 1, 1)
    inverse = torch.linalg.pinv(second - trace * torch.eye(3, dtype=x.dtype, device=x.device), rtol=_LINEAR)
    mu = torch.where(where.unsqueeze(-1), -(inverse @ torque.unsqueeze(-1)).squeeze(-1), 0.0)
    return torch.linalg.cross(x - center[idx], mu[idx])
