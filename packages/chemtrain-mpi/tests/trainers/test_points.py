"""Noise, new starts and what ranks send each other, with exact samples of oscillators."""

from dataclasses import replace

import harmonic
import jax.numpy as jnp
import numpy as np
import problems
import pytest

from chemtrain_mpi.capacity import Capacity

pytestmark = pytest.mark.once


def spoil(trainer, point):
    """Make a state point stale."""
    old = trainer.trajectories[point]
    trainer.trajectories[point] = replace(old, reference_energy=old.reference_energy + 50.0 * jnp.arange(8.0))


def test_no_two_trajectories_share_their_noise():
    # The sampler forgets where it started, so trajectories of one key would be equal. Two alike state points; runs
    # outside of updates, epochs that recompute both.
    trainer = harmonic.trainer(snapshots=8, state_kwargs={"kT": jnp.ones(2), "box": jnp.full(2, 4.0)})
    seen = []

    def collect():
        seen.extend(tuple(problems.bits(t.snapshots.position)) for t in trainer.trajectories)

    trainer.initialize_trajstates()
    collect()
    trainer.refresh_trajstates()
    collect()
    for _ in range(2):
        for k in range(2):
            spoil(trainer, k)
        trainer.train(1)
        assert trainer.history[-1]["recomputed"] == [0, 1]
        collect()
    assert len(set(seen)) == len(seen) == 8


def test_a_new_start_is_drawn_from_snapshots_of_finite_weight():
    trainer = harmonic.trainer(snapshots=8, resample_simstates=True)
    trainer.initialize_trajstates()
    points, before = trainer._points, trainer.trajectories[0]
    exponent = jnp.array([jnp.nan, jnp.inf, 0.0, -jnp.inf, jnp.inf, jnp.nan, jnp.nan, jnp.inf])
    points.objective.weights = lambda params, jobs: [exponent for _ in jobs]
    drawn = points._resampled(trainer.params, before, 0, 1, 0)
    np.testing.assert_array_equal(drawn.chains[0].state.position, before.snapshots.position[2])
    # Where there is none it goes on from its end, which was finite.
    points.objective.weights = lambda params, jobs: [exponent * jnp.nan for _ in jobs]
    assert points._resampled(trainer.params, before, 0, 1, 0) is before


def test_both_sizes_of_a_list_are_sent():
    trainer = harmonic.trainer(snapshots=8)
    trainer.initialize_trajstates()
    points, (before, _) = trainer._points, trainer.trajectories
    bundle = points._pack(replace(before, capacity=Capacity(13, 7)))
    assert points._unpack(bundle, trainer.params, before, 0).capacity == Capacity(13, 7)
