"""The row matrix of one large system, searched in columns: dense arithmetic instead of a list of edges.

Rows (atoms and the images that receivers can reach) are sorted by columns of at least the reach in x and y, and by z
within one. A block of receivers that follow each other in a column then meets nine contiguous stretches of rows; their
distances are one matrix product, and what lies within reach goes straight into the matrix. No list of edges is ever
held: it would be five times as large as the matrix, and sorting it by receiver takes longer than the search.

Letters: N atoms, M receivers (the first M atoms), R rows, K neighbours, B blocks, L lanes (receivers a block),
C candidates a block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nvalchemi_distributed.neighbors.cells import cartesian_shift, complete_cell, fractional, heights
from nvalchemi_distributed.neighbors.row_matrix import RowMatrix, padded_width

COLUMNS_FROM = 1_000
"""Atoms from which on this way is the faster one."""

_LANES = 16
# Distances at once: few enough for the last-level cache, enough to hide the cost of a call.
_DISTANCES = 1_000_000
# A system that needs more than this is sparse, tiny beside its images, or very uneven: the edge list serves it better.
_MOST_IMAGES = 6
_MOST_CANDIDATES = 4_000
# |p − c|² = p² + c² − 2 p·c in float32 loses some units in the last place of its largest term, each 6e-8 of it.
_MARGIN = 2.0e-6


def build_by_columns(
    positions: Tensor, cell: Tensor, pbc: Tensor, reach: float, n_receivers: int | None = None
) -> RowMatrix | None:
    """Every pair of one system within ``reach``, images included; receivers in spatial order.

    Distances are compared in float32 with a margin for its rounding, so that the matrix may hold a pair that is longer
    than ``reach`` by a few 1e-5 of it, and never lacks one.

    Args:
        positions: (N, 3) Å.
        cell: (1, 3, 3) Å; zero rows on open axes.
        pbc: (1, 3) booleans.
        reach: Å.
        n_receivers: only atoms below it receive; all when left out.

    Returns:
        The matrix, or None where this way is not the faster one; the caller then goes by way of edges.
    """
    m = positions.shape[0] if n_receivers is None else n_receivers
    if m == 0:
        return None
    rows = _rows_in_reach(positions, complete_cell(cell, pbc), pbc[0], reach, m)
    if rows is None:
        return None
    source, image, x = rows
    sorting = _sort(x, (source < m) & ~(image != 0).any(-1), reach)
    if sorting is None:
        return None
    order, key, n_columns = sorting
    source, image, x, key = source[order], image[order], x[order], key[order]
    found = _search(x, key, n_columns, m, reach)
    if found is None:
        return None
    counts, senders = found
    n_rows = x.shape[0]
    width = padded_width(int(counts.max()))
    matrix = torch.full((m, width), n_rows, dtype=torch.int32, device=x.device)
    flat, at = matrix.view(-1), 0
    for part, sender in senders:
        n = counts[at : at + part]
        # The e-th pair of this stretch goes to its receiver's line, after those already there.
        line = torch.arange(at, at + part, device=x.device) * width - (n.cumsum(0) - n)
        flat[torch.repeat_interleave(line, n).add_(torch.arange(sender.numel(), device=x.device))] = sender
        at += part
    return RowMatrix(source, image[m:], torch.zeros_like(source), matrix, m, float(reach))


def _rows_in_reach(
    positions: Tensor, full: Tensor, pbc: Tensor, reach: float, m: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Atom, image and place of every row that lies within ``reach`` of the receivers' extent in each lattice direction.

    Distance is never less than the difference of fractions times the height, so that none is missed.
    """
    device = positions.device
    frac = fractional(positions, full, torch.zeros(positions.shape[0], dtype=torch.int64, device=device))
    if not bool(torch.isfinite(frac).all()):
        return None
    wide = reach / heights(full)[0] + 1e-9
    low, high = frac[:m].amin(0) - wide, frac[:m].amax(0) + wide
    atom = torch.arange(positions.shape[0], device=device)
    image = torch.zeros(positions.shape[0], 3, dtype=torch.int64, device=device)
    for a in range(3):
        f = frac[atom, a]
        first, last = torch.ceil(low[a] - f), torch.floor(high[a] - f)
        if not bool(pbc[a]):
            first, last = first.clamp_min(0), last.clamp_max(0)
        span = range(int(first.min()), int(last.max()) + 1)
        if len(span) > _MOST_IMAGES:
            return None
        kept = [((first <= n) & (n <= last)).nonzero().squeeze(-1) for n in span]
        shifted = []
        for n, k in zip(span, kept, strict=True):
            part = image[k]
            part[:, a] = n
            shifted.append(part)
        atom, image = torch.cat([atom[k] for k in kept]), torch.cat(shifted)
    shift = cartesian_shift(image, full, torch.zeros_like(atom))
    return atom, image, positions.detach()[atom].to(torch.float64) + shift


