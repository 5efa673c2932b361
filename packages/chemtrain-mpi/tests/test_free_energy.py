import harmonic
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from scipy.optimize import brentq
from scipy.special import expit

from chemtrain_mpi import free_energy, reweighting
from chemtrain_mpi.errors import ArgumentError, NonFiniteError
from distmd_protocol import CheckpointError, RankError


def oscillators(seed, kT, k, wanted, samples, dof=6):
    """``β(U_1 − U_0)`` on exact samples of ``U_0 = k x²/2``, where ``U_1`` has the stiffness ``wanted``."""
    x = np.random.default_rng(seed).normal(scale=(kT / k) ** 0.5, size=(samples, dof))
    return 0.5 * (wanted - k) * np.sum(x**2, axis=1) / kT


@pytest.mark.parametrize(("forward", "reverse"), [(20_000, 20_000), (5_000, 40_000)])
def test_acceptance_ratio_of_harmonic_oscillators_is_the_analytic_difference(forward, reverse):
    kT, old, new = 0.7, 2.0, 3.5
    there = oscillators(0, kT, old, new, forward)
    back = -oscillators(1, kT, new, old, reverse)
    difference, error = free_energy.acceptance_ratio(there, back)
    # 6 degrees of freedom: β ΔF = 6/2 ln(k_1/k_0).
    assert error < 0.02
    assert abs(difference - 3.0 * np.log(new / old)) < 4.0 * error


def test_its_error_is_the_scatter_of_many_repeats():
    pairs = [(oscillators(2 * s, 1.0, 1.0, 1.6, 300), -oscillators(2 * s + 1, 1.0, 1.6, 1.0, 300)) for s in range(200)]
    results = np.array([free_energy.acceptance_ratio(*pair) for pair in pairs])
    assert np.std(results[:, 0]) == pytest.approx(np.mean(results[:, 1]), rel=0.2)
    assert np.mean(results[:, 0]) == pytest.approx(3.0 * np.log(1.6), abs=4 * np.std(results[:, 0]) / 200**0.5)


def test_forward_and_backward_are_consistent():
    there, back = oscillators(3, 1.0, 1.0, 1.4, 500), -oscillators(4, 1.0, 1.4, 1.0, 700)
    forward, error = free_energy.acceptance_ratio(there, back)
    backward, same = free_energy.acceptance_ratio(-back, -there)
    assert forward == pytest.approx(-backward, abs=1e-12)
    assert error == pytest.approx(same, rel=1e-9)


def test_the_root_is_that_of_another_solver():
    rng = np.random.default_rng(5)
    there, back = rng.normal(1.0, 2.0, 40), rng.normal(-1.5, 2.0, 90)
    m = np.log(40 / 90)
    expected = brentq(lambda d: np.sum(expit(-(m + there - d))) - np.sum(expit(-(d - m - back))), -30, 30, xtol=1e-13)
    assert free_energy.acceptance_ratio(there, back)[0] == pytest.approx(expected, abs=1e-11)


def test_equal_potentials_differ_by_nothing_and_a_constant_by_itself():
    assert free_energy.acceptance_ratio(np.zeros(8), np.zeros(8)) == (0.0, 0.0)
    assert free_energy.acceptance_ratio(np.full(5, 800.0), np.full(8, 800.0))[0] == pytest.approx(800.0, abs=1e-12)


def test_a_record_adds_difference_and_variance_in_the_energy_unit():
    # Bounds of a few errors, as in the tests of whole trainings, do not see a variance that is too small.
    kT, params = 0.7, {"k": 3.5}
    there, back = oscillators(8, kT, 2.0, 3.5, 40), -oscillators(9, kT, 3.5, 2.0, 60)
    difference, error = free_energy.acceptance_ratio(there, back)
    before = free_energy.FreeEnergyRecord({"k": 2.0}, np.array([1.5, 0.2, 0.3]))
    after = free_energy.next_record(before, params, kT, kT * there, kT * back)
    assert after.params is params
    np.testing.assert_allclose(after.values, [1.5 + kT * difference, 0.2 + (kT * error) ** 2, 0.3], rtol=1e-10)


def test_differences_count_from_the_trajectories_that_training_begins_with():
    # Of several first runs that is the last one: the others are for equilibration, and their mean energy is another.
    trainer = harmonic.trainer(snapshots=20, free_energies=True)
    trainer.initialize_trajstates(num_runs=2)
    predicted = trainer.predict()
    np.testing.assert_allclose(predicted["free_energy"], 0.0, atol=1e-4)
    np.testing.assert_allclose(predicted["entropy"], 0.0, atol=1e-4)


def test_energies_that_are_not_finite_and_no_energies_are_refused():
    with pytest.raises(NonFiniteError):
        free_energy.acceptance_ratio(np.array([0.0, np.nan]), np.zeros(2))
    with pytest.raises(ArgumentError, match="0 snapshots"):
        free_energy.acceptance_ratio(np.zeros(0), np.zeros(2))


