"""The matrix form: images as rows, one padded line of row numbers a receiver.

A shift per pair is what makes a pair potential slow; here each (atom, image) that any receiver sees is one row,
and rows are moved once a step. Letters: N atoms (rows of the batch), R rows with images, M receivers, K most
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvalchemi_distributed.neighbors.cells import cartesian_shift
from nvalchemi_distributed.neighbors.neighbor_list import NeighborList


@dataclass(frozen=True)
class RowMatrix:
    """Rows and who sees which.

    Attributes:
        source: (R,) int64, the atom a row is a copy of; the first N are the atoms themselves.
        image: (R - N, 3) int64, whole cells added to the rows after the first N.
        image_system: (R - N,) int64, the system of these rows.
        matrix: (M, K) int64 row numbers, padded with R, the row that :meth:`rows` parks out of reach.
        n_receivers: M.
        cutoff: Å, skin included.
    """

    source: Tensor
    image: Tensor
    image_system: Tensor
    matrix: Tensor
    n_receivers: int
    cutoff: float

    def rows(self, positions: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x, y and z, each (R + 1,), of every row; the last is farther than the cutoff from all others.

        Args:
            positions: (N, 3) Å.
            cell: (S, 3, 3) Å.
        """
        moved = positions[self.source[positions.shape[0] :]] + cartesian_shift(self.image, cell, self.image_system)
        # Parked relative to the atoms: a fixed coordinate would lie inside a large box.
        far = positions.amax() if positions.numel() else positions.new_zeros(())
        far = torch.maximum(far, moved.amax()) if moved.numel() else far
        park = (far + 2 * self.cutoff).expand(1, 3)
        table = torch.cat([positions, moved, park]).t().contiguous()
        return table[0], table[1], table[2]


def build_row_matrix(edges: NeighborList, n_atoms: int, batch_idx: Tensor) -> RowMatrix:
    """Turn a list into rows and a matrix.

    Args:
        edges: the list, sorted by receiver.
        n_atoms: rows of the batch.
        batch_idx: (N,) system of each row.
    """
    device = edges.senders.device
    images, senders = edges.images, edges.senders
    shifted = (images != 0).any(-1)
    row = senders.clone()
    where = shifted.nonzero().squeeze(-1)
    if where.numel():
        im, atom = images[where], senders[where]
        low = im.amin(0)
        span = im.amax(0) - low + 1
        key = atom
        for a in range(3):
            key = key * span[a] + (im[:, a] - low[a])
        unique, inverse = torch.unique(key, return_inverse=True)
        row[where] = n_atoms + inverse
        parts = []
        for a in (2, 1, 0):
            parts.append(unique % span[a] + low[a])
            unique = unique.div(span[a], rounding_mode="floor")
        image = torch.stack(parts[::-1], dim=-1)
        source = unique
    else:
        image = torch.zeros(0, 3, dtype=torch.int64, device=device)
        source = torch.zeros(0, dtype=torch.int64, device=device)
    n_rows = n_atoms + source.numel()
    m = edges.n_receivers
    counts = torch.bincount(edges.receivers, minlength=m)
    width = max(int(counts.max()) if m and counts.numel() else 1, 1)
    matrix = torch.full((m, width), n_rows, dtype=torch.int64, device=device)
    if edges.n_edges:
        start = counts.cumsum(0) - counts
        column = torch.arange(edges.n_edges, device=device) - start[edges.receivers]
        matrix[edges.receivers, column] = row
    return RowMatrix(
        torch.cat([torch.arange(n_atoms, device=device), source]), image, batch_idx[source], matrix, m, edges.cutoff
    )
