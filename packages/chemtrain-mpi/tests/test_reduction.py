import jax.numpy as jnp
import numpy as np

from chemtrain_mpi.collectives import Collectives
from chemtrain_mpi.reduction import all_finite, flat_mean, global_norm, ordered_mean
from distmd_protocol import LocalComm

TREES = [{"a": np.float32([0.1 * k, 1e-8]), "b": (np.full((2, 2), 0.3 * k),)} for k in range(1, 5)]


def test_ordered_mean_is_the_sum_in_order():
    mean = ordered_mean(TREES)
    expected = ((TREES[0]["a"] + TREES[1]["a"]) + TREES[2]["a"]) + TREES[3]["a"]
    assert mean["a"].dtype == np.float32
    np.testing.assert_array_equal(mean["a"], expected / np.float32(4))


def test_ordered_mean_keeps_its_input():
    before = TREES[0]["a"].copy()
    ordered_mean(TREES)
    np.testing.assert_array_equal(TREES[0]["a"], before)


def test_flat_mean_equals_it_to_rounding_and_divides_by_the_global_batch():
    comm = Collectives(LocalComm())
    mean = flat_mean(comm, TREES, TREES[0], 4)
    np.testing.assert_allclose(mean["b"][0], ordered_mean(TREES)["b"][0], rtol=1e-12)
    assert mean["a"].dtype == np.float32
    np.testing.assert_allclose(flat_mean(comm, TREES[:1], TREES[0], 2)["a"], TREES[0]["a"] / 2)
    np.testing.assert_array_equal(flat_mean(comm, [], TREES[0], 2)["a"], 0.0)


def test_norm_and_finiteness():
    assert global_norm({"x": np.array([3.0]), "y": np.array([[4.0]])}) == 5.0
    assert all_finite({"x": np.ones(2), "k": np.array([2**32 - 1], np.uint32), "h": jnp.ones(2, jnp.bfloat16)})
    assert not all_finite((np.ones(2), np.array([1.0, np.inf])))
    assert not all_finite(jnp.array([jnp.nan], jnp.bfloat16))
