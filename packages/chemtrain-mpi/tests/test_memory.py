"""What a rank holds: as estimated before the first simulation, off the device on request, the same at every update."""

import gc
import logging

import jax
import numpy as np
import problems
import pytest

from chemtrain_mpi import process_printouts
from chemtrain_mpi.trainers.checkpoints import trajectory_arrays
from chemtrain_mpi.trainers.memory import estimate, log_estimate

TIMINGS = process_printouts(0.005, 0.25, 0.05, 0.05)


def device_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def held(points, on_host):
    """A trainer after three and after six updates that recompute everything, and what it added on the device."""
    before = device_bytes()
    trainer = problems.trainer(points, timings=TIMINGS, reweight_ratio=1.0, traj_states_on_host=on_host)
    trainer.initialize_trajstates()
    trainer.train(3)
    early = device_bytes() - before
    trainer.train(3)
    return trainer, early, device_bytes() - before


def stored_bytes(trainer):
    trees = trajectory_arrays(trainer.trajectories)
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(trees))


@pytest.fixture(scope="module")
def on_device():
    return held(2, False)


@pytest.mark.once
def test_the_estimate_is_what_the_trajectories_take(on_device):
    trainer, _, _ = on_device
    stored, lists = estimate(trainer._sampler, trainer.trajectories)
    # Reference positions, energies and keywords are not counted: small beside whole states.
    assert stored <= stored_bytes(trainer) < 1.15 * stored
    assert lists > 0


def test_the_estimate_grows_with_the_state_points(on_device):
    trainer, _, _ = on_device
    one = estimate(trainer._sampler, trainer.trajectories[:1])
    assert estimate(trainer._sampler, trainer.trajectories[:1] * 25) == tuple(25 * size for size in one)


def test_the_estimate_is_logged_before_the_first_simulation(caplog):
    caplog.set_level(logging.INFO, logger="chemtrain_mpi")
    problems.trainer(2, timings=TIMINGS).initialize_trajstates()
    messages = [record.getMessage() for record in caplog.records]
    first = next(i for i, message in enumerate(messages) if message.startswith("memory on every rank"))
    assert any(message.startswith("trajectories of 2 state points") for message in messages[first + 1 :])
    assert not any(message.startswith("trajectories of") for message in messages[:first])


def test_the_estimate_is_logged_in_megabytes(caplog, monkeypatch):
    # The problems of these tests are too small to show in a line that is rounded to 0.1 MB.
    monkeypatch.setattr("chemtrain_mpi.trainers.memory.estimate", lambda *_: (123_400_000, 56_700_000))
    caplog.set_level(logging.INFO, logger="chemtrain_mpi")
    log_estimate(None, [])
    assert "123.4 MB of trajectories and, at first capacity, up to 56.7 MB of neighbour lists" in caplog.text


def test_memory_is_flat_over_updates(on_device):
    _, early, late = on_device
    assert late == early


def test_trajectories_on_the_host_are_no_jax_arrays():
    # On a CPU that is the same memory, seen by numpy: how much a GPU is spared cannot be measured here.
    trainer, early, late = held(2, True)
    assert late == early
    # The state keywords are the trainer's own, a few numbers.
    parts = [tree | {"reference_kwargs": None} for tree in trajectory_arrays(trainer.trajectories).values()]
    assert {type(leaf) for leaf in jax.tree.leaves(parts)} == {np.ndarray}
    # Nor are the lists of the snapshots, which are the larger part.
    slots = [trajectory.cache["slots"] for trajectory in trainer.trajectories]
    assert {type(array) for array in slots} == {np.ndarray}


def test_lists_made_anew_are_kept_where_the_snapshots_are():
    trainer, _, _ = held(2, True)
    sampler, trajectory = trainer._sampler, trainer.trajectories[0]
    kept = trajectory.cache.pop("slots")
    again = sampler.slots(trajectory)
    assert type(again) is np.ndarray
    np.testing.assert_array_equal(again, kept)
