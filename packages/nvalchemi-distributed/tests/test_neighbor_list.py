"""Every pair once, and no other: against an independent brute force in numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nvalchemi_distributed.errors import InputError
from nvalchemi_distributed.neighbors import build_neighbor_list, build_row_matrix
from nvalchemi_distributed.neighbors.cells import complete_cell, wrap


def brute(x, cell, pbc, cutoff, edge=0.0):
    """Set of (i, j, image) by enumeration; with ``edge``, of the pairs within that distance of the cutoff."""
    heights = 1 / np.linalg.norm(np.linalg.inv(cell), axis=0)
    frac = x @ np.linalg.inv(cell)
    spread = np.ceil(frac.max(0) - frac.min(0))
    reach = [int(np.ceil(cutoff / h) + s) if p else 0 for h, p, s in zip(heights, pbc, spread, strict=True)]
    found = set()
    for image in itertools.product(*(range(-r, r + 1) for r in reach)):
        d = x[None] + np.array(image) @ cell - x[:, None]
        r = np.sqrt((d**2).sum(-1))
        for i, j in zip(*np.nonzero(np.abs(r - cutoff) < edge if edge else r < cutoff), strict=True):
            if i != j or any(image):
                found.add((int(i), int(j), *image))
    return found


def as_set(edges):
    rows = torch.cat([edges.receivers[:, None], edges.senders[:, None], edges.images], 1).tolist()
    assert len(rows) == len(set(map(tuple, rows))), "a pair is listed twice"
    return set(map(tuple, rows))


@settings(max_examples=60)
@example(seed=0, n=80, tilt=0.0, pbc=(True, True, True), sides=(2.0, 2.0, 2.0), cutoff=2.0, spread=0)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 90),
    tilt=st.sampled_from([0.0, 0.9]),
    pbc=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    sides=st.tuples(*[st.floats(2.0, 14.0)] * 3),
    cutoff=st.floats(1.0, 5.0),
    spread=st.integers(0, 3),
)
def test_equals_brute_force(seed, n, tilt, pbc, sides, cutoff, spread):
    rng = np.random.default_rng(seed)
    cell = np.diag(sides) + tilt * np.tril(rng.uniform(-0.5, 0.5, (3, 3)), -1) * sides[0]
    x = (rng.uniform(size=(n, 3)) + spread * rng.integers(-1, 2, (n, 3))) @ cell
    edges = build_neighbor_list(
        torch.from_numpy(x),
        torch.from_numpy(cell)[None],
        torch.tensor([pbc]),
        torch.zeros(n, dtype=torch.int64),
        cutoff,
    )
    # A pair at the cutoff to the last digits may fall on either side of it.
    assert as_set(edges) ^ brute(x, cell, pbc, cutoff) <= brute(x, cell, pbc, cutoff, edge=1e-9)


def test_small_skewed_cell_lists_no_pair_twice():
    """D06: two atoms, a skewed cell about 1.2 cutoffs wide."""
    cell = np.array([[6.0, 0, 0], [2.9, 5.3, 0], [1.4, 1.9, 5.0]])
    x = np.array([[0.1, 0.2, 0.3], [3.0, 2.0, 1.0]])
    edges = build_neighbor_list(
        torch.from_numpy(x),
        torch.from_numpy(cell)[None],
        torch.ones(1, 3, dtype=torch.bool),
        torch.zeros(2).long(),
        5.0,
    )
    assert as_set(edges) == brute(x, cell, (True,) * 3, 5.0)


def test_huge_sparse_box_and_dense_blob():
    """D07: two atoms in a 20,000 Å box; 60 atoms in one 4 Å blob of a 60 Å box."""
    pbc = torch.ones(1, 3, dtype=torch.bool)
    x = torch.tensor([[1.0, 1, 1], [19999.0, 1, 1]], dtype=torch.float64)
    edges = build_neighbor_list(x, 20000.0 * torch.eye(3).double()[None], pbc, torch.zeros(2).long(), 10.0)
    assert as_set(edges) == {(0, 1, -1, 0, 0), (1, 0, 1, 0, 0)}
    blob = 28 + 4 * torch.rand(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    edges = build_neighbor_list(blob, 60.0 * torch.eye(3).double()[None], pbc, torch.zeros(60).long(), 10.0)
    assert edges.n_edges == 60 * 59
    matrix = build_row_matrix(edges, 60, torch.zeros(60).long())
    # 59 neighbours each, in lines of the next multiple of 16.
    assert matrix.matrix.shape == (60, 64)
    assert ((matrix.matrix != matrix.source.numel()).sum(1) == 59).all()


def test_an_atom_that_flew_off_along_an_open_axis():
    g = torch.Generator().manual_seed(1)
    x = 30 * torch.rand(500, 3, dtype=torch.float64, generator=g)
    x[0] = torch.tensor([5.0, 5, 1e9])
    x[1] = torch.tensor([5.0, 6, 1e9])
    cell = 30 * torch.eye(3, dtype=torch.float64)[None]
    edges = build_neighbor_list(x, cell, torch.tensor([[True, True, False]]), torch.zeros(500).long(), 4.0)
    pairs = {(int(i), int(j)) for i, j in zip(edges.receivers, edges.senders, strict=True)}
    assert (0, 1) in pairs
    assert not any((i < 2) != (j < 2) for i, j in pairs)


def test_needle_shaped_periodic_cell_is_refused():
    """The library would end the process."""
    cell = torch.diag(torch.tensor([1e8, 50.0, 50.0]).double())[None]
    x = torch.rand(100, 3, dtype=torch.float64) @ cell[0]
    with pytest.raises(InputError, match="cutoffs long"):
        build_neighbor_list(x, cell, torch.ones(1, 3, dtype=torch.bool), torch.zeros(100).long(), 10.0)


def test_row_matrix_gives_the_same_distances():
    g = torch.Generator().manual_seed(3)
    cell = torch.tensor([[9.0, 0, 0], [3, 8, 0], [-2, 1, 7]], dtype=torch.float64)[None]
    x = torch.rand(40, 3, dtype=torch.float64, generator=g) @ cell[0] * 2
    idx = torch.zeros(40, dtype=torch.int64)
    edges = build_neighbor_list(x, cell, torch.ones(1, 3, dtype=torch.bool), idx, 6.0)
    d = (x[edges.senders] + edges.images.double() @ cell[0] - x[edges.receivers]).norm(dim=-1)
    matrix = build_row_matrix(edges, 40, idx)
    rows = torch.stack(matrix.rows(x, cell), dim=-1)
    dense = (rows[matrix.matrix] - rows[:40].unsqueeze(1)).norm(dim=-1)
    padded = matrix.matrix == matrix.source.numel()
    assert torch.allclose(dense[~padded].sort().values, d.sort().values, atol=1e-12)
    assert float(dense[padded].min()) > 6.0
    # Images follow a cell that is changed in place, with its atoms, and one of another dtype.
    cell *= 1.1
    stretched = torch.stack(matrix.rows(1.1 * x, cell), dim=-1)
    assert torch.allclose(stretched[:-1], 1.1 * rows[:-1], atol=1e-12)
    single = torch.stack(matrix.rows(1.1 * x.float(), cell.float()), dim=-1)
    assert single.dtype == torch.float32
    assert torch.allclose(single[:-1].double(), stretched[:-1], atol=1e-4)


def test_wrap_is_the_identity_inside_and_lands_inside():
    cell = torch.tensor([[2892.0, 0, 0], [0, 36.15, 0], [5, 0, 36.15]], dtype=torch.float64)[None]
    pbc = torch.ones(1, 3, dtype=torch.bool)
    x = torch.tensor([[-1e-5, 1, 1], [-1e-18, 0, 0], [1.0, 2, 3], [5000, -40, 80]], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        y, whole = wrap(x.to(dtype), cell.to(dtype), pbc, torch.zeros(4).long())
        frac = y.double() @ torch.linalg.inv(cell[0])
        assert bool((frac < 1).all())
        assert bool((frac >= -1e-7).all())
        assert torch.equal(y[2], x[2].to(dtype))
        assert whole[3].tolist()[0] == 1


def test_folding_positions_changes_no_pair():
    """D10: a long thin box, four atoms around x = 0."""
    cell = torch.diag(torch.tensor([2892.0, 36.15, 36.15]).double())[None]
    pbc = torch.ones(1, 3, dtype=torch.bool)
    x = torch.tensor([[-1e-5, 1, 1], [1, 1, 1], [-2, 1, 1], [2890.5, 2, 1]], dtype=torch.float64)
    idx = torch.zeros(4, dtype=torch.int64)
    folded, _ = wrap(x, cell, pbc, idx)

    def pairs(p):
        e = build_neighbor_list(p, cell, pbc, idx, 4.0)
        return sorted(zip(e.receivers.tolist(), e.senders.tolist(), strict=True))

    assert pairs(x) == pairs(folded)


def test_open_axes_without_lattice_vectors():
    cell = torch.zeros(1, 3, 3, dtype=torch.float64)
    cell[0, 1] = torch.tensor([1.0, 8.0, 0.5])
    full = complete_cell(cell, torch.tensor([[False, True, False]]))
    assert float(full[0].det()) > 0
    assert torch.equal(full[0, 1], cell[0, 1])
    assert torch.allclose(full[0, 0] @ cell[0, 1], torch.zeros(()).double(), atol=1e-12)
