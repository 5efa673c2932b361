"""Edges between receivers and senders, with the whole cells that lie between them.

Letters: N rows, M receivers (the first M rows), E edges, S systems.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import vesin_torch  # type: ignore[import-untyped, import-not-found]
from torch import Tensor

from nvalchemi_distributed.errors import InputError
from nvalchemi_distributed.neighbors.cells import complete_cell, fractional

_BRUTE_FORCE_LIMIT = 64
_LONGEST_AXIS = 1.0e5


@dataclass(frozen=True)
class NeighborList:
    """A full list in COO form: for each edge, sender − receiver is ``x[sender] + image @ cell − x[receiver]``.

    Attributes:
        receivers: (E,) int64 rows below ``n_receivers``, never decreasing.
        senders: (E,) int64 rows.
        images: (E, 3) int64 whole cells added to the sender.
        n_receivers: how many rows receive and have an energy that counts (under decomposition: the owned atoms; where a
            spec has ``hops`` above 1, ghosts receive as well, and their energies do not count).
        cutoff: Å, pairs up to this distance are listed (skin included).
    """

    receivers: Tensor
    senders: Tensor
    images: Tensor
    n_receivers: int
    cutoff: float

    @property
    def n_edges(self) -> int:
        """Number of edges."""
        return int(self.receivers.shape[0])


def build_neighbor_list(
    positions: Tensor, cell: Tensor, pbc: Tensor, batch_idx: Tensor, cutoff: float, n_receivers: int | None = None
) -> NeighborList:
    """Every pair of one system within ``cutoff``, periodic images of any number of cells included.

    Args:
        positions: (N, 3) Å, anywhere; computed in float64.
        cell: (S, 3, 3) Å; zero rows on open axes.
        pbc: (S, 3) booleans.
        batch_idx: (N,) system of each row.
        cutoff: Å.
        n_receivers: only rows below it receive; all rows when left out.

    Returns:
        The list, sorted by receiver. An atom is its own neighbour through an image, never directly.
    """
    n = positions.shape[0]
    n_receivers = n if n_receivers is None else n_receivers
    full = complete_cell(cell, pbc)
    x = positions.detach().to(torch.float64)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for s in range(full.shape[0]):
        rows = None if full.shape[0] == 1 else (batch_idx == s).nonzero().squeeze(-1)
        xs = x if rows is None else x[rows]
        if xs.shape[0] == 0:
            continue
        i, j, images = _pairs(xs, full[s], pbc[s], cutoff)
        if rows is not None:
            i, j = rows[i], rows[j]
        keep = i < n_receivers
        if not bool(keep.all()):
            i, j, images = i[keep], j[keep], images[keep]
        parts.append((i, j, images))
    if parts:
        receivers, senders, images = (torch.cat(t) for t in zip(*parts, strict=True))
    else:
        receivers = senders = torch.zeros(0, dtype=torch.int64, device=positions.device)
        images = torch.zeros(0, 3, dtype=torch.int64, device=positions.device)
    if receivers.numel() and bool((receivers[1:] < receivers[:-1]).any()):
        order = receivers.argsort(stable=True)
        receivers, senders, images = receivers[order], senders[order], images[order]
    return NeighborList(receivers, senders, images, n_receivers, float(cutoff))


def _pairs(x: Tensor, cell: Tensor, pbc: Tensor, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """All (i, j, image) of one system, sorted by i."""
    zero = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    # The library is given atoms inside the cell: whole cells are taken off here and put back on the images.
    frac = fractional(x, cell.unsqueeze(0), zero)
    whole = torch.where(pbc, frac.floor(), 0.0)
    inside = _close_gaps(x - whole @ cell, cell, pbc, cutoff)
    if x.shape[0] <= _BRUTE_FORCE_LIMIT:
        i, j, images = _brute_force(inside, cell, pbc, cutoff)
    else:
        _refuse_needle(cell, pbc, cutoff)
        search = vesin_torch.NeighborList(cutoff=cutoff, full_list=True, sorted=True, n_threads=1)
        i, j, images = search.compute(points=inside, box=cell, periodic=pbc, quantities="ijS")
        images = images.to(torch.int64)
    if bool(whole.any()):
        w = whole.to(torch.int64)
        images = images + w[i] - w[j]
    return i, j, images


def _close_gaps(x: Tensor, cell: Tensor, pbc: Tensor, cutoff: float) -> Tensor:
    """Shorten empty stretches along open axes to two cutoffs.

    No pair within the cutoff changes: what lies on either side of a gap stays farther apart than the cutoff. Without it
    one atom that flew off makes the library's cell list overflow.
    """
    if bool(pbc.all()):
        return x
    height = 1.0 / torch.linalg.inv(cell).norm(dim=0)
    frac = x @ torch.linalg.inv(cell)
    for a in range(3):
        if bool(pbc[a]) or float(frac[:, a].max() - frac[:, a].min()) * float(height[a]) < 64 * cutoff:
            continue
        limit = 2 * cutoff / height[a]
        value, order = frac[:, a].sort()
        excess = (value.diff() - limit).clamp_min(0.0).cumsum(0)
        x = x.clone()
        x[order[1:]] -= excess.unsqueeze(-1) * cell[a]
    return x


def _refuse_needle(cell: Tensor, pbc: Tensor, cutoff: float) -> None:
    """The library ends the process (integer division by zero) for periodic cells about 300,000 cutoffs long."""
    cells = torch.where(pbc, 1.0 / torch.linalg.inv(cell).norm(dim=0) / cutoff, 0.0)
    if bool((cells > _LONGEST_AXIS).any()):
        raise InputError(
            f"a periodic axis is {float(cells.max()):.3g} cutoffs long; the neighbour list allows {_LONGEST_AXIS:.0e}: "
            "make that axis open or the cell shorter"
        )


def _brute_force(x: Tensor, cell: Tensor, pbc: Tensor, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """Every pair against every image that can reach: exact, for few atoms; one image at a time."""
    reach = torch.where(pbc, torch.ceil(cutoff / (1.0 / torch.linalg.inv(cell).norm(dim=0))), 0.0).to(torch.int64) + pbc
    grid = torch.cartesian_prod(*(torch.arange(-int(r), int(r) + 1, device=x.device) for r in reach))
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    low, high = x.amin(0) - cutoff, x.amax(0) + cutoff
    for image in grid:
        shift = image.to(x.dtype) @ cell
        near = ((x + shift >= low) & (x + shift <= high)).all(-1).nonzero().squeeze(-1)
        if near.numel() == 0:
            continue
        d = torch.cdist(x, x[near] + shift, compute_mode="donot_use_mm_for_euclid_dist") < cutoff
        if not bool(image.any()):
            d[near, torch.arange(near.numel(), device=x.device)] = False
        i, k = d.nonzero(as_tuple=True)
        found.append((i, near[k], image.expand(i.numel(), 3)))
    if not found:
        empty = torch.zeros(0, dtype=torch.int64, device=x.device)
        return empty, empty, empty.reshape(0, 1).expand(0, 3)
    i, j, images = (torch.cat(t) for t in zip(*found, strict=True))
    order = i.argsort(stable=True)
    return i[order], j[order], images[order]
