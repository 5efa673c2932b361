import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials import PairTerms, tail_energy, tail_pressure
from distmd_protocol.testkit import TOL

pytestmark = pytest.mark.once

PARAMS = {
    "lennard_jones": {"epsilon": 1.1, "sigma": 0.9},
    "mie": {"epsilon": 1.1, "sigma": 0.9, "n": 13.2, "m": 6.4},
    "morse": {"epsilon": 1.1, "r0": 1.0, "alpha": 4.0},
}
KNOTS = np.linspace(0.7, 2.6, 20)
TABLE = {"r": KNOTS, "energy": 4 * 1.1 * ((0.9 / KNOTS) ** 12 - (0.9 / KNOTS) ** 6)}


def phi(family, r, smoothing="none", cutoff=2.5):
    terms = PairTerms(family, cutoff, smoothing)
    params = TABLE if family == "tabulated_pair" else PARAMS[family]
    return terms.energy(jnp.asarray(r) ** 2, terms.prepare(params), 0)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("family", "minimum"),
    [("lennard_jones", 0.9 * 2 ** (1 / 6)), ("mie", 0.9 * (13.2 / 6.4) ** (1 / 6.8)), ("morse", 1.0)],
)
def test_depth_and_place_of_the_minimum(family, minimum):
    assert float(phi(family, minimum)) == pytest.approx(-1.1, rel=1e-12)
    assert float(jax.grad(lambda r: phi(family, r))(minimum)) == pytest.approx(0.0, abs=1e-11)


@pytest.mark.usefixtures("x64")
def test_mie_with_12_and_6_is_lennard_jones():
    r = np.linspace(0.8, 2.0, 9)
    terms = PairTerms("mie", 2.5)
    mie = terms.energy(jnp.asarray(r**2), terms.prepare({**PARAMS["lennard_jones"], "n": 12.0, "m": 6.0}), 0)
    np.testing.assert_allclose(mie, phi("lennard_jones", r), rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("family", [*PARAMS, "tabulated_pair"])
def test_shift_is_zero_at_the_cutoff_and_leaves_the_slope(family):
    assert float(phi(family, 2.5, "shift")) == pytest.approx(0.0, abs=1e-15)
    r = np.linspace(0.6, 2.4, 13)
    slopes = [jax.vmap(jax.grad(lambda x, s=s: phi(family, x, s)))(jnp.asarray(r)) for s in ("none", "shift")]
    np.testing.assert_array_equal(*slopes)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("family", [*PARAMS, "tabulated_pair"])
def test_slope_is_the_derivative_by_the_squared_distance(family):
    terms = PairTerms(family, 2.5)
    coefficients = terms.prepare(TABLE if family == "tabulated_pair" else PARAMS[family])
    r2, h = np.linspace(0.4, 6.0, 15), 1e-6
    difference = [terms.energy(jnp.asarray(r2 + s * h), coefficients, 0) for s in (1, -1)]
    expected = np.subtract(*map(np.asarray, difference)) / (2 * h)
    found = terms.slope(jnp.asarray(r2), coefficients, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("family", list(PARAMS))
@pytest.mark.parametrize("smoothing", ["none", "shift"])
def test_tails_are_the_integrals(family, smoothing):
    rho, cutoff = 0.7, 1.8
    terms = PairTerms(family, cutoff, smoothing)
    inside = float(phi(family, cutoff)) * cutoff**3 / 3 if smoothing == "shift" else 0.0
    energy = quad(lambda r: float(phi(family, r)) * r * r, cutoff, np.inf, epsabs=1e-13, limit=200)[0] + inside
    assert float(tail_energy(terms, PARAMS[family], rho)) == pytest.approx(2 * np.pi * rho * energy, rel=1e-5)
    slope = jax.jit(jax.grad(lambda r: phi(family, r)))
    virial = quad(lambda r: float(slope(r)) * r**3, cutoff, np.inf, epsabs=1e-13, limit=200)[0]
    expected = -2 / 3 * np.pi * rho**2 * virial
    assert float(tail_pressure(terms, PARAMS[family], rho)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.usefixtures("x64")
def test_tail_of_a_mixture_of_two_names_for_one_species():
    full = {name: np.full((2, 2), value) for name, value in PARAMS["mie"].items()}
    terms = PairTerms("mie", 2.0)
    one, two = tail_energy(terms, PARAMS["mie"], 0.6), tail_energy(terms, full, 0.6, (0.3, 0.7))
    assert float(two) == pytest.approx(float(one), rel=TOL["energy-f64"])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: PairTerms("buckingham", 1.0), "known: lennard_jones"),
        (lambda: PairTerms("mie", 0.0), "must be positive"),
        (lambda: PairTerms("mie", 1.0, "switch"), "use one of none, shift"),
        (lambda: PairTerms("mie", 1.0).prepare(PARAMS["lennard_jones"]), "missing: n, m"),
        (lambda: PairTerms("lennard_jones", 1.0).prepare(PARAMS["mie"]), "unknown: n, m"),
        (lambda: tail_energy(PairTerms("tabulated_pair", 2.5), TABLE, 1.0), "no tail correction"),
        (lambda: tail_energy(PairTerms("mie", 2.5), PARAMS["mie"], 1.0, (0.5, 0.5)), "2 mole fractions"),
    ],
)
def test_refusals_name_the_remedy(call, says):
    with pytest.raises(ArgumentError, match=says):
        call()