def _sort(x: Tensor, receives: Tensor, reach: float) -> tuple[Tensor, Tensor, tuple[int, int]] | None:
    """Receivers by column and z, then the other rows by column and z; the sort key; columns along x and y.

    The key is the column's number plus half the fraction of the extent in z.
    """
    low = x.amin(0)
    extent = (x.amax(0) - low).clamp_min(1e-12)
    along = (extent[:2] / reach).floor().clamp_min(1.0)
    if float(along.prod()) > x.shape[0]:
        return None
    column = torch.minimum((x[:, :2] - low[:2]) / extent[:2] * along, along - 1.0).floor()
    key = column[:, 0] * along[1] + column[:, 1] + 0.5 * (x[:, 2] - low[2]) / extent[2]
    # The key is below the number of columns: receivers come first.
    order = (key + torch.where(receives, 0.0, float(along.prod()) + 1.0)).argsort()
    return order, key, (int(along[0]), int(along[1]))


def _search(
    x: Tensor, key: Tensor, columns: tuple[int, int], m: int, reach: float
) -> tuple[Tensor, list[tuple[int, Tensor]]] | None:
    """Neighbours of the first ``m`` rows: (M,) counts, and per stretch of receivers how many it has and their senders.

    Args:
        x: (R, 3) float64, receivers first, both parts sorted by ``key``.
        key: (R,).
        columns: along x and y.
        m: receivers.
        reach: Å.
    """
    device, n_rows = x.device, x.shape[0]
    by_key, row = key.sort()
    # Blocks: up to L receivers that follow each other in one column.
    own = key[:m].floor().to(torch.int64)
    start = torch.searchsorted(own, torch.arange(columns[0] * columns[1], device=device))
    rank = torch.arange(m, device=device) - start[own]
    first = ((rank % _LANES) == 0).nonzero().squeeze(-1)
    n_blocks = first.numel()
    size = torch.cat([first[1:], first.new_tensor([m])]) - first
    last = first + size - 1
    begin, length = _stretches(x, by_key, own[first], x[first, 2], x[last, 2], columns, reach)
    total = length.sum(1)
    most = int(total.max())
    if most > _MOST_CANDIDATES:
        return None
    candidates = torch.full((n_blocks, most), n_rows, dtype=torch.int64, device=device)
    stretch = torch.repeat_interleave(torch.arange(length.numel(), device=device), length.reshape(-1))
    before = length.reshape(-1).cumsum(0) - length.reshape(-1)
    offset = torch.arange(stretch.numel(), device=device) - before.index_select(0, stretch)
    within = length.cumsum(1) - length
    place = torch.arange(n_blocks, device=device).unsqueeze(1) * most + within
    place = place.view(-1).index_select(0, stretch) + offset
    candidates.view(-1)[place] = row.index_select(0, begin.reshape(-1).index_select(0, stretch) + offset)
    # Where a receiver meets itself: in the middle stretch of its block.
    block = torch.repeat_interleave(torch.arange(n_blocks, device=device), size)
    at_key = torch.empty_like(row).index_copy_(0, row, torch.arange(n_rows, device=device))[:m]
    itself = (block * _LANES + rank % _LANES) * most + (within - begin)[block, 4] + at_key
    lanes = first.unsqueeze(1) + torch.arange(_LANES, device=device)
    lanes = torch.where(lanes > last.unsqueeze(1), n_rows, lanes)
    # A difference with NaN is within no reach: that is where empty lanes and places without a candidate are parked.
    table = torch.cat([x, x.new_full((1, 3), torch.nan)])
    limit = reach * reach + _MARGIN * _longest_square(x, columns, float((x[last, 2] - x[first, 2]).max()), reach)
    counts, found = [], []
    step = max(1, _DISTANCES // (_LANES * most))
    # Made once: memory that is given back and asked for again at every turn costs as much as the arithmetic in it.
    squares = torch.empty((min(step, n_blocks), _LANES, most), dtype=torch.float32, device=device)
    nears = torch.empty(squares.shape, dtype=torch.bool, device=device)
    for at in range(0, n_blocks, step):
        cand, lane = candidates[at : at + step], lanes[at : at + step]
        square, near = squares[: lane.shape[0]], nears[: lane.shape[0]].view(-1)
        _square_distances(table, cand, lane, square)
        torch.le(square.view(-1), limit, out=near)
        done, stop = int(first[at]), int(last[min(at + step, n_blocks) - 1]) + 1
        near[itself[done:stop] - at * _LANES * most] = False
        # numpy finds them four times as fast as torch, without a copy.
        hit = torch.from_numpy(np.flatnonzero(near.numpy())) if near.is_cpu else near.nonzero().squeeze(-1)
        edge = torch.searchsorted(hit, torch.arange(lane.numel() + 1, device=device) * most)
        n = edge.diff()
        # The candidates of lane l of block b start at b·C, its distances at (b·L + l)·C.
        slot = torch.arange(n.numel(), device=device)
        hit -= torch.repeat_interleave((slot - slot // _LANES) * most, n)
        counts.append(n[lane.view(-1) != n_rows])
        found.append((stop - done, cand.view(-1).index_select(0, hit).to(torch.int32)))
    return torch.cat(counts), found


def _stretches(
    x: Tensor, by_key: Tensor, column: Tensor, z_low: Tensor, z_high: Tensor, columns: tuple[int, int], reach: float
) -> tuple[Tensor, Tensor]:
    """(B, 9) begin and length, in key order, of the rows near each block: its column and the eight around it."""
    nx, ny = columns
    bottom = x[:, 2].amin()
    extent = (x[:, 2].amax() - bottom).clamp_min(1e-12)
    # A margin for the rounding of keys, which are as large as the number of columns.
    margin = 1e-9 + 1e-15 * nx * ny
    low = 0.5 * ((z_low - reach - bottom) / extent).clamp(0.0, 1.0) - margin
    high = 0.5 * ((z_high + reach - bottom) / extent).clamp(0.0, 1.0) + margin
    around = torch.cartesian_prod(torch.arange(-1, 2, device=x.device), torch.arange(-1, 2, device=x.device))
    ix, iy = column.unsqueeze(1) // ny + around[:, 0], column.unsqueeze(1) % ny + around[:, 1]
    inside = (ix >= 0) & (ix < nx) & (iy >= 0) & (iy < ny)
    where = (ix * ny + iy).to(torch.float64)
    begin = torch.searchsorted(by_key, where + low.unsqueeze(1))
    end = torch.searchsorted(by_key, where + high.unsqueeze(1), right=True)
    return begin, torch.where(inside, end - begin, 0)


def _longest_square(x: Tensor, columns: tuple[int, int], block: float, reach: float) -> float:
    """A bound in Å² on the squared distance from a block's first receiver to its lanes and candidates."""
    extent = x.amax(0) - x.amin(0)
    across = sum((2.0 * float(extent[a]) / columns[a]) ** 2 for a in (0, 1))
    return across + (block + reach) ** 2


def _square_distances(table: Tensor, candidates: Tensor, lanes: Tensor, out: Tensor) -> None:
    """(b, L, C) float32 squared distances in Å² of each lane to each candidate, into ``out``."""
    # In float32 only after the subtraction: places in a large box have too few digits for it.
    centre = table[lanes[:, 0]].unsqueeze(1)
    c = (table.index_select(0, candidates.reshape(-1)).view(*candidates.shape, 3) - centre).to(torch.float32)
    p = (table.index_select(0, lanes.reshape(-1)).view(*lanes.shape, 3) - centre).to(torch.float32)
    c2, p2 = c.square().sum(-1), p.square().sum(-1)
    torch.baddbmm(p2.unsqueeze(-1), p, c.transpose(1, 2), alpha=-2.0, out=out)
    out.add_(c2.unsqueeze(1))
