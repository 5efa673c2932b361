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
    sorting = _sort(x, reach)
    if sorting is None:
        return None
    key, order, n_columns = sorting
    # Receivers first, then the other rows, both parts by key.
    receives = ((source < m) & ~(image != 0).any(-1))[order]
    place = torch.cat([receives.nonzero(), (~receives).nonzero()]).squeeze(-1)
    row = torch.empty_like(place).index_copy_(0, place, torch.arange(place.numel(), device=x.device))
    source, image, x = source[order[place]], image[order[place]], x[order]
    found = _search(x, key, place[:m], row, n_columns, reach)
    if found is None:
        return None
    counts, senders = found
    n_rows = x.shape[0]
    width = padded_width(max(int(n.max()) for n in counts))
    matrix = torch.full((m, width), n_rows, dtype=torch.int32, device=x.device)
    place, at = torch.arange(width, device=x.device), 0
    for n, sender in zip(counts, senders, strict=True):
        # Both run through the receivers in order: a line's first places take its pairs.
        matrix[at : at + n.numel()].masked_scatter_(place < n.unsqueeze(1), sender)
        at += n.numel()
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


def _sort(x: Tensor, reach: float) -> tuple[Tensor, Tensor, tuple[int, int]] | None:
    """Keys in order, the order of the rows by them, and how many columns there are along x and y.

    The key is the column's number plus half the fraction of the extent in z.
    """
    low = x.amin(0)
    extent = (x.amax(0) - low).clamp_min(1e-12)
    along = (extent[:2] / reach).floor().clamp_min(1.0)
    if float(along.prod()) > x.shape[0]:
        return None
    column = torch.minimum((x[:, :2] - low[:2]) / extent[:2] * along, along - 1.0).floor()
    key, order = (column[:, 0] * along[1] + column[:, 1] + 0.5 * (x[:, 2] - low[2]) / extent[2]).sort()
    return key, order, (int(along[0]), int(along[1]))


