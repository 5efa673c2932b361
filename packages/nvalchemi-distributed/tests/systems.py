"""Systems for the tests: argon-like, deterministic from a seed, the same on every rank."""

from __future__ import annotations

import itertools
import math

import torch

from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import LennardJonesModelWrapper
from nvalchemi_distributed.neighbors import build_neighbor_list

EPSILON, SIGMA = 0.0101, 3.4


def lj(cutoff: float = 5.0, **kw) -> LennardJonesModelWrapper:
    return LennardJonesModelWrapper(EPSILON, SIGMA, cutoff, **kw)


def fcc(n: int = 3, a: float = 5.3, jitter: float = 0.1, seed: int = 0, repeat=None, dtype=torch.float64) -> AtomicData:
    """n³ (or ``repeat``) fcc cells of argon, jittered."""
    reps = (n, n, n) if repeat is None else repeat
    base = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=torch.float64)
    corners = torch.tensor(list(itertools.product(*(range(r) for r in reps))), dtype=torch.float64)
    x = (corners[:, None] + base[None]).reshape(-1, 3) * a
    x = x + jitter * (torch.rand(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 0.5)
    cell = torch.diag(torch.tensor([r * a for r in reps], dtype=torch.float64))
    return AtomicData(x.to(dtype), torch.full((len(x),), 18), cell=cell.to(dtype), pbc=True)


def smallest_distance(x: torch.Tensor, cell: torch.Tensor, pbc: list[bool]) -> float:
    """Over all pairs and near images; independent of the package."""
    best = math.inf
    for image in itertools.product(*((-1, 0, 1) if p else (0,) for p in pbc)):
        shift = torch.tensor(image, dtype=torch.float64) @ cell
        d = torch.cdist(x, x + shift)
        if not any(image):
            d.fill_diagonal_(math.inf)
        best = min(best, float(d.min()))
    return best


def random_system(
    seed: int,
    *,
    sites=(3, 3, 3),
    fill: float = 1.0,
    tilt: float = 0.0,
    pbc=(True, True, True),
    cells_away: int = 0,
    corner: bool = False,
    slab: bool = False,
    spacing: float = 1.15,
    dtype=torch.float64,
) -> AtomicData:
    """Jittered sites in a (tilted) cell, no two atoms nearer than 0.8 σ.

    ``fill`` of the sites hold an atom; ``corner`` keeps only those in one corner, ``slab`` only the lowest fifth
    along z; ``cells_away`` moves atoms by up to so many whole cells.
    """
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, dtype=torch.float64, generator=g)

    grid = torch.tensor(list(itertools.product(*(range(s) for s in sites))), dtype=torch.float64)
    frac = (grid + 0.5) / torch.tensor(sites)
    cell = torch.diag(torch.tensor(sites, dtype=torch.float64) * SIGMA * spacing)
    for a, b in ((1, 0), (2, 0), (2, 1)):
        cell[a, b] = tilt * float(2 * rand(1) - 1) * cell[b, b]
    x = frac @ cell + 0.2 * SIGMA * (rand(len(frac), 3) - 0.5)
    keep = rand(len(x)) < fill
    if corner:
        keep &= (frac < 0.45).all(-1)
    if slab:
        keep &= frac[:, 2] < 0.2
    if not bool(keep.any()):
        keep[0] = True
    x = x[keep]
    near = smallest_distance(x, cell, list(pbc))
    if near < 0.8 * SIGMA:
        x, cell = x * (0.85 * SIGMA / near), cell * (0.85 * SIGMA / near)
    if cells_away:
        whole = torch.randint(-cells_away, cells_away + 1, x.shape, generator=g).double()
        x = x + torch.where(torch.tensor(pbc), whole, 0.0) @ cell
    v = 0.002 * (rand(len(x), 3) - 0.5)
    return AtomicData(
        x.to(dtype), torch.full((len(x),), 18), cell=cell.to(dtype), pbc=torch.tensor(pbc), velocities=v.to(dtype)
    )


def single(model, batch: Batch, skin: float = 0.0):
    """Outputs of one process at the batch's positions."""
    copy = batch.clone()
    NeighborListHook(model.neighbor_config, skin=skin).update(copy)
    return model(copy)


def absolute_terms(batch: Batch, cutoff: float, epsilon=EPSILON, sigma=SIGMA):
    """Sum of |φ|, and of |f| per atom, and of |f| r: what rounding errors are measured against."""
    x = batch.positions.double()
    cell = batch.cell.double()
    edges = build_neighbor_list(x, cell, batch.pbc, batch.batch_idx, cutoff)
    shift = torch.bmm(edges.images.double().unsqueeze(1), cell[batch.batch_idx[edges.senders]]).squeeze(1)
    r = (x[edges.senders] + shift - x[edges.receivers]).norm(dim=-1)
    s6 = (sigma / r) ** 6
    phi = 4 * epsilon * (s6 * s6 + s6)
    f = 24 * epsilon * (2 * s6 * s6 + s6) / r
    per_atom = x.new_zeros(len(x)).index_add(0, edges.receivers, f)
    tiny = 1e-300
    return float(phi.sum()) / 2 + tiny, per_atom + tiny, float((f * r).sum()) / 2 + tiny
