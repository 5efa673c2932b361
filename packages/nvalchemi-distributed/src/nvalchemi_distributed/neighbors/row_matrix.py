"""The matrix form: images as rows, one padded line of row numbers a receiver.

A shift per pair is what makes a pair potential slow; here each (atom, image) that any receiver sees is one row,
and rows are moved once a step. Letters: N atoms (of the batch), R rows, M receivers, K places for neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvalchemi_distributed.neighbors.cells import cartesian_shift
from nvalchemi_distributed.neighbors.neighbor_list import NeighborList

_LANES = 16
# Å. Its square is finite in float32 too, and no box is that large.
_FAR = 1e18


def padded_width(most: int) -> int:
    """Places a line has for ``most`` neighbours: a multiple of 16, so that a vectorised loop over it has no rest."""
    return max(1, -(-most // _LANES)) * _LANES


@dataclass(frozen=True)
class RowMatrix:
    """Rows and who sees which.

    Attributes:
        source: (R,) int64, the atom a row is a copy of. The first M rows are the receivers themselves, in an order of
            their own (that of the batch, or a spatial one): ``source[:M]`` holds each atom below M once.
        image: (R − M, 3) int64, whole cells added to the rows after the receivers.
        system: (R,) int64, the system of each row.
        matrix: (M, K) int32 row numbers, padded with R, the row that :meth:`rows` parks out of reach.
        n_receivers: M.
        cutoff: Å, skin included.
    """

    source: Tensor
    image: Tensor
    system: Tensor
    matrix: Tensor
    n_receivers: int
    cutoff: float
    _known: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def receivers(self) -> Tensor:
        """(M,) int64, the atom that each line of the matrix belongs to."""
        return self.source[: self.n_receivers]

    def rows(self, positions: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x, y and z, each (R + 1,), of every row; the last is farther than the cutoff from all others.

        Args:
            positions: (N, 3) Å.
            cell: (S, 3, 3) Å.
        """
        m, n_rows = self.n_receivers, self.source.numel()
        table = positions.new_empty((3, n_rows + 1))
        for column, out in zip(positions.unbind(1), table[:, :n_rows].unbind(0), strict=True):
            torch.index_select(column, 0, self.source, out=out)
        if n_rows > m:
            table[:, m:n_rows].add_(self._shift(cell))
        table[:, n_rows] = _FAR
        x, y, z = table.unbind(0)
        return x, y, z

    def _shift(self, cell: Tensor) -> Tensor:
        """(3, R − M) Å that images lie away from their atoms; made anew only when the cell is another."""
        if self._known:
            of, shift = self._known[0]
            if of.dtype == cell.dtype and torch.equal(of, cell):
                return shift
        shift = cartesian_shift(self.image, cell, self.system[self.n_receivers :]).t().contiguous()
        # A copy: cells are also changed in place.
        self._known[:] = [(cell.clone(), shift)]
        return shift

    def to_atoms(self, lines: Tensor) -> Tensor:
        """(M, …) values of lines in the order of the batch's first M atoms."""
        return torch.empty_like(lines).index_copy_(0, self.receivers, lines)


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
    source = torch.cat([torch.arange(n_atoms, device=device), source])
    m = edges.n_receivers
    image = torch.cat([image.new_zeros(n_atoms - m, 3), image])
    counts = torch.bincount(edges.receivers, minlength=m)
    width = padded_width(int(counts.max()) if m and counts.numel() else 0)
    matrix = torch.full((m, width), source.numel(), dtype=torch.int32, device=device)
    if edges.n_edges:
        start = counts.cumsum(0) - counts
        column = torch.arange(edges.n_edges, device=device) - start[edges.receivers]
        matrix[edges.receivers, column] = row.to(torch.int32)
    return RowMatrix(source, image, batch_idx[source], matrix, m, edges.cutoff)
