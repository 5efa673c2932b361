from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

from chemtrain_mpi import quantities
from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials import PairTerms, pair_energy_template, tail_energy, tail_pressure
from distmd_protocol.testkit import TOL

PARAMS = {"epsilon": jnp.asarray(1.0), "sigma": jnp.asarray(1.0)}
TERMS = PairTerms("lennard_jones", problems.CUTOFF, "none")


def snapshot(seed=0):
    position = jnp.asarray(problems.lattice(jitter=0.2, seed=seed))
    momentum = jax.random.normal(jax.random.PRNGKey(seed), position.shape, position.dtype)
    neighbor = problems.neighbor_fn().allocate(position, box=jnp.asarray(4.0))
    # Masses other than one: with them alone a formula without the mass would pass.
    mass = 1.0 + jnp.arange(27)[:, None] % 3
    return SimpleNamespace(position=position, momentum=momentum, mass=mass), neighbor


@pytest.mark.usefixtures("x64")
def test_both_pressures_are_minus_the_volume_derivative():
    state, neighbor = snapshot()
    template = pair_energy_template(TERMS)
    call = {"neighbor": neighbor, "energy_params": PARAMS, "kT": 1.3, "box": jnp.asarray(4.0)}
    by_pairs = quantities.pair_pressure(TERMS, tail=False)(state, **call)
    by_box = quantities.virial_pressure(template)(state, **call)
    h = 1e-5
    energy = [float(template(PARAMS)(state.position, neighbor, box=jnp.asarray(4.0 + s * h))) for s in (1, -1)]
    slope = (energy[0] - energy[1]) / ((4.0 + h) ** 3 - (4.0 - h) ** 3)
    expected = 27 * 1.3 / 64.0 - slope
    assert float(by_pairs) == pytest.approx(expected, rel=TOL["finite-difference-f64"])
    assert float(by_box) == pytest.approx(float(by_pairs), rel=TOL["virial-f64"])


@pytest.mark.usefixtures("x64")
def test_kinetic_part_from_momenta_and_the_tail():
    state, neighbor = snapshot()
    call = {"neighbor": neighbor, "energy_params": PARAMS, "kT": 1.3, "box": jnp.asarray(4.0)}
    bare = float(quantities.pair_pressure(TERMS, tail=False)(state, **call))
    moving = float(quantities.pair_pressure(TERMS, tail=False, kinetic="momenta")(state, **call))
    assert moving - bare == pytest.approx((float(jnp.sum(state.momentum**2 / state.mass)) / 3 - 27 * 1.3) / 64.0)
    tailed = float(quantities.pair_pressure(TERMS)(state, **call))
    assert tailed - bare == pytest.approx(float(tail_pressure(TERMS, PARAMS, 27 / 64.0)), rel=1e-10)
    with pytest.raises(ArgumentError, match="'target' or 'momenta'"):
        quantities.pair_pressure(TERMS, kinetic="both")


@pytest.mark.usefixtures("x64")
def test_energies_density_and_volume():
    state, neighbor = snapshot()
    template = pair_energy_template(TERMS)
    call = {"neighbor": neighbor, "energy_params": PARAMS, "kT": 1.3, "box": jnp.asarray(4.0)}
    total = float(quantities.potential_energy(template)(state, **call))
    each = float(quantities.pair_energy_per_particle(TERMS, template, tail=False)(state, **call))
    assert each == pytest.approx(total / 27)
    tailed = float(quantities.pair_energy_per_particle(TERMS, template)(state, **call))
    assert tailed - each == pytest.approx(float(tail_energy(TERMS, PARAMS, 27 / 64)), rel=1e-10)
    # ε = σ = 1 and one cutoff: 8π/3 ρ (r⁻⁹/3 − r⁻³), so a pair beyond the cutoff attracts.
    by_hand = 8 * np.pi / 3 * 27 / 64 * (problems.CUTOFF**-9 / 3 - problems.CUTOFF**-3)
    assert tailed - each == pytest.approx(by_hand, rel=1e-6)
    assert float(quantities.density()(state, **call)) == pytest.approx(27 / 64)
    assert float(quantities.volume()(state, box=jnp.diag(jnp.array([2.0, 3.0, 4.0])))) == pytest.approx(24.0)
    with pytest.raises(ArgumentError, match="needs the box"):
        quantities.density()(state)


def test_velocities_are_momenta_over_masses():
    state, _ = snapshot()
    np.testing.assert_allclose(quantities.velocity()(state) * state.mass, state.momentum, rtol=1e-6)


def test_rdf_of_an_ideal_gas_is_one():
    edges = np.linspace(0.1, 1.9, 13)
    quantity = quantities.radial_distribution(edges)
    rdf = jax.jit(lambda position: quantity(SimpleNamespace(position=position), box=jnp.asarray(4.0)))
    mean = np.zeros(12)
    for k in range(200):
        position = jax.random.uniform(jax.random.PRNGKey(k), (60, 3))
        mean += np.asarray(rdf(position)) / 200
    # 3.5 standard deviations of the emptiest shell's count.
    pairs = 200 * 60 * 59 / 64 * 4 / 3 * np.pi * np.diff(edges**3)
    assert np.all(np.abs(mean - 1.0) < 3.5 * np.sqrt(2 / pairs))


def test_rdf_equals_all_pairs_and_images():
    position = np.random.default_rng(0).uniform(size=(20, 3))
    box = np.array([[4.0, 0.5, 0.0], [0.0, 4.2, 0.3], [0.0, 0.0, 4.4]])
    edges = np.linspace(0.0, 1.8, 10)
    distances = []
    for i in range(20):
        for j in range(20):
            for n in np.ndindex(3, 3, 3):
                d = np.linalg.norm(box @ (position[i] - position[j] + np.array(n) - 1))
                if i != j:
                    distances.append(d)
    counts = np.histogram(distances, edges)[0]
    ideal = 20 * 19 / np.linalg.det(box) * 4 / 3 * np.pi * np.diff(edges**3)
    found = quantities.radial_distribution(edges)(SimpleNamespace(position=jnp.asarray(position)), box=jnp.asarray(box))
    np.testing.assert_allclose(found, counts / ideal, rtol=1e-4)


def test_senseless_edges_are_refused():
    with pytest.raises(ArgumentError, match="increasing"):
        quantities.radial_distribution([1.0, 0.5])
