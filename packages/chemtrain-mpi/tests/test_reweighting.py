import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chemtrain_mpi import reweighting


def test_unchanged_state_has_equal_weights():
    energy = jnp.array([-3.0, 1.0, 2.0])
    x = reweighting.exponents(energy, energy, 0.7, 0.7)
    np.testing.assert_array_equal(x, 0.0)
    assert float(reweighting.effective_samples(x)) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.usefixtures("x64")
def test_another_temperature_of_a_harmonic_oscillator():
    # <x²> = kT/k. Sampled at kT = 0.8, k = 1; wanted at kT = 1.3, k = 1.25: 1.04. −β'ΔU alone gives 0.86.
    kT, wanted, k = 0.8, 1.3, 1.25
    position = jnp.asarray(np.random.default_rng(0).normal(scale=kT**0.5, size=400_000))
    reference, energy = 0.5 * position**2, 0.5 * k * position**2
    w = reweighting.weights(reweighting.exponents(energy, reference, wanted, kT))
    assert float(jnp.sum(w * position**2)) == pytest.approx(1.04, abs=0.01)
    short = reweighting.weights(-(energy - reference) / wanted)
    assert float(jnp.sum(short * position**2)) < 0.9


@pytest.mark.usefixtures("x64")
def test_another_pressure_of_an_ideal_gas():
    # NPT volumes of N ideal particles follow V^N exp(−βPV): <V> = (N + 1) kT / P.
    n, kT, pressure, wanted = 20, 0.9, 1.0, 1.1
    volume = jnp.asarray(np.random.default_rng(1).gamma(n + 1, kT / pressure, 300_000))
    zero = jnp.zeros_like(volume)
    x = reweighting.exponents(zero, zero, kT, kT, volume, wanted, pressure)
    mean = float(jnp.sum(reweighting.weights(x) * volume))
    assert mean == pytest.approx((n + 1) * kT / wanted, rel=5e-3)


@pytest.mark.usefixtures("x64")
def test_general_exponent_is_the_formula():
    rng = np.random.default_rng(2)
    u, u_ref, v = (jnp.asarray(rng.normal(size=7)) for _ in range(3))
    x = reweighting.exponents(u, u_ref, 1.3, 0.8, v, 0.4, 0.9)
    np.testing.assert_allclose(x, -(u + 0.4 * v) / 1.3 + (u_ref + 0.9 * v) / 0.8, rtol=1e-12)


def test_large_exponents_do_not_overflow():
    x = jnp.array([1e6, 1e6 - 1.0, 0.0])
    w = reweighting.weights(x)
    assert bool(jnp.all(jnp.isfinite(w)))
    assert float(jnp.sum(w)) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("where", [0, slice(None)])
def test_exponents_that_are_not_finite_make_everything_nan_never_one(bad, where):
    x = jnp.zeros(5).at[where].set(bad)
    assert np.isnan(reweighting.effective_samples(x))
    assert bool(jnp.all(jnp.isnan(reweighting.weights(x))))


def test_effective_samples_lie_between_one_and_all():
    assert float(reweighting.effective_samples(jnp.array([500.0, 0.0, 0.0]))) == pytest.approx(1.0)
    two = jnp.array([0.0, 0.0, -500.0])
    assert float(reweighting.effective_samples(two)) == pytest.approx(2.0, rel=1e-6)


def test_effective_samples_of_unequal_weights_are_the_exponential_of_their_entropy():
    # ½, ¼, ¼: −Σ w ln w = 1.5 ln 2. Kish's 1/Σw² gives 2.67, and tells the two apart only where weights differ.
    x = jnp.log(jnp.array([2.0, 1.0, 1.0]))
    assert float(reweighting.effective_samples(x)) == pytest.approx(2.0**1.5, rel=1e-5)


@pytest.mark.usefixtures("x64")
def test_gradient_flows_through_the_weights():
    # d<a>/dθ = −β Cov(a, dU/dθ).
    rng = np.random.default_rng(3)
    a, slope = (jnp.asarray(rng.normal(size=50)) for _ in range(2))

    def mean(theta):
        return jnp.sum(reweighting.weights(reweighting.exponents(theta * slope, jnp.zeros(50), 0.5, 0.5)) * a)

    covariance = float(np.mean(np.asarray(a * slope)) - np.mean(a) * np.mean(slope))
    assert float(jax.grad(mean)(0.0)) == pytest.approx(-covariance / 0.5, rel=1e-10)
