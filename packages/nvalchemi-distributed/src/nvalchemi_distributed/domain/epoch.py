"""Epochs: between two rebuilds ownership, ghosts, routing and neighbour list are frozen.

A list built at cutoff + skin stays complete while ``2 max|u| + |h₀⁻¹ h − 1|₂ (cutoff + skin) ≤ skin`` with the
non-affine
displacement ``u = x − x₀ h₀⁻¹ h``. All ranks vote on it with one reduction, so that all take the same branch.
Letters: N owned atoms, G ghosts, S systems.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nvalchemi_distributed.domain.geometry import Boxes
from nvalchemi_distributed.domain.plan import HaloPlan
from nvalchemi_distributed.domain.reduce import Reducer
from nvalchemi_distributed.neighbors.cells import complete_cell
from nvalchemi_distributed.neighbors.neighbor_list import NeighborList
from nvalchemi_distributed.neighbors.row_matrix import RowMatrix


@dataclass(frozen=True)
class Epoch:
    """What is frozen.

    Attributes:
        boxes: which part of space each rank owns.
        plan: routing of ghost rows.
        reference: (N, 3) owned positions when the list was built.
        reference_cell: (S, 3, 3) completed cells then.
        given_cell: (S, 3, 3) cells then, as the batch had them.
        static: per-atom fields of the N + G padded rows that do not change within an epoch.
        batch_idx: (N + G,) system of each padded row.
        neighbors: the list over padded rows with owned receivers.
        cutoff, skin: Å; the list was built at their sum.
        number: how many rebuilds came before.
    """

    boxes: Boxes
    plan: HaloPlan
    reference: Tensor
    reference_cell: Tensor
    given_cell: Tensor
    static: dict[str, Tensor]
    batch_idx: Tensor
    neighbors: NeighborList | RowMatrix | None
    cutoff: float
    skin: float
    number: int


@dataclass(frozen=True)
class Vote:
    """What the ranks agreed on: whether to rebuild, and whether any position is not finite."""

    rebuild: bool
    non_finite: bool


def cast_vote(
    epoch: Epoch, positions: Tensor, cell: Tensor, pbc: Tensor, reducer: Reducer, *, anyway: bool = False
) -> Vote:
    """One MAX reduction of the largest displacement per system and of a flag.

    Args:
        epoch: the current epoch.
        positions: (N, 3) owned positions now.
        cell: (S, 3, 3) cells now.
        pbc: (S, 3).
        reducer: maximum over the mesh.
        anyway: this rank wants a rebuild whatever has moved.
    """
    n_systems = cell.shape[0]
    reference = epoch.reference
    drift = [0.0] * n_systems
    # Completing a cell takes as long as the rest of the vote: only when the given one is another.
    if not torch.equal(cell, epoch.given_cell):
        now = complete_cell(cell, pbc)
        if not torch.equal(now, epoch.reference_cell):
            strain = torch.linalg.solve(epoch.reference_cell, now)
            eye = torch.eye(3, dtype=torch.float64, device=strain.device)
            drift = torch.linalg.matrix_norm(strain - eye, ord=2).tolist()
            idx = epoch.batch_idx[: reference.shape[0]]
            reference = torch.bmm(reference.to(torch.float64).unsqueeze(1), strain[idx]).squeeze(1)
    largest = torch.zeros(n_systems, dtype=torch.float64)
    finite = True
    if positions.shape[0]:
        parts = (positions.detach() - reference).square_()
        # Column by column: a sum along rows of three is several times slower.
        square = (parts[:, 0] + parts[:, 1]).add_(parts[:, 2]).to(torch.float64)
        if n_systems == 1:
            largest = square.max().reshape(1)
        else:
            largest = square.new_zeros(n_systems).scatter_reduce(0, epoch.batch_idx[: square.shape[0]], square, "amax")
        finite = math.isfinite(float(largest if n_systems == 1 else square.sum()))
        if not finite:
            # NaN loses every comparison inside a MAX; it goes into the flag.
            largest = largest.nan_to_num(nan=0.0, posinf=0.0)
    if anyway:
        largest = largest.new_full((n_systems,), torch.inf)
    ballot = torch.cat([largest.cpu(), torch.tensor([0.0 if finite else 1.0], dtype=torch.float64)])
    *squares, flag = reducer.max(ballot, "vote").tolist()
    reach = epoch.cutoff + epoch.skin
    rebuild = any(2 * math.sqrt(u2) + d * reach > epoch.skin for u2, d in zip(squares, drift, strict=True))
    return Vote(rebuild, flag > 0)
