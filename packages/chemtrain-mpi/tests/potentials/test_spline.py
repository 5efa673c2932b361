import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.interpolate import CubicSpline

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials import PairTerms, spline
from distmd_protocol.testkit import TOL

KNOTS = np.array([0.5, 0.62, 0.9, 1.3, 1.45, 2.0])
TABLES = np.random.default_rng(0).normal(size=(3, KNOTS.size))


def spline_at(r, kind=1):
    curvature = spline.second_derivatives(jnp.asarray(KNOTS), jnp.asarray(TABLES))
    return spline.evaluate(jnp.asarray(r), jnp.asarray(KNOTS), jnp.asarray(TABLES), curvature, kind)


@pytest.mark.usefixtures("x64")
def test_is_the_natural_cubic_spline():
    r = np.linspace(0.5, 2.0, 101)
    kind = np.arange(101) % 3
    expected = np.stack([CubicSpline(KNOTS, table, bc_type="natural")(r) for table in TABLES])[kind, np.arange(101)]
    np.testing.assert_allclose(spline_at(r, kind), expected, rtol=TOL["energy-f64"], atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_straight_lines_beyond_the_ends():
    natural = CubicSpline(KNOTS, TABLES[1], bc_type="natural")
    for end, r in ((0.5, 0.1), (2.0, 2.7)):
        assert float(spline_at(r)) == pytest.approx(natural(end) + natural(end, 1) * (r - end), rel=1e-12)


@pytest.mark.usefixtures("x64")
def test_gradient_by_the_table_is_that_of_differences():
    curvature = spline.second_derivatives

    def total(tables):
        r = jnp.asarray([0.3, 0.55, 1.0, 1.9])
        knots = jnp.asarray(KNOTS)
        return jnp.sum(jnp.sin(spline.evaluate(r, knots, tables, curvature(knots, tables), 2)))

    gradient, h = jax.grad(total)(jnp.asarray(TABLES)), 1e-6
    for m in range(KNOTS.size):
        up, down = (total(jnp.asarray(TABLES).at[2, m].add(s * h)) for s in (1, -1))
        assert float(gradient[2, m]) == pytest.approx(float(up - down) / (2 * h), rel=1e-6, abs=1e-9)


def test_a_cutoff_at_the_last_knot_is_fine_in_float32():
    spline.check_knots(np.array([0.3, 0.6, 0.9], np.float32), 0.9)
    with pytest.raises(ArgumentError, match="beyond the last knot"):
        spline.check_knots(np.array([0.3, 0.6, 0.9 * (1 - 5e-7)]), 0.9)


@pytest.mark.parametrize(
    ("knots", "cutoff", "says"),
    [
        ([1.0, 2.0], 2.0, "at least 3"),
        ([1.0, 1.0, 2.0], 2.0, "strictly increasing"),
        ([0.0, 1.0, 2.0], 2.0, "positive"),
        ([1.0, 1.5, 2.0], 2.5, "beyond the last knot"),
    ],
)
def test_senseless_knots_are_refused(knots, cutoff, says):
    with pytest.raises(ArgumentError, match=says):
        spline.check_knots(np.array(knots), cutoff)
    with pytest.raises(ArgumentError, match=says):
        PairTerms("tabulated_pair", cutoff).prepare({"r": np.array(knots), "energy": np.zeros(len(knots))})
    with pytest.raises(ArgumentError, match=says):
        # The values of NumPy knots are known inside a traced function too, until they are converted.
        jax.jit(lambda e: PairTerms("tabulated_pair", cutoff).prepare({"r": np.array(knots), "energy": e}))(
            jnp.zeros(len(knots))
        )


@pytest.mark.parametrize("knots", [[1.0, 1.0, 2.0], [0.0, 1.0, 2.0], [1.0, 1.5, 1.99], [1.0, np.inf, 2.0]])
def test_senseless_traced_knots_make_every_energy_nan(knots):
    terms, r2 = PairTerms("tabulated_pair", 2.0), jnp.asarray([0.5, 1.7, 3.9])

    @jax.jit
    def energies(r):
        return terms.energy(r2, terms.prepare({"r": r, "energy": jnp.ones(3)}), 0)

    assert np.all(np.isnan(energies(jnp.asarray(knots))))
    np.testing.assert_allclose(energies(jnp.asarray([1.0, 1.5, 2.0])), 1.0)
