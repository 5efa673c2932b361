import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chemtrain_mpi import observables

RNG = np.random.default_rng(0)


def equal(n):
    return jnp.full(n, 1.0 / n)


def test_average_of_scalars_and_arrays():
    values = {"a": jnp.asarray(RNG.normal(size=10)), "g": jnp.asarray(RNG.normal(size=(10, 4)))}
    w = jnp.arange(10.0) / 45.0
    np.testing.assert_allclose(observables.average("a")(values, w), np.average(values["a"], weights=w), rtol=1e-5)
    assert observables.average("g")(values, w, kT=1.0).shape == (4,)


def test_reduced_pressure_and_energy():
    values = {"p": jnp.array([1.0, 3.0]), "rho": jnp.array([0.5, 0.5]), "u": jnp.array([-4.0, -2.0])}
    assert float(observables.reduced_pressure("p", "rho")(values, equal(2), kT=2.0)) == 2.0
    assert float(observables.reduced_energy("u")(values, equal(2), kT=2.0)) == -1.5


def test_heat_capacity_of_an_einstein_crystal():
    # N independent oscillators in 3 dimensions: 3 k_B a particle, half of it potential.
    n, kT = 50, 0.7
    energy = 0.5 * kT * RNG.chisquare(3 * n, size=200_000)
    found = observables.heat_capacity("u", n)({"u": jnp.asarray(energy)}, equal(200_000), kT=kT)
    assert float(found) == pytest.approx(3.0, rel=0.02)


def test_compressibility_of_an_ideal_gas():
    # Volumes of N ideal particles at P: var(V)/(<V> kT) = 1/P to order 1/N.
    n, kT, pressure = 400, 0.8, 2.0
    volume = RNG.gamma(n + 1, kT / pressure, 100_000)
    found = observables.compressibility("v")({"v": jnp.asarray(volume)}, equal(100_000), kT=kT)
    assert float(found) == pytest.approx(1.0 / pressure, rel=0.02)


def test_block_error_of_independent_samples_is_the_textbook_one():
    samples = RNG.normal(size=(40, 64))
    error = jax.vmap(lambda x: observables.block_standard_error("a", 8)({"a": x}, equal(64)))(jnp.asarray(samples))
    assert float(jnp.sqrt(jnp.mean(error**2))) == pytest.approx(1 / 8, rel=0.15)


def test_block_error_sees_correlation_that_single_samples_hide():
    # Every value eight times: the plain error would be too small by √8.
    samples = jnp.repeat(jnp.asarray(RNG.normal(size=(40, 32))), 8, axis=1)
    error = jax.vmap(lambda x: observables.block_standard_error("a", 8)({"a": x}, equal(256)))(samples)
    assert float(jnp.sqrt(jnp.mean(error**2))) == pytest.approx(1 / np.sqrt(32), rel=0.2)
