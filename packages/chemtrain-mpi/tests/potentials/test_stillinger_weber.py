"""Stillinger–Weber by moments: against jax-md's triple sum, a plain loop, published energies and finite differences."""

from functools import cache
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from crystals import DIAMOND, crystal, neighbors
from jax_md import energy as jax_md_energy
from jax_md import partition, space

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials import SILICON, stillinger_weber_template
from distmd_protocol.testkit import TOL

pytestmark = pytest.mark.once

CUTOFF = 3.77118
LATTICE = 5.431
EDGE = 2 * LATTICE


@cache
def disordered():
    """64 atoms off their sites by a tenth of a bond, with padding in the list."""
    rng = np.random.default_rng(0)
    position = jnp.asarray(crystal(DIAMOND, 2) + rng.normal(scale=0.25 / EDGE, size=(64, 3)))
    neighbor = neighbors(position, EDGE, CUTOFF, spare=3)
    assert bool(jnp.any(neighbor.idx == 64)), "the list must have padding"
    return position, neighbor


def parameters():
    return {name: jnp.asarray(value) for name, value in SILICON.items()}


def energy(params, position, neighbor, box=EDGE):
    return stillinger_weber_template(CUTOFF)(params)(position, neighbor, box=jnp.asarray(box))


@pytest.mark.usefixtures("x64")
def test_silicon_has_its_published_cohesive_energy_and_lattice_constant():
    # Two eV·2.16826 a bond pair: −4.3363 eV an atom, as LAMMPS' Si.sw gives at a = 5.431 Å; the minimum is there.
    position = jnp.asarray(crystal(DIAMOND, 2))
    neighbor = neighbors(position, EDGE, CUTOFF, spare=3)
    per_atom = jax.jit(lambda a: energy(parameters(), position, neighbor, 2 * a) / 64)
    assert float(per_atom(LATTICE)) == pytest.approx(-4.33652, abs=1e-4)
    assert float(per_atom(LATTICE)) == pytest.approx(-2 * SILICON["epsilon"], abs=1e-6)
    assert float(jax.grad(per_atom)(5.43095)) == pytest.approx(0.0, abs=1e-4)


@pytest.mark.usefixtures("x64")
def test_energy_and_forces_equal_jax_md_and_a_plain_loop():
    position, neighbor = disordered()
    displacement, _ = space.periodic_general(EDGE, fractional_coordinates=True)
    _, theirs = jax_md_energy.stillinger_weber_neighbor_list(displacement, EDGE, fractional_coordinates=True)
    ours = jax.jit(jax.value_and_grad(lambda r: energy(parameters(), r, neighbor)))(position)
    expected = jax.jit(jax.value_and_grad(lambda r: theirs(r, neighbor)))(position)
    # jax-md adds 1e-7 to the product of two bond lengths before it divides by it.
    assert float(ours[0]) == pytest.approx(float(expected[0]), rel=1e-7)
    scale = float(jnp.max(jnp.abs(expected[1])))
    np.testing.assert_allclose(ours[1], expected[1], atol=1e-6 * scale)
    assert float(ours[0]) == pytest.approx(plain_loop(np.asarray(position), EDGE), rel=TOL["energy-f64"])


def plain_loop(fractional, edge):
    """The formula as printed, one pair and one triple after the other."""
    e, s, a, b, lam, gamma = (SILICON[name] for name in ("epsilon", "sigma", "A", "B", "lam", "gamma"))
    total = 0.0
    for i, centre in enumerate(fractional):
        bonds = []
        for j, other in enumerate(fractional):
            d = (other - centre - np.round(other - centre)) * edge
            r = np.linalg.norm(d)
            if j != i and r < CUTOFF * (1 - 1e-9):
                bonds.append((d, r))
                total += 0.5 * e * a * (b * (r / s) ** -4 - 1) * np.exp(1 / (r / s - CUTOFF / s))
        for (d1, r1), (d2, r2) in permutations(bonds, 2):
            decay = np.exp(gamma / (r1 / s - CUTOFF / s) + gamma / (r2 / s - CUTOFF / s))
            total += 0.5 * e * lam * decay * (d1 @ d2 / (r1 * r2) + 1 / 3) ** 2
    return total


