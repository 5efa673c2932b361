"""Diffusion of walks and of Langevin particles, whose coefficients are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chemtrain_mpi import observables
from chemtrain_mpi.errors import ArgumentError

pytestmark = pytest.mark.once

EDGE, T, N = 3.0, 800, 60


def equal(n):
    return jnp.full(n, 1.0 / n)


def walk(step=0.15, seed=0):
    """A random walk of many boxes' length: the true paths, and what a simulator stores of them."""
    steps = np.random.default_rng(seed).normal(scale=step, size=(T, N, 3))
    path = np.cumsum(steps, axis=0)
    return path, {"r": jnp.asarray(path / EDGE % 1.0, jnp.float32)}


def test_paths_are_unwrapped_as_they_were_in_any_box():
    path, values = walk()
    found = observables.unwrap(values["r"], EDGE)
    np.testing.assert_allclose(found - found[0], path - path[0], atol=2e-4)
    assert np.ptp(path, axis=0).max() > 2 * EDGE, "the walk must leave the box"
    tilted = jnp.array([[3.0, 0.5, 0.1], [0.0, 2.5, 0.2], [0.0, 0.0, 2.0]])
    found = observables.unwrap(values["r"], tilted)
    np.testing.assert_allclose(found - found[0], (path - path[0]) / EDGE @ np.asarray(tilted).T, atol=2e-4)


def test_random_walk_diffuses_with_half_its_variance_a_time():
    # Per axis ⟨Δx²⟩ = s² a step, D = s²/2τ.
    _, values = walk(0.15)
    interval, expected = 0.02, 0.15**2 / (2 * 0.02)
    diffusion = observables.self_diffusion("r", interval, range(1, 11))
    found = float(jax.jit(lambda v: diffusion(v, equal(T), kT=1.0, box=EDGE))(values))
    assert found == pytest.approx(expected, rel=0.05)
    msd = observables.mean_squared_displacement("r", [1, 4])(values, equal(T), kT=1.0, box=EDGE)
    np.testing.assert_allclose(msd, [3 * 0.15**2, 12 * 0.15**2], rtol=0.03)


def test_weights_choose_where_paths_start():
    # The second half of the walk takes steps of twice the length.
    path, _ = walk(0.05)
    path[T // 2 :] += path[T // 2 :] - path[T // 2]
    values = {"r": jnp.asarray(path / EDGE % 1.0, jnp.float32)}
    weights = jnp.where(jnp.arange(T) < T // 2 - 1, 0.0, 1.0)
    found = observables.mean_squared_displacement("r", [1])(values, weights / weights.sum(), kT=1.0, box=EDGE)
    assert float(found[0]) == pytest.approx(3 * 0.1**2, rel=0.05)


def test_a_pair_has_the_weight_of_its_first_snapshot():
    # Where it starts is what the weights speak of; along a long walk the last snapshot's would give much the same.
    values = {"r": jnp.array([0.0, 0.1, 0.3])[:, None, None] * jnp.array([1.0, 0.0, 0.0])}
    displacement = observables.mean_squared_displacement("r", [1])
    for weights, step in (([1.0, 0.0, 0.0], 0.1), ([0.0, 1.0, 0.0], 0.2), ([0.0, 0.5, 0.5], 0.2)):
        found = displacement(values, jnp.array(weights), kT=1.0, box=EDGE)
        assert float(found[0]) == pytest.approx((step * EDGE) ** 2, rel=1e-5)


def test_both_rules_agree_on_free_langevin_particles():
    # An Ornstein–Uhlenbeck velocity, exactly sampled with its position: D = kT/mγ.
    kT, mass, friction, dt = 0.8, 2.0, 4.0, 0.02
    rng, decay = np.random.default_rng(1), np.exp(-friction * dt)
    spread = np.sqrt(kT / mass)
    v = spread * rng.normal(size=(400, 3))
    r, velocities, positions = np.zeros((400, 3)), [], []
    var_v = kT / mass * (1 - decay**2)
    var_r = kT / (mass * friction**2) * (2 * friction * dt - 3 + 4 * decay - decay**2)
    cov = kT / (mass * friction) * (1 - decay) ** 2
    root = np.linalg.cholesky(np.array([[var_v, cov], [cov, var_r]]))
    for _ in range(600):
        a, b = rng.normal(size=(2, 400, 3))
        r = r + v * (1 - decay) / friction + root[1, 0] * a + root[1, 1] * b
        v = decay * v + root[0, 0] * a
        velocities.append(v)
        positions.append(r)
    values = {"v": jnp.asarray(np.array(velocities), jnp.float32)}
    values["r"] = jnp.asarray(np.array(positions) / 5.0 % 1.0, jnp.float32)
    expected = kT / (mass * friction)
    einstein = observables.self_diffusion("r", dt, range(60, 121, 20))(values, equal(600), kT=kT, box=5.0)
    kubo = observables.self_diffusion_green_kubo("v", dt, 80)
    assert float(einstein) == pytest.approx(expected, rel=0.1)
    assert float(jax.jit(lambda w: kubo(w, equal(600)))(values)) == pytest.approx(expected, rel=0.1)
    correlation = observables.velocity_autocorrelation("v", [0, 12])(values, equal(600))
    np.testing.assert_allclose(correlation, 3 * kT / mass * np.array([1.0, decay**12]), rtol=0.05)


def test_integral_of_the_velocities_is_the_trapezoidal_rule():
    # Particles of constant speed: the integrand is v² throughout, so from 0 to four intervals it is 4 v² τ. A sum over
    # five snapshots is off by a quarter, which would hide in the scatter of a liquid.
    values = {"v": jnp.broadcast_to(jnp.array([1.0, 2.0, 2.0]), (12, 5, 3))}
    found = observables.self_diffusion_green_kubo("v", 0.1, 4)(values, equal(12))
    assert float(found) == pytest.approx(9.0 * 0.4 / 3, rel=1e-6)


def test_no_path_leads_from_one_chain_into_the_next():
    first, second = (walk(0.05, seed)[1]["r"] for seed in (5, 6))
    values = {"r": jnp.concatenate([first, second + 0.4])}
    msd = observables.mean_squared_displacement("r", [3], chains=2)(values, equal(2 * T), kT=1.0, box=EDGE)
    each = [
        observables.mean_squared_displacement("r", [3])({"r": r}, equal(T), kT=1.0, box=EDGE) for r in (first, second)
    ]
    np.testing.assert_allclose(msd, np.mean(each, axis=0), rtol=1e-5)
    with pytest.raises(ArgumentError, match="chains of equal length"):
        observables.mean_squared_displacement("r", [3], chains=3)(values, equal(2 * T), box=EDGE)


def test_snapshots_too_far_apart_give_nan_and_no_wrong_number():
    _, values = walk(0.5)
    found = observables.self_diffusion("r", 1.0, [1, 2])(values, equal(T), kT=1.0, box=EDGE)
    assert np.isnan(float(found))


def test_senseless_lags_and_boxes_are_refused():
    _, values = walk()
    with pytest.raises(ArgumentError, match="more than the 800 snapshots"):
        observables.mean_squared_displacement("r", [800])(values, equal(T), box=EDGE)
    with pytest.raises(ArgumentError, match="at least 1"):
        observables.mean_squared_displacement("r", [0])
    with pytest.raises(ArgumentError, match="two different lags"):
        observables.self_diffusion("r", 1.0, [3, 3])
    with pytest.raises(ArgumentError, match="fixed box"):
        observables.mean_squared_displacement("r", [1])(values, equal(T), box=EDGE, pressure=1.0)
