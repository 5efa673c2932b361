"""Lattice helpers: open axes completed, heights, fractional coordinates.

`frac = cart @ inv(cell)` with lattice vectors in the rows of ``cell``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def complete_cell(cell: Tensor, pbc: Tensor) -> Tensor:
    """Cells that can be inverted: zero rows on open axes become unit normals to the other rows.

    Args:
        cell: (S, 3, 3) Å.
        pbc: (S, 3) booleans; a periodic axis must have a lattice vector.

    Returns:
        (S, 3, 3) float64, unchanged where no row is zero. Along a completed axis one fractional unit is 1 Å.
    """
    out = cell.detach().to(torch.float64).clone()
    for s in range(out.shape[0]):
        zero = [a for a in range(3) if not bool(out[s, a].any()) and not bool(pbc[s, a])]
        given = [a for a in range(3) if a not in zero]
        if len(zero) == 3:
            out[s] = torch.eye(3, dtype=out.dtype, device=out.device)
        elif len(zero) == 2:
            unit = out[s, given[0]] / out[s, given[0]].norm()
            helper = torch.eye(3, dtype=out.dtype, device=out.device)[int(unit.abs().argmin())]
            # Right-handed order (given, next, next after) keeps the determinant positive.
            first, second = (given[0] + 1) % 3, (given[0] + 2) % 3
            normal = helper - unit * (helper @ unit)
            out[s, first] = normal / normal.norm()
            out[s, second] = torch.linalg.cross(unit, out[s, first])
        elif len(zero) == 1:
            a = zero[0]
            normal = torch.linalg.cross(out[s, (a + 1) % 3], out[s, (a + 2) % 3])
            out[s, a] = normal / normal.norm().clamp_min(1e-300)
    return out


def heights(cell: Tensor) -> Tensor:
    """(S, 3) distance in Å between the two faces that each lattice vector joins: 1 / |reciprocal row|."""
    return 1.0 / torch.linalg.inv(cell).norm(dim=-2)


def fractional(positions: Tensor, cell: Tensor, batch_idx: Tensor) -> Tensor:
    """(N, 3) float64 fractional coordinates of (N, 3) positions in the (S, 3, 3) cells of their systems."""
    inverse = torch.linalg.inv(cell.to(torch.float64))
    x = positions.detach().to(torch.float64)
    if inverse.shape[0] == 1:
        return x @ inverse[0]
    return torch.bmm(x.unsqueeze(1), inverse[batch_idx]).squeeze(1)


def cartesian_shift(images: Tensor, cell: Tensor, batch_idx: Tensor) -> Tensor:
    """(N, 3) Å: integer images (N, 3) times the (S, 3, 3) cells of their systems, in the dtype of ``cell``."""
    shift = images.to(cell.dtype)
    if cell.shape[0] == 1:
        return shift @ cell[0]
    return torch.bmm(shift.unsqueeze(1), cell[batch_idx]).squeeze(1)


def wrap(positions: Tensor, cell: Tensor, pbc: Tensor, batch_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Move atoms into their cell along periodic axes.

    Args:
        positions: (N, 3) Å.
        cell: (S, 3, 3) Å, open axes may be zero rows.
        pbc: (S, 3) booleans.
        batch_idx: (N,) system of each atom.

    Returns:
        positions (N, 3), bitwise unchanged for atoms inside, and the whole cells subtracted (N, 3) int64.
        A result that rounds onto the upper face is moved to the lower one, so that fractions lie in [0, 1).
    """
    full = complete_cell(cell, pbc)
    total = torch.zeros(positions.shape, dtype=torch.int64, device=positions.device)
    periodic = pbc[batch_idx]
    x = positions
    # Twice: the first shift of an atom just below a face may round to exactly one cell.
    for _ in range(2):
        whole = torch.where(periodic, fractional(x, full, batch_idx).floor(), 0.0)
        shift = cartesian_shift(whole, full, batch_idx)
        moved = (x.to(torch.float64) - shift).to(x.dtype)
        x = torch.where((whole != 0).any(-1, keepdim=True), moved, x)
        total += whole.to(torch.int64)
    return x, total
