"""Elastic constants by stress fluctuations, against crystals whose constants are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from crystals import DIAMOND, FCC, crystal, harmonic_sample, neighbors, snapshot

from chemtrain_mpi import observables, quantities
from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials import SILICON, stillinger_weber_template
from chemtrain_mpi.quantities.strain import deformation

pytestmark = pytest.mark.once


def equal(n):
    return jnp.full(n, 1.0 / n)


def springs(reach):
    """Nearest-neighbour springs of strength ``k`` and length ``r0`` over all pairs nearer than ``reach``."""

    def template(params):
        def energy_fn(position, neighbor=None, box=None, **_):
            raw = position[:, None] - position[None]
            raw = raw - jnp.round(raw)
            h = box if jnp.ndim(box) == 2 else jnp.diag(jnp.broadcast_to(box, (3,)))
            r2 = jnp.sum((raw @ h.T) ** 2, axis=-1)
            bond = (r2 < reach**2) & ~jnp.eye(len(position), dtype=bool)
            r = jnp.sqrt(jnp.where(bond, r2, 1.0))
            return 0.25 * params["k"] * jnp.sum(jnp.where(bond, (r - params["r0"]) ** 2, 0.0))

        return energy_fn

    return template


def series(template, params, positions, box, neighbor=None, **kwargs):
    """Stress and stiffness of every configuration."""
    stress, stiffness = quantities.born_stress(template), quantities.born_stiffness(template)

    @jax.jit
    def all_of(positions):
        def one(position):
            call = {"neighbor": neighbor, "energy_params": params, "box": box, **kwargs}
            return {"s": stress(snapshot(position), **call), "c": stiffness(snapshot(position), **call)}

        return jax.lax.map(one, positions, batch_size=16)

    return all_of(jnp.asarray(positions))


@pytest.mark.usefixtures("x64")
def test_born_terms_are_derivatives_of_the_energy_by_lagrangian_strain():
    # A finite strain F = (1 + 2η)^½ by eigenvalues, second differences of the energy, on a disordered crystal.
    rng = np.random.default_rng(0)
    position = jnp.asarray(crystal(FCC, 2) + rng.normal(scale=0.01, size=(32, 3)))
    box, params = jnp.diag(jnp.array([3.0, 3.1, 2.9])), {"k": 2.0, "r0": 1.0}
    template = springs(1.3)
    found = series(template, params, position[None], box)
    energy = jax.jit(lambda h: template(params)(position, box=h))

    def at(voigt):
        xx, yy, zz, yz, xz, xy = voigt
        eta = np.array([[xx, xy / 2, xz / 2], [xy / 2, yy, yz / 2], [xz / 2, yz / 2, zz]])
        values, vectors = np.linalg.eigh(np.eye(3) + 2 * eta)
        return float(energy(jnp.asarray(vectors * np.sqrt(values) @ vectors.T) @ box))

    h, unit, volume = 1e-4, np.eye(6), float(jnp.linalg.det(box))
    for i, j in ((0, 0), (0, 1), (3, 3), (2, 4), (5, 5)):
        first = (at(h * unit[i]) - at(-h * unit[i])) / (2 * h * volume)
        a, b = h * unit[i], h * unit[j]
        second = (at(a + b) - at(a - b) - at(b - a) + at(-a - b)) / (4 * h * h * volume)
        assert float(found["s"][0, i]) == pytest.approx(first, rel=1e-6)
        assert float(found["c"][0, i, j]) == pytest.approx(second, rel=1e-4, abs=1e-5)


@pytest.mark.usefixtures("x64")
def test_harmonic_crystal_has_its_analytic_constants():
    # Springs at rest length on the fcc lattice: C11 = 2k/a, C12 = C44 = k/a, no internal relaxation; kT → 0.
    k, a, kT = 2.0, np.sqrt(2.0), 1e-7
    edge = 2 * a
    position = jnp.asarray(crystal(FCC, 2))
    params, template = {"k": k, "r0": 1.0}, springs(1.2)
    sample = harmonic_sample(lambda r: template(params)(r, box=jnp.asarray(edge)), position, edge, kT, 40)
    values = series(template, params, sample, jnp.asarray(edge))
    call = {"kT": kT, "box": jnp.asarray(edge)}
    matrix = observables.elastic_constants("s", "c", 32)(values, equal(40), **call)
    expected = np.diag([2.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    expected[:3, :3] += 1.0 - np.eye(3)
    np.testing.assert_allclose(matrix, expected * k / a, atol=2e-3)
    stress = observables.mean_stress("s", 32)(values, equal(40), **call)
    np.testing.assert_allclose(stress, np.zeros(6), atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_einstein_crystal_resists_no_strain_and_shows_no_stress():
    # Each particle on a spring to a site that moves with the box: the free energy does not depend on the strain, so the
    # Born (zero), fluctuation and kinetic terms cancel. Exact at any temperature.
    n, k, kT, edge, count = 20, 3.0, 0.7, 5.0, 4000
    rng = np.random.default_rng(1)
    sites = rng.uniform(size=(n, 3))
    positions = sites + rng.normal(scale=np.sqrt(kT / k), size=(count, n, 3)) / edge

    def template(params):
        def energy_fn(position, neighbor=None, box=None, **_):
            return 0.5 * params["k"] * jnp.sum(((position - sites) @ box.T) ** 2)

        return energy_fn

    values = series(template, {"k": k}, positions, jnp.asarray(edge))
    call = {"kT": kT, "box": jnp.asarray(edge)}
    unit = n * kT / edge**3
    fluctuation = observables.stress_fluctuation("s")(values, equal(count), **call)
    assert float(fluctuation[0, 0]) == pytest.approx(2 * unit, rel=0.1), "no term is small"
    matrix = observables.elastic_constants("s", "c", n)(values, equal(count), **call)
    np.testing.assert_allclose(matrix, np.zeros((6, 6)), atol=0.15 * unit)
    stress = observables.mean_stress("s", n)(values, equal(count), **call)
    np.testing.assert_allclose(stress, np.zeros(6), atol=0.03 * unit)


SILICON_EDGE = 2 * 5.431


def silicon():
    position = jnp.asarray(crystal(DIAMOND, 2))
    neighbor = neighbors(position, SILICON_EDGE, 4.2)
    template, params = stillinger_weber_template(3.77118), {name: jnp.asarray(v) for name, v in SILICON.items()}
    edge = SILICON_EDGE
    sample = harmonic_sample(lambda r: template(params)(r, neighbor, box=edge), position, SILICON_EDGE, 1e-5, 300)
    return template, params, neighbor, sample


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_silicon_relaxes_as_published():
    # C44 of diamond needs the fluctuation term: half of the Born term is relaxation of the two sublattices.
    template, params, neighbor, sample = silicon()
    values = series(template, params, sample, jnp.asarray(SILICON_EDGE), neighbor)
    call = {"kT": 1e-5, "box": jnp.asarray(SILICON_EDGE)}
    constants = observables.cubic(observables.elastic_constants("s", "c", 64))
    gpa = 160.2176634
    found = np.asarray(constants(values, equal(300), **call)) * gpa
    # Cowley, Phys. Rev. Lett. 60, 2379 (1988): 151.4, 76.4, 56.4 GPa.
    assert found[0] == pytest.approx(151.4, rel=0.005)
    assert found[1] == pytest.approx(76.4, rel=0.005)
    error = float(observables.block_jackknife_error(constants, 30)(values, equal(300), **call)[2]) * gpa
    assert 1.0 < error < 5.0
    assert found[2] == pytest.approx(56.4, abs=3.5 * error)
    # By hand, bonds and angles as springs in series: C44 = 9Px / (P + 4x), unrelaxed P + x.
    bonds, angles = (151.4 + 2 * 76.4) / 3, (151.4 - 76.4) / 9
    assert found[2] == pytest.approx(9 * bonds * angles / (bonds + 4 * angles), abs=3.5 * error)
    born = float(observables.cubic_means(jnp.mean(values["c"], axis=0))[2]) * gpa
    assert born == pytest.approx(bonds + angles, rel=0.005)


@pytest.mark.usefixtures("x64")
def test_constants_can_be_differentiated_through_quantities_and_weights():
    position, box, kT = crystal(FCC, 2), jnp.asarray(2 * np.sqrt(2.0)), 0.1
    positions = jnp.asarray(position + np.random.default_rng(3).normal(scale=0.02, size=(6, 32, 3)))
    constants = observables.cubic(observables.elastic_constants("s", "c", 32))
    template = springs(1.3)
    stress, stiffness = quantities.born_stress(template), quantities.born_stiffness(template)

    def reweighted(k):
        params = {"k": k, "r0": 0.95}

        def one(position):
            call = {"neighbor": None, "energy_params": params, "box": box}
            energy = template(params)(position, box=box)
            return energy, {"s": stress(snapshot(position), **call), "c": stiffness(snapshot(position), **call)}

        energy, values = jax.lax.map(one, positions)
        return constants(values, jax.nn.softmax(-0.1 * energy / kT), kT=kT, box=box)

    value, h = jax.jit(reweighted), 1e-5
    expected = (value(2.0 + h) - value(2.0 - h)) / (2 * h)
    np.testing.assert_allclose(jax.jit(jax.jacrev(reweighted))(2.0), expected, rtol=1e-5)


def test_cubic_means_take_what_symmetry_makes_equal():
    matrix = jnp.asarray(np.arange(36.0).reshape(6, 6))
    matrix = matrix + matrix.T
    expected = [np.mean([0, 14, 28]), np.mean([7, 14, 21]), np.mean([42, 56, 70])]
    np.testing.assert_allclose(observables.cubic_means(matrix), expected)


def test_deformation_is_the_root_to_second_order():
    strain = np.array([1e-3, -2e-3, 5e-4, 2e-3, 1e-3, -1e-3])
    f = np.asarray(deformation(jnp.asarray(strain)), np.float64)
    xx, yy, zz, yz, xz, xy = strain
    eta = np.array([[xx, xy / 2, xz / 2], [xy / 2, yy, yz / 2], [xz / 2, yz / 2, zz]])
    np.testing.assert_allclose(0.5 * (f.T @ f - np.eye(3)), eta, atol=1e-7)


def test_constants_need_a_fixed_box():
    values = {"s": jnp.zeros((3, 6)), "c": jnp.zeros((3, 6, 6))}
    constants = observables.elastic_constants("s", "c", 4)
    with pytest.raises(ArgumentError, match="without a barostat"):
        constants(values, equal(3), kT=1.0, box=2.0, pressure=1.0)
    with pytest.raises(ArgumentError, match="need the box"):
        constants(values, equal(3), kT=1.0)
