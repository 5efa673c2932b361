"""Forces, virial and stress from the gradient of an energy, on one process and on each rank alike.

With a strain ε per system, x → x(1 + ε) and h → h(1 + ε): F = −∂E/∂x, W = −∂E/∂ε at ε = 0 (symmetrised), and the stress
is −W/V. Letters: N atoms that are leaves, S systems.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from nvalchemi_distributed._typing import ModelOutputs
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.models.base import BaseModelMixin

GRADIENT_OUTPUTS = frozenset({"forces", "virial", "stress"})
"""Outputs that can be taken from the energy."""


@dataclass(frozen=True)
class Leaves:
    """What the energy is differentiated with respect to.

    Attributes:
        positions: (N, 3) leaf.
        strain: (S, 3, 3) leaf, zero.
        deformed: (N, 3) positions as the model sees them.
        deformed_cell: (S, 3, 3).
        cell: (S, 3, 3) as it was.
    """

    positions: Tensor
    strain: Tensor
    deformed: Tensor
    deformed_cell: Tensor
    cell: Tensor


def make_leaves(positions: Tensor, cell: Tensor, batch_idx: Tensor) -> Leaves:
    """Leaves at zero strain."""
    x = positions.detach().clone().requires_grad_(True)
    strain = torch.zeros_like(cell).requires_grad_(True)
    deformed = x + torch.bmm(x.unsqueeze(1), strain[batch_idx]).squeeze(1)
    return Leaves(x, strain, deformed, cell + cell @ strain, cell)


def check_wanted(wanted: Collection[str]) -> None:
    """Refuse what no gradient of the energy is.

    Raises:
        ModelError: names it.
    """
    unknown = set(wanted) - GRADIENT_OUTPUTS
    if unknown:
        raise ModelError(
            f"autograd_outputs {sorted(unknown)} cannot be taken from the energy; the model must give them"
        )


def gradient_outputs(energy: Tensor, leaves: Leaves, wanted: Collection[str], *, create_graph: bool) -> ModelOutputs:
    """The wanted ones of forces (N, 3), virial (S, 3, 3) and stress (S, 3, 3).

    Args:
        energy: the scalar to differentiate.
        leaves: with respect to these.
        wanted: names.
        create_graph: keep the graph, for a loss on forces or stress.
    """
    gradient, strained = torch.autograd.grad(energy, [leaves.positions, leaves.strain], create_graph=create_graph)
    out: ModelOutputs = {}
    if "forces" in wanted:
        out["forces"] = -gradient
    virial = -strained.to(torch.float64)
    virial = 0.5 * (virial + virial.transpose(-1, -2))
    if "virial" in wanted:
        out["virial"] = virial
    if "stress" in wanted:
        volume = leaves.cell.to(torch.float64).det().abs().reshape(-1, 1, 1)
        # A cluster has no volume, hence no stress.
        out["stress"] = torch.where(volume > 0, -virial / volume, torch.zeros_like(virial))
    return out


def evaluate(model: BaseModelMixin, batch: Batch, *, create_graph: bool = False) -> ModelOutputs:
    """The active outputs of a model on one process, those included that it leaves to the gradient of its energy.

    Args:
        model: the wrapper.
        batch: with its neighbour list.
        create_graph: keep the graph, for a loss on forces or stress.

    Raises:
        ModelError: an active output that the model does not give and no gradient is.
    """
    active = model.model_config.check_active()
    wanted = model.model_config.autograd_outputs & active
    if not wanted:
        return dict(model(batch))  # type: ignore[operator]
    check_wanted(wanted)
    leaves = make_leaves(batch.positions, batch.cell, batch.batch_idx)
    system = {**batch.system_fields, "cell": leaves.deformed_cell}
    view = Batch({**batch.node_fields, "positions": leaves.deformed}, system, batch.batch_idx)
    view.neighbors = batch.neighbors
    outputs = dict(model(view))  # type: ignore[operator]
    energy = outputs["energy"]
    total = energy.sum() + 0.0 * leaves.deformed.sum() + 0.0 * leaves.strain.sum()
    outputs.update(gradient_outputs(total, leaves, wanted, create_graph=create_graph))
    return {k: v for k, v in outputs.items() if k in active}
