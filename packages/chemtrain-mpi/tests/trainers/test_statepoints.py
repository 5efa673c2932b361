import jax.numpy as jnp
import numpy as np
import pytest

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.trainers import statepoints


def test_scalars_are_broadcast_and_one_state_point_is_taken():
    led = statepoints.lead_with_points("state_kwargs", {"kT": 1.5, "box": np.arange(9.0).reshape(3, 3)}, 3)
    assert statepoints.take(led, 1)["kT"] == 1.5
    np.testing.assert_array_equal(statepoints.take(led, 1)["box"], [3.0, 4.0, 5.0])


def test_wrong_leading_axis_is_named():
    with pytest.raises(ArgumentError, match=r"state_kwargs\['box'\] has shape \(2,\)"):
        statepoints.lead_with_points("state_kwargs", {"box": np.ones(2)}, 3)


def test_targets_must_agree_on_the_number_of_state_points():
    targets = {"a": {"target": np.ones(3), "gamma": np.ones(3)}, "b": {"target": np.ones((2, 5)), "gamma": 1.0}}
    with pytest.raises(ArgumentError, match="do not agree"):
        statepoints.count_state_points(targets)
    assert statepoints.count_state_points({"a": targets["a"]}) == 3


def test_digest_sees_structure_shape_type_and_every_bit():
    base = {"a": np.ones(3, np.float32)}
    others = [{"b": np.ones(3, np.float32)}, {"a": np.ones(3)}, {"a": np.ones((3, 1), np.float32)}]
    others.append({"a": np.nextafter(np.ones(3, np.float32), 2)})
    digests = {statepoints.digest(tree) for tree in [base, *others]}
    assert len(digests) == 5
    assert statepoints.digest({"a": jnp.ones(3)}) == statepoints.digest(base)


def test_strong_types():
    assert not statepoints.strong({"x": jnp.asarray(1.0)})["x"].weak_type