@pytest.mark.usefixtures("x64")
def test_one_sided_average_of_oscillators_and_its_poison():
    x = -jnp.asarray(oscillators(6, 1.0, 1.0, 1.1, 200_000, dof=1))
    assert float(reweighting.log_mean_exp(x)) == pytest.approx(-0.5 * np.log(1.1), abs=1e-3)
    assert np.isnan(reweighting.log_mean_exp(x.at[3].set(jnp.inf)))


@pytest.mark.usefixtures("x64")
def test_gradient_of_the_free_energy_is_the_mean_derivative_of_the_energy():
    kT, start, here = 0.6, 2.0, 2.1
    x = jnp.asarray(np.random.default_rng(7).normal(scale=(kT / start) ** 0.5, size=4000))

    def predicted(k):
        energy = 0.5 * k * x**2
        exponent = reweighting.exponents(energy, 0.5 * start * x**2, kT, kT)
        values = jnp.array([1.5, 0.0, 0.3])
        return free_energy.predictions(values, exponent, reweighting.weights(exponent), energy, kT)

    value, slope = jax.jit(predicted)(here), jax.jit(jax.jacfwd(predicted))(here)
    weights = np.exp(-0.5 * (here - start) * np.asarray(x) ** 2 / kT)
    expected = np.sum(weights * 0.5 * np.asarray(x) ** 2) / np.sum(weights)
    assert float(slope["free_energy"]) == pytest.approx(expected, rel=1e-10)
    assert float(slope["free_energy"]) == pytest.approx(0.5 * kT / here, rel=0.1)
    h = 1e-5
    above, below = jax.jit(predicted)(here + h), jax.jit(predicted)(here - h)
    for name in ("free_energy", "entropy"):
        assert float(slope[name]) == pytest.approx(float(above[name] - below[name]) / (2 * h), rel=1e-6)
    assert float(value["entropy"]) == pytest.approx(
        (np.sum(weights * 0.5 * here * np.asarray(x) ** 2) / np.sum(weights) - 0.3 - float(value["free_energy"])) / kT
    )


@pytest.fixture(scope="module")
def stiffened():
    """Trained to a free energy that only one stiffness has; NVT, both temperatures alike in ``k``."""
    wanted = harmonic.free_energy({"k": 60.0, "v": 64.0}, np.array([1.0, 1.5]))
    trainer = harmonic.trainer(
        optimizer=optax.sgd(0.8),
        reweight_ratio=0.97,
        init_params={"k": jnp.asarray(40.0), "v": jnp.asarray(64.0)},
        targets={"free_energy": {"target": jnp.asarray(wanted), "gamma": jnp.ones(2)}},
        free_energies=True,
        num_chains=2,
    )
    trainer.initialize_trajstates()
    trainer.train(25)
    return trainer


def test_training_on_a_free_energy_finds_the_stiffness_that_has_it(stiffened):
    assert float(stiffened.params["k"]) == pytest.approx(60.0, rel=0.02)
    recomputed = sum(len(entry["recomputed"]) for entry in stiffened.history)
    assert recomputed >= 6, "BAR between few trajectories says little"


def test_predicted_differences_are_the_analytic_ones_within_their_error(stiffened):
    predicted, kT = stiffened.predict(), np.array([1.0, 1.5])
    expected = harmonic.free_energy(stiffened.params, kT)
    variance = np.array([t.free_energy.values[1] for t in stiffened.trajectories])
    assert np.all(variance > 0.0)
    # The last step, from the trajectory to the present parameters, has an error of the same size as the others.
    error = np.sqrt(variance) + kT * 0.05
    np.testing.assert_array_less(np.abs(predicted["free_energy"] - expected), 4 * error)
    # Equipartition: the mean energy does not change, so T ΔS = −ΔF. Its error is that of two means over 120 snapshots.
    spread = 2.0 * np.sqrt(harmonic.DOF / 2 / 120)
    np.testing.assert_array_less(np.abs(predicted["entropy"] + expected / kT), 4 * (error / kT + spread))


def test_entropy_is_energy_less_free_energy_over_temperature(stiffened):
    predicted = stiffened.predict()
    start = np.array([t.free_energy.values[2] for t in stiffened.trajectories])
    by_hand = (predicted["energy"] - start - predicted["free_energy"]) / np.array([1.0, 1.5])
    np.testing.assert_allclose(predicted["entropy"], by_hand, rtol=1e-3, atol=1e-3)


# Energy at the first state point, volume at the second.
GAMMA = {"energy": np.array([1.0, 0.0]), "volume": np.array([0.0, 2.0])}
GIBBS = {
    "moving": True,
    "snapshots": 400,
    "free_energies": True,
    "reweight_ratio": 0.97,
    "targets": {name: {"target": jnp.array([3.0, 70.0]), "gamma": jnp.asarray(each)} for name, each in GAMMA.items()},
    # No training: the parameters go their own way, stiffness and volume alike.
    "optimizer": optax.stateless(lambda updates, params: {"k": jnp.asarray(1.5), "v": jnp.asarray(0.4)}),
}
PRESSURE, KT = np.array([0.3, 0.5]), np.array([1.0, 1.5])


