"""Pair sums on jax-md's lists: against finite differences, against the image sum, and safe against padding."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_md import energy as jax_md_energy
from jax_md import partition, space

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials import PairTerms, check_box, evaluate, pair_energy_template, pair_virial
from distmd_protocol import Potential, Units
from distmd_protocol.testkit import TOL

EDGES = np.array([2.9, 2.7, 3.1])
BOX = np.array([[3.0, 0.4, 0.2], [0.0, 2.8, -0.3], [0.0, 0.0, 2.9]])
CUTOFF = 1.2
SPECIES = [0, 1] * 15
KNOTS = np.linspace(0.3, 1.3, 25)
PAIRS = np.array([[1.0, 0.8], [0.8, 1.3]])
PARAMS = {
    "lennard_jones": {"epsilon": PAIRS, "sigma": 0.3 * PAIRS**0.1},
    "mie": {"epsilon": PAIRS, "sigma": 0.3 * PAIRS**0.1, "n": 11.0 + PAIRS, "m": 5.5 + 0.1 * PAIRS},
    "morse": {"epsilon": PAIRS, "r0": 0.34 * PAIRS**0.1, "alpha": 8.0 + PAIRS},
    "tabulated_pair": {"r": KNOTS, "energy": PAIRS[:, :, None] * np.exp(-4 * KNOTS) * np.cos(5 * KNOTS)},
}
FAMILIES = list(PARAMS)


@cache
def system(tilted=True, seed=0, n=30):
    """Positions that keep their distance, and a list with plenty of padding."""
    rng = np.random.default_rng(seed)
    cells = np.stack(np.meshgrid(*[np.arange(4)] * 3, indexing="ij"), -1).reshape(-1, 3)
    fractional = (rng.permutation(cells)[:n] + 0.5 + rng.uniform(-0.25, 0.25, (n, 3))) / 4
    position, box = jnp.asarray(fractional), BOX if tilted else np.diag(EDGES)
    displacement, _ = space.periodic_general(jnp.asarray(box), fractional_coordinates=True)
    lists = partition.neighbor_list(
        displacement, jnp.asarray(box), CUTOFF, 0.1, 1.5, fractional_coordinates=True, disable_cell_list=True
    )
    return position, lists.allocate(position, box=jnp.asarray(box))


def parameters(family):
    return jax.tree.map(jnp.asarray, PARAMS[family])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("family", FAMILIES)
def test_energy_forces_and_virial_equal_the_image_sum_in_a_tilted_box(family):
    position, neighbor = system()
    terms = PairTerms(family, CUTOFF, "shift")

    @jax.jit
    def ours(params):
        energy_fn = pair_energy_template(terms, species=SPECIES)(params)
        energy, gradient = jax.value_and_grad(energy_fn)(position, neighbor, box=jnp.asarray(BOX))
        return energy, gradient, pair_virial(terms, params, position, neighbor, jnp.asarray(BOX), species=SPECIES)

    energy, gradient, virial = ours(parameters(family))
    artefact = Potential(family, ("A", "B"), np.ones(2), PARAMS[family], CUTOFF, "shift", False, Units.METAL)
    # jax-md's columns are the lattice vectors; the artefact's rows are.
    expected = evaluate(artefact, np.asarray(position) @ BOX.T, BOX.T, SPECIES)
    assert float(energy) == pytest.approx(expected.energy, rel=TOL["energy-f64"])
    scale = np.abs(expected.forces).max()
    np.testing.assert_allclose(-gradient, expected.forces, atol=TOL["force-f64"] * scale)
    np.testing.assert_allclose(virial, expected.virial, atol=TOL["virial-f64"] * np.abs(expected.virial).max())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_gradients_on_padded_lists_equal_finite_differences(family):
    position, neighbor = system()
    assert bool(jnp.any(neighbor.idx == 30)), "the list must have padding"
    terms = PairTerms(family, CUTOFF, "shift")
    template = pair_energy_template(terms, species=SPECIES)
    trained = [name for name in PARAMS[family] if name != "r"]

    def total(params, position=position):
        force = jax.grad(template(params))(position, neighbor, box=jnp.asarray(BOX))
        virial = pair_virial(terms, params, position, neighbor, jnp.asarray(BOX), species=SPECIES)
        energy = template(params)(position, neighbor, box=jnp.asarray(BOX))
        return energy + jnp.sum(jnp.sin(force)) + jnp.trace(virial)

    params = parameters(family)
    gradient = jax.jit(jax.grad(total))(params)
    value = jax.jit(total)
    for name in trained:
        where, h = (0, 1, 4)[: params[name].ndim], 1e-6
        up, down = (float(value({**params, name: params[name].at[where].add(s * h)})) for s in (1, -1))
        expected = (up - down) / (2 * h)
        assert float(gradient[name][where]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert bool(jnp.all(jnp.isfinite(gradient[name])))


@pytest.mark.usefixtures("x64")
def test_second_derivatives_by_position_are_exact():
    position, neighbor = system()
    energy_fn = pair_energy_template(PairTerms("morse", CUTOFF, "shift"), species=SPECIES)(parameters("morse"))

    @jax.jit
    def gradient(position):
        return jax.grad(energy_fn)(position, neighbor, box=jnp.asarray(BOX))

    rng = np.random.default_rng(1)
    cartesian, h = rng.normal(size=(30, 3)), 1e-6
    # A tangent is Cartesian, as in jax-md; a difference must be taken in fractional coordinates.
    moved = jnp.asarray(cartesian @ np.linalg.inv(BOX).T * h)
    expected = (gradient(position + moved) - gradient(position - moved)) / (2 * h)
    found = jax.jit(partial(jax.jvp, gradient))((position,), (jnp.asarray(cartesian),))[1]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.usefixtures("x64")
def test_box_gradient_and_perturbation_are_the_virial():
    position, neighbor = system()
    terms = PairTerms("mie", CUTOFF, "none")
    params = parameters("mie")
    energy_fn = pair_energy_template(terms, species=SPECIES)(params)
    box = jnp.asarray(BOX)
    full = jax.jit(lambda: pair_virial(terms, params, position, neighbor, box, species=SPECIES))()
    virial = float(jnp.trace(full))
    by_box = jax.jit(jax.grad(lambda s: energy_fn(position, neighbor, box=box * s)))(1.0)
    by_perturbation = jax.jit(jax.grad(lambda s: energy_fn(position, neighbor, box=box, perturbation=s)))(1.0)
    assert -float(by_box) == pytest.approx(virial, rel=1e-10)
    assert -float(by_perturbation) == pytest.approx(virial, rel=1e-10)


@pytest.mark.usefixtures("x64")
def test_cartesian_positions_give_the_same_as_fractional():
    position, neighbor = system(tilted=False)
    terms = PairTerms("lennard_jones", CUTOFF, "shift")
    params = parameters("lennard_jones")
    fractional = pair_energy_template(terms, species=SPECIES)(params)
    cartesian = pair_energy_template(terms, species=SPECIES, fractional=False)(params)
    box = jnp.asarray(EDGES)
    values = [jax.jit(jax.value_and_grad(fractional))(position, neighbor, box=box)]
    values.append(jax.jit(jax.value_and_grad(cartesian))(position * box, neighbor, box=box))
    np.testing.assert_allclose(float(values[0][0]), float(values[1][0]), rtol=1e-12)
    np.testing.assert_allclose(values[0][1], values[1][1], atol=1e-9 * np.abs(values[0][1]).max())


def test_isolated_particle_and_padding_alone_give_zero_not_nan():
    # D27: a zero distance under a mask must not reach a derivative.
    position = jnp.array([[0.1, 0.1, 0.1], [0.6, 0.6, 0.6]])
    displacement, _ = space.periodic_general(4.0, fractional_coordinates=True)
    lists = partition.neighbor_list(
        displacement, 4.0, CUTOFF, 0.1, fractional_coordinates=True, disable_cell_list=True
    ).allocate(position, extra_capacity=3, box=jnp.asarray(4.0))
    for family in ("lennard_jones", "mie", "morse"):
        params = {name: jnp.asarray(value[0, 0]) for name, value in PARAMS[family].items()}
        template = pair_energy_template(PairTerms(family, CUTOFF))

        def energy(params, position, template=template):
            return template(params)(position, lists, box=jnp.asarray(4.0))

        value, gradients = jax.jit(jax.value_and_grad(energy, argnums=(0, 1)))(params, position)
        assert float(value) == 0.0
        assert all(bool(jnp.all(leaf == 0.0)) for leaf in jax.tree.leaves(gradients))


def test_jax_md_lennard_jones_has_the_trap_that_ours_avoids():
    # Why this module exists: if this ever fails, jax-md has mended its form and ours may go.
    near, far = [[0.1, 0.1, 0.1], [0.4, 0.1, 0.1], [0.1, 0.5, 0.1]], [[1.5, 1.5, 1.5], [1.5, 1.8, 1.5]]
    position = jnp.array(near + far)
    displacement, _ = space.periodic(3.0)
    neighbor_fn, energy_fn = jax_md_energy.lennard_jones_neighbor_list(
        displacement, 3.0, sigma=0.3, epsilon=1.0, r_cutoff=4.0, dr_threshold=0.1, format=partition.Dense
    )
    neighbor = neighbor_fn.allocate(position, extra_capacity=2)
    assert bool(jnp.any(neighbor.idx == 5)), "the list must have padding"
    gradient = jax.grad(lambda sigma: energy_fn(position, neighbor, sigma=sigma))(0.3)
    ours = pair_energy_template(PairTerms("lennard_jones", 1.2), fractional=False, box=3.0)
    safe = jax.grad(lambda sigma: ours({"epsilon": 1.0, "sigma": sigma})(position, neighbor))(0.3)
    assert np.isnan(gradient)
    assert np.isfinite(safe)


@pytest.mark.parametrize("box", [2.0, np.array([3.0, 2.1, 3.0]), BOX * 0.8])
def test_box_below_two_cutoffs_is_refused_with_the_longest_legal_cutoff(box):
    with pytest.raises(ArgumentError, match="cutoff up to"):
        check_box(box, CUTOFF)


def test_height_of_a_tilted_box_counts_not_its_edge():
    tilted = np.array([[3.0, 2.9, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 3.0]])
    check_box(np.diag([3.0, 3.0, 3.0]), 1.4)
    with pytest.raises(ArgumentError, match=r"has 2\.15"):
        check_box(tilted, 1.4)


def test_wrong_lists_and_species_are_refused():
    position, neighbor = system()
    energy_fn = pair_energy_template(PairTerms("morse", CUTOFF))(parameters("morse"))
    with pytest.raises(ArgumentError, match="need species="):
        energy_fn(position, neighbor, box=jnp.asarray(BOX))
    with pytest.raises(ArgumentError, match="no box"):
        energy_fn(position, neighbor)
    wrong = pair_energy_template(PairTerms("morse", CUTOFF), species=[0, 2] * 15)(parameters("morse"))
    with pytest.raises(ArgumentError, match="indices up to 2"):
        wrong(position, neighbor, box=jnp.asarray(BOX))
    displacement, _ = space.periodic_general(jnp.asarray(BOX))
    sparse = partition.neighbor_list(
        displacement, jnp.asarray(BOX), CUTOFF, format=partition.Sparse, disable_cell_list=True
    ).allocate(position)
    with pytest.raises(ArgumentError, match="dense"):
        energy_fn(position, sparse, box=jnp.asarray(BOX))
