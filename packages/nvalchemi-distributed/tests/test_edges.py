"""The neighbour list under the names that wrappers read, against ASE's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase.neighborlist import neighbor_list
from systems import fcc, random_system

from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.errors import InputError
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.neighbors.config import NeighborConfig

CUTOFF = 5.0


@pytest.fixture
def two_systems():
    small = random_system(1, sites=(2, 3, 3), tilt=0.3)
    large = random_system(2, pbc=(True, True, False), cells_away=2)
    return Batch.from_data_list([small, large])


def expected(batch):
    """(i, j, S) of every edge by ASE, with rows of the batch."""
    edges, first = set(), 0
    for data in batch:
        atoms = data.to_atoms()
        i, j, shift = neighbor_list("ijS", atoms, CUTOFF)
        edges |= {(int(a) + first, int(b) + first, *map(int, s)) for a, b, s in zip(i, j, shift, strict=True)}
        first += data.num_nodes
    return edges


def test_coo_names(two_systems):
    batch = two_systems
    NeighborListHook(NeighborConfig(CUTOFF)).update(batch)
    pairs, images = batch.neighbor_list, batch.neighbor_list_shifts
    found = {(*p, *s) for p, s in zip(pairs.tolist(), images.tolist(), strict=True)}
    assert len(found) == batch.num_edges == len(expected(batch))
    assert found == expected(batch)
    assert sum(batch.num_edges_list) == batch.num_edges
    assert all(n > 0 for n in batch.num_edges_list)
    i, j = pairs.T
    distance = (batch.positions[j] + batch.shifts - batch.positions[i]).norm(dim=-1)
    assert float(distance.max()) < CUTOFF
    assert torch.equal(batch.edge_ptr.diff(), torch.bincount(i, minlength=batch.num_nodes))


def test_matrix_names(two_systems):
    batch = two_systems
    NeighborListHook(NeighborConfig(CUTOFF, format="matrix")).update(batch)
    matrix, images, counts = batch.neighbor_matrix, batch.neighbor_matrix_shifts, batch.num_neighbors
    found = {
        (i, int(matrix[i, k]), *images[i, k].tolist()) for i in range(batch.num_nodes) for k in range(int(counts[i]))
    }
    assert found == expected(batch)
    used = torch.arange(matrix.shape[1]) < counts.unsqueeze(-1)
    assert bool((matrix[~used] == batch.num_nodes).all())
    assert bool((matrix[used] < batch.num_nodes).all())


def test_lines_of_a_large_matrix_are_in_the_order_of_the_atoms():
    # From 1,000 rows on the matrix has its receivers in spatial order. The cutoff splits a jittered shell, so that the
    # numbers of neighbours differ; the matrix may hold pairs that are longer by its float32 margin, and lacks none.
    cutoff = 5.3
    batch = Batch.from_data_list([fcc(7)])
    NeighborListHook(NeighborConfig(cutoff)).update(batch)
    edges = torch.cat([batch.neighbor_list, batch.neighbor_list_shifts], dim=1).unique(dim=0)
    NeighborListHook(NeighborConfig(cutoff, format="matrix")).update(batch)
    assert not torch.equal(batch.neighbors.receivers, torch.arange(batch.num_nodes)), "in batch order: says little"
    i, k = (batch.neighbor_matrix < batch.num_nodes).nonzero(as_tuple=True)
    j, images = batch.neighbor_matrix[i, k], batch.neighbor_matrix_shifts[i, k]
    distance = (batch.positions[j] + images.double() @ batch.cell[0] - batch.positions[i]).norm(dim=-1)
    assert float(distance.max()) < 1.0001 * cutoff
    within = distance < cutoff
    found = torch.cat([i[:, None], j[:, None], images], dim=1)[within].unique(dim=0)
    assert torch.equal(found, edges)
    counts = torch.bincount(i, minlength=batch.num_nodes)
    assert int(counts.min()) < int(counts.max())
    assert torch.equal(batch.num_neighbors, counts)


def test_no_list_and_the_other_format_are_refused(two_systems):
    with pytest.raises(InputError, match="no neighbour list yet; add NeighborListHook"):
        _ = two_systems.neighbor_list
    NeighborListHook(NeighborConfig(CUTOFF)).update(two_systems)
    with pytest.raises(InputError, match="format='matrix'"):
        _ = two_systems.neighbor_matrix


def test_a_field_that_would_be_lost_is_refused():
    data = AtomicData(torch.zeros(2, 3), torch.tensor([1, 1]))
    with pytest.raises(AttributeError, match="add_node_property"):
        data.atom_categories = torch.zeros(2)
    data.velocities = torch.ones(2, 3)
    assert np.array_equal(Batch.from_data_list([data]).velocities, torch.ones(2, 3))
    with pytest.raises(InputError, match=r"\(2, 3\)"):
        data.velocities = torch.ones(3, 3)
