import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chemtrain_mpi import observables
from chemtrain_mpi.errors import ArgumentError

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


def test_thermal_expansion_of_an_ideal_gas_also_when_reweighted():
    # U = 0 and V ~ Gamma(N + 1): α = 1/T. Reweighted to another temperature and pressure it is the other 1/T.
    n, kT, pressure, other_kT, other_pressure = 300, 0.8, 2.0, 0.82, 2.02
    volume = RNG.gamma(n + 1, kT / pressure, 200_000)
    values = {"u": jnp.zeros(200_000), "v": jnp.asarray(volume)}
    expansion = observables.thermal_expansion("u", "v")
    found = expansion(values, equal(200_000), kT=kT, pressure=jnp.asarray(pressure))
    assert float(found) == pytest.approx(1.0 / kT, rel=0.02)
    exponent = -(other_pressure / other_kT - pressure / kT) * volume
    weights = jnp.asarray(np.exp(exponent - exponent.max()) / np.exp(exponent - exponent.max()).sum())
    found = expansion(values, weights, kT=other_kT, pressure=jnp.asarray(other_pressure))
    assert float(found) == pytest.approx(1.0 / other_kT, rel=0.03)
    with pytest.raises(ArgumentError, match="NPT"):
        expansion(values, weights, kT=other_kT)


def test_thermal_expansion_sees_energy_as_well_as_volume():
    # A harmonic solid whose energy leans on its volume: V = V0 + aE' with E' the energy; cov(V, U + PV) by hand.
    energy, noise = RNG.normal(size=(2, 100_000))
    volume = 10.0 + 0.3 * energy + 0.1 * noise
    found = observables.thermal_expansion("u", "v")(
        {"u": jnp.asarray(energy), "v": jnp.asarray(volume)}, equal(100_000), kT=1.5, pressure=jnp.asarray(2.0)
    )
    assert float(found) == pytest.approx((0.3 + 2.0 * (0.09 + 0.01)) / (10.0 * 1.5**2), rel=0.03)


def test_block_error_of_independent_samples_is_the_textbook_one():
    samples = RNG.normal(size=(40, 64))
    error = jax.vmap(lambda x: observables.block_standard_error("a", 8)({"a": x}, equal(64)))(jnp.asarray(samples))
    assert float(jnp.sqrt(jnp.mean(error**2))) == pytest.approx(1 / 8, rel=0.15)


def test_block_error_sees_correlation_that_single_samples_hide():
    # Every value eight times: the plain error would be too small by √8.
    samples = jnp.repeat(jnp.asarray(RNG.normal(size=(40, 32))), 8, axis=1)
    error = jax.vmap(lambda x: observables.block_standard_error("a", 8)({"a": x}, equal(256)))(samples)
    assert float(jnp.sqrt(jnp.mean(error**2))) == pytest.approx(1 / np.sqrt(32), rel=0.2)


def test_jackknife_error_of_a_mean_is_the_block_error_and_of_a_variance_the_textbook_one():
    samples = jnp.asarray(RNG.normal(size=(60, 128)))
    mean, variance = observables.average("a"), observables.fluctuation("a")

    @jax.jit
    def errors(x):
        call = {"a": x}, equal(128)
        jackknife = observables.block_jackknife_error(mean, 8)(*call)
        return (
            jackknife,
            observables.block_standard_error("a", 8)(*call),
            observables.block_jackknife_error(variance, 32)(*call),
        )

    jackknife, block, of_variance = (np.asarray(e) for e in jax.vmap(errors)(samples))
    np.testing.assert_allclose(jackknife, block, rtol=1e-4)
    # var(s²) = 2σ⁴/(n − 1) of normal samples.
    assert np.sqrt(np.mean(of_variance**2)) == pytest.approx(np.sqrt(2 / 127), rel=0.15)
    with pytest.raises(ArgumentError, match="at least 2"):
        observables.block_jackknife_error(mean, 1)
    with pytest.raises(ArgumentError, match="do not fill 9 blocks"):
        observables.block_jackknife_error(mean, 9)({"a": samples[0, :5]}, equal(5))


def test_jackknife_leaves_out_what_fills_no_block():
    # The last two of eleven snapshots belong to no block; kept, they would pull every mean together.
    samples = jnp.asarray(RNG.normal(size=11)).at[9:].add(100.0)
    error = observables.block_jackknife_error(observables.average("a"), 3)
    expected = error({"a": samples[:9]}, equal(9))
    np.testing.assert_allclose(error({"a": samples}, equal(11)), expected, rtol=1e-5)