def _search(
    x: Tensor, key: Tensor, receivers: Tensor, row: Tensor, columns: tuple[int, int], reach: float
) -> tuple[list[Tensor], list[Tensor]] | None:
    """Neighbours of the receivers, part by part: how many each has, and the rows of its senders.

    Args:
        x: (R, 3) float64, sorted by ``key``.
        key: (R,).
        receivers: (M,) places of them in that order, rising.
        row: (R,) row number of each place.
        columns: along x and y.
        reach: Å.
    """
    device, n_rows, m = x.device, x.shape[0], receivers.numel()
    # Blocks: up to L receivers that follow each other in one column.
    own = key[receivers].floor().to(torch.int64)
    start = torch.searchsorted(own, torch.arange(columns[0] * columns[1], device=device))
    first = (((torch.arange(m, device=device) - start[own]) % _LANES) == 0).nonzero().squeeze(-1)
    n_blocks = first.numel()
    lanes = first.unsqueeze(1) + torch.arange(_LANES, device=device)
    taken = lanes < torch.cat([first[1:], first.new_tensor([m])]).unsqueeze(1)
    # A difference with NaN is within no reach: that is where empty lanes and places without a candidate are parked.
    lanes = torch.where(taken, receivers[lanes.clamp_max(m - 1)], n_rows)
    last = receivers[first + taken.sum(1) - 1]
    first = receivers[first]
    begin, length = _stretches(x, key, first, last, columns, reach)
    total = length.sum(1)
    most = int(total.max())
    if most > _MOST_CANDIDATES:
        return None
    table = torch.cat([x, x.new_full((most, 3), torch.nan)]).t().contiguous()
    limit = reach * reach + _MARGIN * _longest_square(x, columns, float((x[last, 2] - x[first, 2]).max()), reach)
    # What to add to a place in key order for its number among the candidates of the block's middle stretch.
    middle = length[:, :4].sum(1) - begin[:, 4]
    counts, senders = [], []
    step = max(1, _DISTANCES // (_LANES * most))
    # Made once: memory that is given back and asked for again at every turn costs as much as the arithmetic in it.
    squares = torch.empty(min(step, n_blocks) * _LANES * most, dtype=torch.float32, device=device)
    nears = torch.empty(squares.shape, dtype=torch.bool, device=device)
    for at in range(0, n_blocks, step):
        part = slice(at, min(at + step, n_blocks))
        lane, there, width = lanes[part], taken[part].view(-1), int(total[part].max())
        square, near = squares[: lane.numel() * width], nears[: lane.numel() * width]
        candidates = _candidates(begin[part], length[part], width, n_rows)
        _square_distances(table, candidates, lane, square.view(-1, _LANES, width))
        _within(square, limit, near)
        # The distances of lane l of block b start at (b·L + l)·C. A receiver meets itself in the middle stretch.
        slot = torch.arange(lane.numel(), device=device)
        itself = (lane + middle[part].unsqueeze(1)).view(-1) + slot * width
        near[itself[there]] = False
        hit = _places(near)
        n = torch.searchsorted(hit, torch.arange(slot.numel() + 1, device=device) * width).diff()
        # The candidates of block b start at b·C.
        hit -= torch.repeat_interleave((slot - slot // _LANES) * width, n)
        counts.append(n[there])
        senders.append(row.index_select(0, candidates.index_select(0, hit)).to(torch.int32))
    return counts, senders


def _within(square: Tensor, limit: float, near: Tensor) -> None:
    """Mark what is at most ``limit``; numpy compares six times as fast as torch, on the same memory."""
    if near.is_cpu:
        np.less_equal(square.numpy(), np.float32(limit), out=near.numpy())
    else:
        torch.le(square, limit, out=near)


def _places(near: Tensor) -> Tensor:
    """Where the marks are, in order; numpy finds them four times as fast as torch."""
    return torch.from_numpy(np.flatnonzero(near.numpy())) if near.is_cpu else near.nonzero().squeeze(-1)


def _candidates(begin: Tensor, length: Tensor, width: int, n_rows: int) -> Tensor:
    """(b · C) places in key order of what each block may meet: its stretches, then places past the last row."""
    rest = width - length.sum(1, keepdim=True)
    length = torch.cat([length, rest], 1).view(-1)
    begin = torch.cat([begin, torch.full_like(rest, n_rows)], 1).view(-1)
    shift = torch.repeat_interleave(begin - (length.cumsum(0) - length), length, output_size=rest.numel() * width)
    return shift.add_(torch.arange(shift.numel(), device=begin.device))


def _stretches(
    x: Tensor, key: Tensor, first: Tensor, last: Tensor, columns: tuple[int, int], reach: float
) -> tuple[Tensor, Tensor]:
    """(B, 9) begin and length of the rows near blocks from ``first`` to ``last``: their column and the eight around."""
    nx, ny = columns
    bottom = x[:, 2].amin()
    extent = (x[:, 2].amax() - bottom).clamp_min(1e-12)
    # A margin for the rounding of keys, which are as large as the number of columns.
    margin = 1e-9 + 1e-15 * nx * ny
    low = 0.5 * ((x[first, 2] - reach - bottom) / extent).clamp(0.0, 1.0) - margin
    high = 0.5 * ((x[last, 2] + reach - bottom) / extent).clamp(0.0, 1.0) + margin
    around = torch.cartesian_prod(torch.arange(-1, 2, device=x.device), torch.arange(-1, 2, device=x.device))
    column = key[first].floor().to(torch.int64)
    ix, iy = column.unsqueeze(1) // ny + around[:, 0], column.unsqueeze(1) % ny + around[:, 1]
    inside = (ix >= 0) & (ix < nx) & (iy >= 0) & (iy < ny)
    where = (ix * ny + iy).to(torch.float64)
    begin = torch.searchsorted(key, where + low.unsqueeze(1))
    end = torch.searchsorted(key, where + high.unsqueeze(1), right=True)
    return begin, torch.where(inside, end - begin, 0)


def _longest_square(x: Tensor, columns: tuple[int, int], block: float, reach: float) -> float:
    """A bound in Å² on the squared distance from a block's first receiver to its lanes and candidates."""
    extent = x.amax(0) - x.amin(0)
    across = sum((2.0 * float(extent[a]) / columns[a]) ** 2 for a in (0, 1))
    return across + (block + reach) ** 2


def _square_distances(table: Tensor, candidates: Tensor, lanes: Tensor, out: Tensor) -> None:
    """(b, L, C) float32 squared distances in Å² of each lane to each candidate, into ``out``."""
    b, n_lanes, width = out.shape
    # One product: (−2 p, p², 1) · (c, 1, c²).
    p = torch.ones(b, 5, n_lanes, dtype=torch.float32, device=out.device)
    c = torch.ones(b, 5, width, dtype=torch.float32, device=out.device)
    for a, column in enumerate(table):
        # In float32 only after the subtraction: places in a large box have too few digits for it.
        lane = column[lanes]
        c[:, a] = column.index_select(0, candidates).view(b, width).sub_(lane[:, :1])
        p[:, a] = lane - lane[:, :1]
    torch.sum(c[:, :3].square(), 1, out=c[:, 4])
    torch.sum(p[:, :3].square(), 1, out=p[:, 3])
    p[:, :3] *= -2.0
    torch.bmm(p.transpose(1, 2), c, out=out)
