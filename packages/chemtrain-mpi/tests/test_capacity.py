from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax_md import partition, space

from chemtrain_mpi.capacity import Capacity, NeighborLists, rung
from chemtrain_mpi.errors import ArgumentError


def test_ladder_is_geometric_and_common():
    steps = sorted({rung(n, 1.25) for n in range(1, 200)})
    assert steps[:4] == [8, 10, 13, 17]
    assert all(b / a <= 1.25 + 1 / a for a, b in pairwise(steps))
    lists = NeighborLists(problems.neighbor_fn(), 1.25)
    assert lists.larger(Capacity(13, 8)) == Capacity(17, 10)
    assert lists.larger(Capacity(13)) == Capacity(17)


def test_a_multiplier_that_cannot_grow_is_refused():
    with pytest.raises(ArgumentError, match="above 1"):
        NeighborLists(problems.neighbor_fn(), 1.0)


def test_allocated_list_is_that_of_an_update_bit_for_bit():
    position = jnp.asarray(problems.lattice(jitter=0.3), jnp.float32)
    lists = NeighborLists(problems.neighbor_fn(), 1.25)
    box = {"box": jnp.float32(4.0)}
    capacity = lists.first(position, **box)
    made = lists.allocate(position, capacity, **box)
    elsewhere = lists.allocate(jnp.asarray(problems.lattice(jitter=0.3, seed=9), jnp.float32), capacity, **box)
    updated = jax.jit(lambda n, p: n.update(p, **box))(elsewhere, position)
    assert jax.tree.structure(made) == jax.tree.structure(updated)
    np.testing.assert_array_equal(made.idx, updated.idx)
    assert not bool(made.did_buffer_overflow)


def test_too_small_a_capacity_is_flagged():
    position = jnp.asarray(problems.lattice(jitter=0.3), jnp.float32)
    lists = NeighborLists(problems.neighbor_fn(), 1.25)
    made = lists.allocate(position, Capacity(3), box=jnp.float32(4.0))
    assert made.idx.shape == (27, 3)
    assert bool(made.did_buffer_overflow)


def test_equal_cells_share_one_program():
    displacement, _ = space.periodic(9.0)
    fn = partition.neighbor_list(displacement, 9.0, 1.5, dr_threshold=0.2)
    lists = NeighborLists(fn, 1.25)
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.uniform(0, 9, (60, 3)), jnp.float32) for _ in range(2))
    capacity = lists.first(a)
    assert capacity.cell > 0
    assert jax.tree.structure(lists.allocate(a, capacity)) == jax.tree.structure(lists.allocate(b, capacity))


def test_overflow_of_the_cells_is_flagged_as_well():
    # D09: particles far apart at allocation crowd into one cell afterwards.
    displacement, _ = space.periodic(9.0)
    fn = partition.neighbor_list(displacement, 9.0, 1.0, dr_threshold=0.1, capacity_multiplier=1.0)
    lists = NeighborLists(fn, 1.25)
    apart = jnp.asarray(np.stack(np.meshgrid(*[np.arange(3)] * 3), -1).reshape(-1, 3) * 3.0 + 0.5, jnp.float32)
    made = lists.allocate(apart, Capacity(26, 1))
    assert not bool(made.did_buffer_overflow)
    crowded = jax.jit(lambda n, p: n.update(p))(made, apart * 0.05 + 0.2)
    assert bool(crowded.error.code & partition.PEC.CELL_LIST_OVERFLOW)


@pytest.mark.parametrize("fractional", [False, True])
@pytest.mark.parametrize("cells", [False, True])
def test_folding_positions_into_the_box_does_not_change_the_list(fractional, cells):
    """A long thin box, and atoms that lie just outside its edges in float32 (jax-md issue 322)."""
    edges, cutoff, skin = np.array([2892.0, 36.15, 36.15]), 4.0, 0.5
    unfolded = np.array([[-1e-5, 1, 1], [1, 1, 1], [2891, 1, 2], [3, -1e-5, 36.1]])
    folded = np.mod(unfolded, edges)
    box = jnp.float32(edges)
    displacement = (space.periodic_general(box, fractional_coordinates=True) if fractional else space.periodic(box))[0]
    made = partition.neighbor_list(
        displacement, box, cutoff, skin, fractional_coordinates=fractional, disable_cell_list=not cells
    )
    separation = unfolded[:, None] - unfolded
    distance = np.linalg.norm(separation - edges * np.round(separation / edges), axis=-1)
    wanted = {(i, j) for i, j in zip(*np.nonzero(distance < cutoff + skin), strict=True) if i != j}
    assert 0 < len(wanted) < 12
    for positions in (unfolded, folded):
        lists = NeighborLists(made, 1.25)
        start = jnp.float32(positions / edges if fractional else positions)
        neighbors = lists.allocate(start, lists.first(start))
        assert not bool(neighbors.did_buffer_overflow)
        idx = np.asarray(neighbors.idx)
        assert {(i, int(j)) for i in range(4) for j in idx[i] if j < 4} == wanted
