"""Keeps a batch's neighbour list valid on one process, and declares the list for a decomposed run."""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.hooks.context import DynamicsContext
from nvalchemi_distributed.neighbors.cells import complete_cell
from nvalchemi_distributed.neighbors.columns import COLUMNS_FROM, build_by_columns
from nvalchemi_distributed.neighbors.config import NeighborConfig, NeighborListFormat
from nvalchemi_distributed.neighbors.neighbor_list import NeighborList, build_neighbor_list
from nvalchemi_distributed.neighbors.row_matrix import RowMatrix, build_row_matrix
from nvalchemi_distributed.stages import DynamicsStage


class NeighborListHook:
    """Builds ``batch.neighbors`` at cutoff + skin and rebuilds it when an atom has moved half the skin.

    Under ``DomainParallel`` the framework builds the list on owned and ghost rows at every epoch; the hook then says
    which list and which skin, and is not called.

    Args:
        config: the model's ``neighbor_config``.
        skin: Å.
        stage: ``DynamicsStage.BEFORE_COMPUTE``; a list made later would be too late.

    Raises:
        ConfigError: a negative skin, or another stage.
    """

    frequency = 1

    def __init__(
        self, config: NeighborConfig, *, skin: float = 0.0, stage: DynamicsStage = DynamicsStage.BEFORE_COMPUTE
    ) -> None:
        if not (math.isfinite(skin) and skin >= 0):
            raise ConfigError(f"skin={skin}; give a length in Å, 0 or more")
        if stage is not DynamicsStage.BEFORE_COMPUTE:
            raise ConfigError(f"NeighborListHook at {stage}; the list is needed at DynamicsStage.BEFORE_COMPUTE")
        self.config, self.skin, self.stage = config, float(skin), stage
        self.rebuilds = 0
        self._built_on: Batch | None = None
        self._reference: tuple[Tensor, Tensor] | None = None

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        """Make sure that ``ctx.batch.neighbors`` is complete up to the cutoff."""
        self.update(ctx.batch)

    def update(self, batch: Batch) -> None:
        """As the call, for use outside a run."""
        if self._built_on is batch and batch.neighbors is not None and not self._stale(batch):
            return
        batch.neighbors = make_neighbors(
            self.config, batch.positions, batch.cell, batch.pbc, batch.batch_idx, self.config.cutoff + self.skin
        )
        self._built_on = batch
        self._reference = (batch.positions.detach().clone(), complete_cell(batch.cell, batch.pbc))
        self.rebuilds += 1

    def _stale(self, batch: Batch) -> bool:
        assert self._reference is not None
        x0, h0 = self._reference
        if x0.shape != batch.positions.shape:
            return True
        now = complete_cell(batch.cell, batch.pbc)
        strain = torch.linalg.solve(h0, now)
        eye = torch.eye(3, dtype=torch.float64, device=strain.device)
        drift = torch.linalg.matrix_norm(strain - eye, ord=2).max()
        moved = x0.to(torch.float64)
        if bool(drift > 0):
            moved = torch.bmm(moved.unsqueeze(1), strain[batch.batch_idx]).squeeze(1)
        largest = (batch.positions.detach() - moved).norm(dim=-1).max() if moved.shape[0] else drift
        # Written so that NaN counts as stale.
        return not bool(2 * largest + drift * (self.config.cutoff + self.skin) <= self.skin)


def make_neighbors(
    config: NeighborConfig,
    positions: Tensor,
    cell: Tensor,
    pbc: Tensor,
    batch_idx: Tensor,
    reach: float,
    n_receivers: int | None = None,
) -> NeighborList | RowMatrix:
    """The list in the format that ``config`` asks for, complete up to ``reach`` Å."""
    if config.format is NeighborListFormat.MATRIX and cell.shape[0] == 1 and positions.shape[0] >= COLUMNS_FROM:
        matrix = build_by_columns(positions, cell, pbc, reach, n_receivers)
        if matrix is not None:
            return matrix
    edges = build_neighbor_list(positions, cell, pbc, batch_idx, reach, n_receivers)
    if config.format is NeighborListFormat.COO:
        return edges
    return build_row_matrix(edges, positions.shape[0], batch_idx)
