"""Boxes: which part of each system's fractional space a rank owns.

A grid of ``gx × gy × gz`` ranks with staggered cuts: the x axis is cut first, then y inside each x slab, then z inside
each column, so that cuts can follow the atoms. Rank ``(ix * gy + iy) * gz + iz`` owns box ``(ix, iy, iz)`` of every
system.
Letters: N atoms, S systems, W ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.neighbors.cells import heights

# Slack on box tests, in fractional units: boxes that touch within rounding are neighbours.
_EPS = 1.0e-9


@dataclass(frozen=True)
class Boxes:
    """One axis-aligned box of fractional space a rank and system.

    Attributes:
        grid: ranks along each lattice vector.
        cuts_x: (S, gx + 1), cuts_y: (S, gx, gy + 1), cuts_z: (S, gx, gy, gz + 1), float64, ascending.
        pbc: (S, 3). On periodic axes cuts run from 0 to 1; on open axes the outermost are infinite.
    """

    grid: tuple[int, int, int]
    cuts_x: Tensor
    cuts_y: Tensor
    cuts_z: Tensor
    pbc: Tensor

    @property
    def n_ranks(self) -> int:
        """W."""
        return math.prod(self.grid)

    def owner(self, frac: Tensor, batch_idx: Tensor) -> Tensor:
        """(N,) rank whose box holds each atom; ``frac`` (N, 3) is wrapped on periodic axes."""
        _, gy, gz = self.grid
        ix = (frac[:, :1] >= self.cuts_x[batch_idx, 1:-1]).sum(-1)
        iy = (frac[:, 1:2] >= self.cuts_y[batch_idx, ix, 1:-1]).sum(-1)
        iz = (frac[:, 2:] >= self.cuts_z[batch_idx, ix, iy, 1:-1]).sum(-1)
        return (ix * gy + iy) * gz + iz

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Lower and upper corner, each (S, W, 3), of every rank's box."""
        gx, gy, gz = self.grid
        s = self.cuts_x.shape[0]

        def corner(offset: int) -> Tensor:
            x = self.cuts_x[:, offset : offset + gx].reshape(s, gx, 1, 1).expand(s, gx, gy, gz)
            y = self.cuts_y[..., offset : offset + gy].reshape(s, gx, gy, 1).expand(s, gx, gy, gz)
            z = self.cuts_z[..., offset : offset + gz]
            return torch.stack([x, y, z], dim=-1).reshape(s, gx * gy * gz, 3)

        return corner(0), corner(1)


