"""What an update does with numbers that are not finite and with stale trajectories. Exact samples of oscillators."""

from dataclasses import replace

import harmonic
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest

from chemtrain_mpi.errors import NonFiniteError
from distmd_protocol import RankError

pytestmark = pytest.mark.once


def started(**overrides):
    trainer = harmonic.trainer(snapshots=8, **overrides)
    trainer.initialize_trajstates()
    return trainer


def spoil(trainer, point, energy):
    old = trainer.trajectories[point]
    trainer.trajectories[point] = replace(old, reference_energy=old.reference_energy + energy)


def test_a_trajectory_whose_sample_size_is_nan_is_replaced():
    # A comparison with NaN is false: "below the limit" would let it pass for fresh and end in a rejected update.
    trainer = started()
    spoil(trainer, 1, jnp.nan)
    trainer.train(1)
    assert trainer.history[0]["recomputed"] == [1]
    assert np.isfinite(trainer.history[0]["loss"])


def test_a_first_trajectory_that_is_not_finite_is_refused():
    # Stored, it would be noticed only by the training, far from where the start is chosen.
    def nowhere(params):
        energy_fn = harmonic.energy_fn_template(params)
        return lambda position, **kwargs: energy_fn(position, **kwargs) * jnp.nan

    trainer = harmonic.trainer(snapshots=8, energy_fn_template=nowhere)
    with pytest.raises(RankError, match="trajectory of state point 0 is not finite"):
        trainer.initialize_trajstates()
    assert trainer.trajectories is None


def test_a_new_trajectory_that_is_not_finite_leaves_an_error_state(tmp_path):
    trainer = started(checkpoint_path=tmp_path)
    before, run = problems.bits([t.snapshots for t in trainer.trajectories]), trainer._sampler.run
    trainer._sampler.run = lambda params, jobs: [
        replace(new, reference_energy=new.reference_energy * jnp.nan) for new in run(params, jobs)
    ]
    spoil(trainer, 0, 50.0 * jnp.arange(8.0))
    with pytest.raises(NonFiniteError, match="trajectory of state point 0 is not finite"):
        trainer.train(1)
    assert problems.bits([t.snapshots for t in trainer.trajectories]) == before
    assert (tmp_path / "epoch-000001_error_state").is_dir()


def test_a_gradient_that_is_not_finite_is_rejected_though_the_optimiser_hides_it():
    # The value is 0, its derivative is not a number; without the check the parameters would just stand still.
    losses = {"energy": lambda prediction, target: jnp.sqrt(0.0 * prediction)}
    targets = {"energy": {"target": jnp.zeros(2), "gamma": jnp.ones(2)}}
    optimizer = optax.chain(optax.zero_nans(), optax.sgd(0.1))
    trainer = started(optimizer=optimizer, target_loss_fns=losses, targets=targets)
    with pytest.raises(NonFiniteError, match="the gradient is not finite"):
        trainer.train(1)


def test_an_optimiser_whose_state_is_not_finite_is_rejected_with_its_update():
    # Parameters are still finite then, and would be stored beside a state that spoils every later update.
    def update(gradient, state, params=None):
        return jax.tree.map(jnp.zeros_like, gradient), state * jnp.inf

    trainer = started(optimizer=optax.GradientTransformation(lambda params: jnp.ones(()), update))
    with pytest.raises(NonFiniteError, match="the optimiser's state not finite"):
        trainer.train(1)
    assert float(trainer._state.opt_state) == 1.0


def test_the_step_is_bounded_by_the_trajectories_that_the_update_leaves():
    # One of them was stale. Measured on the old one, every step would look too long, and the smallest would be taken.
    trainer = started(allowed_reduction=0.5)
    spoil(trainer, 0, 50.0 * jnp.arange(8.0))
    trainer.train(1)
    assert trainer.history[0]["recomputed"] == [0]
    assert trainer.history[0]["step_size"] == 1.0


def test_the_loss_of_every_target_can_be_replaced_at_once():
    targets = {"energy": {"target": jnp.full(2, 3.0), "gamma": jnp.array([1.0, 2.0])}}
    trainer = started(loss_fn=lambda prediction, target: jnp.abs(prediction - target), targets=targets)
    expected = np.array([1.0, 2.0]) * np.abs(trainer.predict()["energy"] - 3.0)
    trainer.train(1)
    assert trainer.history[0]["loss"] == pytest.approx(expected.mean(), rel=1e-5)
