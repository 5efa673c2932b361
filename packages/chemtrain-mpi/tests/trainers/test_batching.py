import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.trainers.batching import check_batch_size, deal, epoch_batches


@pytest.mark.parametrize("points", range(1, 26))
def test_every_state_point_once_an_epoch_and_the_remainder_folded(points):
    for batch in range(1, points + 1):
        batches = epoch_batches(jax.random.PRNGKey(points), points, batch)
        assert sorted(p for b in batches for p in b) == list(range(points))
        assert [len(b) for b in batches[:-1]] == [batch] * (points // batch - 1)
        assert len(batches[-1]) == batch + points % batch


def test_seven_by_three_is_three_and_four():
    assert [len(b) for b in epoch_batches(jax.random.PRNGKey(0), 7, 3)] == [3, 4]


def test_order_depends_on_the_key_alone():
    a, b, c = (epoch_batches(jax.random.PRNGKey(seed), 12, 4) for seed in (1, 1, 2))
    assert a == b != c


def test_stale_state_points_come_together():
    batches = epoch_batches(jax.random.PRNGKey(0), 8, 2, {1, 3, 4, 6})
    kinds = [{p in {1, 3, 4, 6} for p in batch} for batch in batches]
    assert all(len(kind) == 1 for kind in kinds)


@given(st.lists(st.integers(0, 99), unique=True, max_size=25), st.integers(1, 8))
def test_work_is_dealt_evenly(points, ranks):
    owners = deal(points, ranks)
    loads = [sum(owner == rank for owner in owners.values()) for rank in range(ranks)]
    assert sum(loads) == len(points)
    assert max(loads) - min(loads) <= 1


def test_minus_one_means_all():
    assert check_batch_size(-1, 7, 2) == 7


@pytest.mark.parametrize(("batch", "points", "ranks"), [(0, 4, 1), (5, 4, 1), (-2, 4, 1), (1, 4, 2), (-1, 2, 4)])
def test_batches_that_cannot_be_are_refused(batch, points, ranks):
    with pytest.raises(ArgumentError):
        check_batch_size(batch, points, ranks)
