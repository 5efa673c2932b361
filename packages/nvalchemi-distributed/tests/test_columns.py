"""The search in columns gives what the edge list gives."""

from __future__ import annotations

import pytest
import torch
from systems import fcc, lj, random_system

import nvalchemi_distributed.neighbors.columns as columns
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.neighbors import build_neighbor_list
from nvalchemi_distributed.neighbors.columns import COLUMNS_FROM, build_by_columns


def pairs_of_matrix(matrix, positions, cell):
    """{(receiver, sender, image)} and the distance of each, from the rows the kernel sees."""
    table = torch.stack(matrix.rows(positions, cell), dim=-1)
    line, place = (matrix.matrix != matrix.source.numel()).nonzero(as_tuple=True)
    row = matrix.matrix[line, place].long()
    distance = (table[row] - table[line]).norm(dim=-1)
    image = torch.cat([matrix.image.new_zeros(matrix.n_receivers, 3), matrix.image])
    keys = torch.cat([matrix.source[line, None], matrix.source[row, None], image[row]], dim=1)
    return {tuple(k): float(d) for k, d in zip(keys.tolist(), distance, strict=True)}


def expected_pairs(positions, cell, pbc, reach, m):
    edges = build_neighbor_list(positions, cell, pbc, torch.zeros(len(positions)).long(), reach, m)
    keys = torch.cat([edges.receivers[:, None], edges.senders[:, None], edges.images], dim=1)
    return {tuple(k) for k in keys.tolist()}


CASES = {
    "cubic": dict(sites=(7, 6, 8)),
    "tilted": dict(sites=(6, 7, 6), tilt=0.5, fill=0.9),
    "open": dict(sites=(6, 6, 6), pbc=(False, False, False)),
    "slab": dict(sites=(8, 7, 3), pbc=(True, True, False), tilt=0.3),
    "smaller than the reach": dict(sites=(2, 2, 3), fill=0.8),
    "atoms outside": dict(sites=(6, 6, 6)),
    "one corner": dict(sites=(9, 9, 9), corner=True, pbc=(True, False, True)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_columns_give_the_pairs_of_the_edge_list(name, dtype, share):
    """Against the library's list, that is against another algorithm; ghosts (rows that do not receive) included."""
    data = random_system(5, **CASES[name])
    x, cell = data.positions.to(dtype), data.cell.to(dtype)
    if name == "atoms outside":
        x[:10] += cell[0, 0]
    m = int(share * len(x))
    if share < 1:
        # Receivers together in one part of the cell, as under decomposition.
        x = x[x[:, 0].argsort()]
    for reach in (6.0, 9.0):
        matrix = build_by_columns(x, cell, data.pbc, reach, m)
        assert matrix is not None
        assert sorted(matrix.receivers.tolist()) == list(range(m))
        got = pairs_of_matrix(matrix, x, cell)
        expected = expected_pairs(x, cell, data.pbc, reach, m)
        assert expected
        assert not expected - set(got)
        # What is listed besides lies within the stated margin.
        assert all(got[k] < reach * (1 + 1e-4) for k in set(got) - expected)
        assert len(got) - len(expected) <= 1e-3 * len(expected)
        rows = torch.stack(matrix.rows(x, cell), dim=-1)
        assert float((rows[:-1] - rows[-1]).norm(dim=-1).min()) > reach


@pytest.mark.parametrize("distances", [1, 30_000])
def test_the_matrix_does_not_depend_on_how_many_distances_are_held_at_once(monkeypatch, distances):
    """Parts of one block and of some, each as wide as its own blocks need, against a single part."""
    data = random_system(3, sites=(9, 9, 9), fill=0.6, pbc=(True, False, True))
    whole = build_by_columns(data.positions, data.cell, data.pbc, 6.0)
    monkeypatch.setattr(columns, "_DISTANCES", distances)
    parts = build_by_columns(data.positions, data.cell, data.pbc, 6.0)
    assert torch.equal(parts.matrix, whole.matrix)
    assert torch.equal(parts.source, whole.source)
    assert torch.equal(parts.image, whole.image)


def test_a_system_that_columns_do_not_suit_is_left_to_the_edge_list():
    """A gas in a huge box, an atom many cells away, one nowhere, and no atom at all."""
    g = torch.Generator().manual_seed(1)
    gas = torch.rand(500, 3, dtype=torch.float64, generator=g) * 1.0e4
    pbc = torch.ones(1, 3, dtype=torch.bool)
    assert build_by_columns(gas, 1.0e4 * torch.eye(3).double()[None], pbc, 9.0) is None
    data = fcc(3)
    data.positions[0] += 20 * data.cell[0, 0]
    assert build_by_columns(data.positions, data.cell, data.pbc, 6.0) is None
    data.positions[0] = torch.nan
    assert build_by_columns(data.positions, data.cell, data.pbc, 6.0) is None
    assert build_by_columns(data.positions[:0], data.cell, data.pbc, 6.0) is None


def test_spatial_order_inside_changes_no_output():
    """Forces come back in the order of the batch: a shuffled batch gives the shuffled forces."""
    data = fcc(7)
    assert data.num_nodes >= COLUMNS_FROM
    batch = Batch.from_data_list([data])
    order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(2))
    mixed = batch.clone()
    mixed.positions = batch.positions[order]
    model = lj(8.5)
    for b in (batch, mixed):
        NeighborListHook(model.neighbor_config, skin=0.5).update(b)
    straight, shuffled = model(batch), model(mixed)
    scale = float(straight["forces"].abs().max())
    assert torch.allclose(shuffled["forces"], straight["forces"][order], rtol=0, atol=1e-13 * scale)
    assert torch.allclose(shuffled["energy"], straight["energy"], rtol=1e-13)
    assert torch.allclose(shuffled["virial"], straight["virial"], rtol=1e-11, atol=1e-12)