@pytest.fixture(scope="module")
def gibbs(tmp_path_factory):
    """At constant pressure: predictions at the start, a trainer after six updates, and its checkpoint after three."""
    trainer = harmonic.trainer(**GIBBS)
    trainer.initialize_trajstates()
    start = trainer.predict()
    trainer.train(3)
    path = trainer.save(tmp_path_factory.mktemp("gibbs") / "c")
    trainer.train(3)
    assert sum(len(entry["recomputed"]) for entry in trainer.history) >= 6
    return start, trainer, path


def test_free_energies_at_constant_pressure_are_gibbs_energies(gibbs):
    start, trainer, _ = gibbs
    predicted = trainer.predict()
    expected = harmonic.free_energy(trainer.params, KT, PRESSURE)
    variance = np.array([t.free_energy.values[1] for t in trainer.trajectories])
    np.testing.assert_array_less(np.abs(predicted["free_energy"] - expected), 4 * (np.sqrt(variance) + 0.03))
    # Without the volume's share it would be off by far more.
    assert np.all(PRESSURE * (float(trainer.params["v"]) - 64.0) > 6 * (np.sqrt(variance) + 0.03))
    change = predicted["energy"] - start["energy"] + PRESSURE * (predicted["volume"] - start["volume"])
    by_hand = (change - predicted["free_energy"]) / KT
    np.testing.assert_allclose(predicted["entropy"], by_hand, rtol=1e-3, atol=2e-3)


def test_free_energies_resume_bit_for_bit_and_only_with_them(gibbs):
    _, whole, path = gibbs
    resumed = harmonic.trainer(**GIBBS)
    resumed.restore(path)
    resumed.train(3)
    records = [[(t.free_energy.params, t.free_energy.values) for t in x.trajectories] for x in (whole, resumed)]
    assert problems.bits(records[0]) == problems.bits(records[1])
    assert problems.bits(whole.predict()) == problems.bits(resumed.predict())
    plain = harmonic.trainer(**{**GIBBS, "free_energies": False})
    with pytest.raises(CheckpointError, match="free_energies=True and this trainer has free_energies=False"):
        plain.restore(path)


def test_predictions_at_another_pressure_and_temperature_are_the_analytic_ones(gibbs):
    start, trainer, _ = gibbs
    np.testing.assert_allclose(start["volume"], 64.0 - PRESSURE / harmonic.C, atol=0.35)
    kT, pressure = np.array([1.2, 1.3]), np.array([0.6, 0.2])
    there = trainer.predict(state_kwargs={"kT": jnp.asarray(kT), "pressure": jnp.asarray(pressure)})
    rest = float(trainer.params["v"])
    np.testing.assert_allclose(there["volume"], rest - pressure / harmonic.C, atol=0.4)
    mean = (harmonic.DOF + 1) * kT / 2 + pressure**2 / (2 * harmonic.C)
    np.testing.assert_allclose(there["energy"], mean, rtol=0.07)
    assert not {"free_energy", "entropy"} & set(there)
    # At the same temperature the Gibbs energy is known at another pressure too: ∂G/∂P = ⟨V⟩.
    pressed = trainer.predict(state_kwargs={"pressure": jnp.asarray(pressure)})
    change = (pressure - PRESSURE) * rest - (pressure**2 - PRESSURE**2) / (2 * harmonic.C)
    np.testing.assert_allclose(pressed["free_energy"] - trainer.predict()["free_energy"], change, atol=0.15)
    # And the entropy, from the enthalpy at that pressure.
    enthalpy = pressed["energy"] + pressure * pressed["volume"] - start["energy"] - PRESSURE * start["volume"]
    np.testing.assert_allclose(pressed["entropy"], (enthalpy - pressed["free_energy"]) / KT, rtol=1e-3, atol=2e-3)


def test_every_target_has_a_weight_of_its_own_at_every_state_point(gibbs):
    start, trainer, _ = gibbs
    losses = trainer.history[0]["losses"]
    assert losses["0"] == pytest.approx((start["energy"][0] - 3.0) ** 2, rel=1e-4)
    assert losses["1"] == pytest.approx(2.0 * (start["volume"][1] - 70.0) ** 2, rel=1e-4)


def test_reserved_names_and_the_missing_option_are_refused():
    target = {"entropy": {"target": jnp.zeros(2), "gamma": jnp.ones(2)}}
    with pytest.raises(RankError, match="set free_energies=True"):
        harmonic.trainer(targets=target)
    with pytest.raises(RankError, match="give these observables other names"):
        harmonic.trainer(observables={"entropy": lambda *_, **__: 0.0}, targets=target, free_energies=True)