def choose_grid(n_ranks: int, cell: Tensor, grid_dims: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
    """The grid with the least ghost surface for a (3, 3) cell, or ``grid_dims`` after a check.

    Raises:
        ConfigError: ``grid_dims`` whose product is not ``n_ranks``.
    """
    if grid_dims is not None:
        if len(grid_dims) != 3 or any(int(g) != g or g < 1 for g in grid_dims) or math.prod(grid_dims) != n_ranks:
            raise ConfigError(
                f"grid_dims={tuple(grid_dims)} has product {math.prod(grid_dims)} but there are {n_ranks} ranks; "
                "give three positive integers whose product is the number of ranks, or leave it out"
            )
        return (int(grid_dims[0]), int(grid_dims[1]), int(grid_dims[2]))
    h = heights(cell.unsqueeze(0))[0].tolist()
    best: tuple[float, tuple[int, int, int]] | None = None
    for gx in range(1, n_ranks + 1):
        if n_ranks % gx:
            continue
        for gy in range(1, n_ranks // gx + 1):
            if (n_ranks // gx) % gy:
                continue
            grid = (gx, gy, n_ranks // gx // gy)
            sides = [h[a] / grid[a] for a in range(3)]
            # Ghost volume goes with the area of the divided faces only.
            area = sum(math.prod(sides) / sides[a] for a in range(3) if grid[a] > 1)
            if best is None or area < best[0] * (1 - 1e-12):
                best = (area, grid)
    assert best is not None
    return best[1]


def make_boxes(
    frac: Tensor, batch_idx: Tensor, pbc: Tensor, grid: tuple[int, int, int], *, balance_above: float = 1.1
) -> Boxes:
    """Cuts for atoms at ``frac`` (N, 3): uniform where that is balanced, otherwise at quantiles of the atoms.

    Args:
        frac: (N, 3) float64, wrapped on periodic axes.
        batch_idx: (N,) system of each atom.
        pbc: (S, 3).
        grid: ranks along each axis.
        balance_above: a system whose uniform boxes have max/mean atoms above this gets cuts that follow its atoms.
    """
    gx, gy, gz = grid
    s_count = pbc.shape[0]
    cx = torch.zeros(s_count, gx + 1, dtype=torch.float64)
    cy = torch.zeros(s_count, gx, gy + 1, dtype=torch.float64)
    cz = torch.zeros(s_count, gx, gy, gz + 1, dtype=torch.float64)
    for s in range(s_count):
        rows = frac[batch_idx == s].cpu()
        flags = pbc[s].tolist()
        uniform = _uniform(rows, flags, grid)
        counts = torch.bincount(
            _single(uniform, pbc[s : s + 1].cpu()).owner(rows, torch.zeros(len(rows), dtype=torch.int64))
        )
        worst = float(counts.max()) * gx * gy * gz / len(rows) if len(rows) else 1.0
        chosen = uniform if worst <= balance_above or len(rows) < 4 * gx * gy * gz else _quantile(rows, flags, grid)
        cx[s], cy[s], cz[s] = chosen[0][0], chosen[1][0], chosen[2][0]
    return Boxes(grid, cx, cy, cz, pbc.cpu())


def _single(cuts: tuple[Tensor, Tensor, Tensor], pbc: Tensor) -> Boxes:
    grid = (cuts[0].shape[1] - 1, cuts[1].shape[2] - 1, cuts[2].shape[3] - 1)
    return Boxes(grid, *cuts, pbc)


def _ends(inner: Tensor, periodic: bool) -> Tensor:
    low, high = (0.0, 1.0) if periodic else (-math.inf, math.inf)
    return torch.cat([inner.new_full((1,), low), inner, inner.new_full((1,), high)])


def _uniform(rows: Tensor, pbc: list[bool], grid: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    lines = []
    for a in range(3):
        low, high = 0.0, 1.0
        if not pbc[a]:
            low, high = (float(rows[:, a].min()), float(rows[:, a].max())) if len(rows) else (0.0, 1.0)
        step = torch.arange(1, grid[a], dtype=torch.float64) / grid[a]
        lines.append(_ends(low + (high - low) * step, pbc[a]))
    gx, gy, gz = grid
    return (
        lines[0].reshape(1, gx + 1),
        lines[1].expand(1, gx, gy + 1).clone(),
        lines[2].expand(1, gx, gy, gz + 1).clone(),
    )


def _quantile(rows: Tensor, pbc: list[bool], grid: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    gx, gy, gz = grid

    def cut(values: Tensor, parts: int, periodic: bool) -> Tensor:
        ordered = values.sort().values
        n = len(ordered)
        inner = []
        for k in range(1, parts):
            at = min(max(round(n * k / parts), 1), n - 1) if n > 1 else 0
            inner.append((ordered[at - 1] + ordered[at]) / 2 if n > 1 else torch.tensor(k / parts))
        return _ends(torch.stack(inner).double() if inner else torch.zeros(0, dtype=torch.float64), periodic)

    cx = cut(rows[:, 0], gx, pbc[0])
    cy = torch.zeros(gx, gy + 1, dtype=torch.float64)
    cz = torch.zeros(gx, gy, gz + 1, dtype=torch.float64)
    for i in range(gx):
        slab = rows[(rows[:, 0] >= cx[i]) & (rows[:, 0] < cx[i + 1])]
        cy[i] = cut(slab[:, 1], gy, pbc[1])
        for j in range(gy):
            column = slab[(slab[:, 1] >= cy[i, j]) & (slab[:, 1] < cy[i, j + 1])]
            cz[i, j] = cut(column[:, 2], gz, pbc[2])
    return cx.unsqueeze(0), cy.unsqueeze(0), cz.unsqueeze(0)


def interval_distance(low_a: Tensor, high_a: Tensor, low_b: Tensor, high_b: Tensor, periodic: Tensor) -> Tensor:
    """Gap between two intervals (negative or 0 where they meet); with period 1 where ``periodic``.

    A point is an interval of no length. Symmetric to the last bit in its two intervals, so that two ranks which ask
    about each other get the same answer.
    """
    plain = torch.maximum(low_b - high_a, low_a - high_b)
    middle = (low_a + high_a) / 2 - (low_b + high_b) / 2
    around = (middle - middle.round()).abs() - ((high_a - low_a) + (high_b - low_b)) / 2
    return torch.where(periodic, around, plain)


def meeting_ranks(boxes: Boxes, cell: Tensor, width: float, rank: int) -> list[int]:
    """The other ranks whose box lies within ``width`` Å of this rank's box in any system, ascending.

    Args:
        boxes: all boxes.
        cell: (S, 3, 3) completed cells.
        width: Å.
        rank: this rank.
    """
    low, high = boxes.bounds()
    reach = (width / heights(cell.cpu())).unsqueeze(1) + _EPS
    gap = interval_distance(low[:, rank : rank + 1], high[:, rank : rank + 1], low, high, boxes.pbc.unsqueeze(1))
    near = (gap <= reach).all(-1).any(0)
    near[rank] = False
    return near.nonzero().squeeze(-1).tolist()


def within(frac: Tensor, batch_idx: Tensor, boxes: Boxes, cell: Tensor, width: float, rank: int) -> Tensor:
    """(N,) whether an atom, or one of its images, lies within ``width`` Å of ``rank``'s box of its system.

    Exact along each axis; along edges and corners of a box it keeps a little more than the sphere.
    """
    low, high = boxes.bounds()
    low, high = low[:, rank].to(frac.device)[batch_idx], high[:, rank].to(frac.device)[batch_idx]
    reach = (width / heights(cell)).to(frac.device)[batch_idx] + _EPS
    gap = interval_distance(frac, frac, low, high, boxes.pbc.to(frac.device)[batch_idx])
    return (gap <= reach).all(-1)