@pytest.mark.usefixtures("x64")
def test_forces_equal_finite_differences():
    position, neighbor = disordered()
    value = jax.jit(lambda r: energy(parameters(), r, neighbor))
    gradient = jax.jit(jax.grad(value))(position)
    h = 1e-5
    for atom, axis in ((0, 0), (17, 1), (63, 2)):
        up, down = (float(value(position.at[atom, axis].add(s * h / EDGE))) for s in (1, -1))
        assert float(gradient[atom, axis]) == pytest.approx((up - down) / (2 * h), rel=TOL["finite-difference-f64"])


@pytest.mark.usefixtures("x64")
def test_parameter_gradients_on_padded_lists_equal_finite_differences():
    position, neighbor = disordered()

    def total(params):
        force = jax.grad(lambda r: energy(params, r, neighbor))(position)
        return energy(params, position, neighbor) + jnp.sum(jnp.sin(force))

    params, value = parameters(), jax.jit(total)
    gradient = jax.jit(jax.grad(total))(params)
    for name, start in params.items():
        h = 1e-5 * float(start)
        up, down = (float(value({**params, name: start + s * h})) for s in (1, -1))
        assert float(gradient[name]) == pytest.approx((up - down) / (2 * h), rel=1e-5)


@pytest.mark.usefixtures("x64")
def test_jax_md_has_the_trap_that_ours_avoids():
    # Why this module exists: padding is at distance zero, where r⁻⁴ is infinite and its derivative by B is NaN.
    position, neighbor = disordered()
    displacement, _ = space.periodic_general(EDGE, fractional_coordinates=True)

    def theirs(B):
        _, fn = jax_md_energy.stillinger_weber_neighbor_list(displacement, EDGE, B=B, fractional_coordinates=True)
        return fn(position, neighbor)

    assert np.isnan(jax.jit(jax.grad(theirs))(SILICON["B"]))
    ours = jax.jit(jax.grad(lambda B: energy({**parameters(), "B": B}, position, neighbor)))
    assert np.isfinite(ours(SILICON["B"]))


def test_everything_is_finite_up_to_the_cutoff():
    # Two atoms just within the cutoff, where 1/(r − rc) blows up, and an isolated third.
    gaps = jnp.array([0.0, 1e-7, 1e-5, 1e-3, 1e-2])
    start = jnp.array([[0.1, 0.1, 0.1], [0.1, 0.1, 0.1], [0.6, 0.6, 0.6]])
    positions = jax.vmap(lambda gap: start.at[1, 0].add((CUTOFF - gap) / 12.0))(gaps)
    neighbor = neighbors(positions[0], 12.0, CUTOFF + 0.5, spare=2)

    def both(params, r):
        force = jax.grad(lambda q: energy(params, q, neighbor, 12.0))(r)
        return energy(params, r, neighbor, 12.0) + jnp.sum(force**2)

    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(both, argnums=(0, 1)), (None, 0)))(parameters(), positions)
    np.testing.assert_allclose(values, np.zeros(5), atol=1e-6)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradients))


@pytest.mark.usefixtures("x64")
def test_a_perturbation_is_a_strain_of_the_box():
    position, neighbor = disordered()
    strain = jnp.array([[1.01, 0.02, 0.0], [0.0, 0.99, 0.01], [0.0, 0.0, 1.02]])
    energy_fn = stillinger_weber_template(CUTOFF)(parameters())
    by_factor = energy_fn(position, neighbor, box=jnp.full(3, EDGE), perturbation=strain)
    assert float(by_factor) == pytest.approx(float(energy_fn(position, neighbor, box=strain * EDGE)), rel=1e-12)


@pytest.mark.usefixtures("x64")
def test_wrong_parameters_lists_and_cutoffs_are_refused():
    position, _ = disordered()
    with pytest.raises(ArgumentError, match="missing: gamma, unknown: zeta"):
        stillinger_weber_template(CUTOFF)({**{n: 1.0 for n in SILICON if n != "gamma"}, "zeta": 1.0})
    with pytest.raises(ArgumentError, match="cutoff is 0"):
        stillinger_weber_template(0.0)
    displacement, _ = space.periodic_general(EDGE, fractional_coordinates=True)
    sparse = partition.neighbor_list(
        displacement, EDGE, CUTOFF, format=partition.Sparse, fractional_coordinates=True, disable_cell_list=True
    )
    with pytest.raises(ArgumentError, match="dense"):
        energy(parameters(), position, sparse.allocate(position))
