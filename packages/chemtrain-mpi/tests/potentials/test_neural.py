"""The learned correction: inputs against a plain loop, forces and gradients against finite differences."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from crystals import DIAMOND, crystal, neighbors

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials import (
    NeuralCorrection,
    sum_template,
    symmetry_functions,
)
from distmd_protocol.testkit import TOL

CUTOFF, EDGE, ETAS = 3.77118, 10.862, (0.05, 0.4)
BOX = EDGE


@cache
def problem():
    rng = np.random.default_rng(0)
    position = jnp.asarray(crystal(DIAMOND, 2) + rng.normal(scale=0.02, size=(64, 3)))
    neighbor = neighbors(position, EDGE, CUTOFF, spare=2)
    features = symmetry_functions(CUTOFF, ETAS)
    values = jax.jit(lambda r: features(r, neighbor, box=BOX))(position)
    correction = NeuralCorrection.create(features, values, key=jax.random.key(0), mlp_sizes=(5,), energy_scale=0.1)
    return position, neighbor, values, correction


def moved(params):
    """Weights with a last layer that is not zero."""
    rng = np.random.default_rng(1)
    return {name: leaf + jnp.asarray(rng.normal(scale=0.3, size=leaf.shape)) for name, leaf in params.items()}


@pytest.mark.usefixtures("x64")
def test_symmetry_functions_equal_a_plain_loop():
    position, _, values, _ = problem()
    fractional = np.asarray(position)
    for atom in (0, 37):
        d = fractional - fractional[atom]
        d = (d - np.round(d)) * EDGE
        r = np.linalg.norm(d, axis=1)
        bonds = [j for j in range(64) if j != atom and r[j] < CUTOFF]
        cut = {j: 0.5 * (1 + np.cos(np.pi * r[j] / CUTOFF)) for j in bonds}
        expected = []
        for eta in ETAS:
            g = {j: np.exp(-eta * r[j] ** 2) * cut[j] for j in bonds}
            expected.append(sum(g.values()))
            for zeta in (1, 2):
                for sign in (1, -1):
                    total = 0.0
                    for j in bonds:
                        for k in bonds:
                            if j != k:
                                total += (1 + sign * d[j] @ d[k] / (r[j] * r[k])) ** zeta * g[j] * g[k]
                    expected.append(2.0 ** (1 - zeta) * total)
        np.testing.assert_allclose(values[atom], expected, rtol=1e-10)


@pytest.mark.usefixtures("x64")
def test_correction_starts_at_zero_and_can_be_trained():
    position, neighbor, _, correction = problem()
    template = sum_template(prior=lambda p: lambda r, **_: p * jnp.sum(r), correction=correction.template)

    def energy(params):
        return template(params)(position, neighbor=neighbor, box=BOX)

    start = {"prior": 2.0, "correction": correction.init_params}
    value, gradient = jax.jit(jax.value_and_grad(energy))(start)
    assert float(value) == pytest.approx(2.0 * float(jnp.sum(position)), rel=1e-12)
    assert float(gradient["prior"]) == pytest.approx(float(jnp.sum(position)), rel=1e-12)
    assert any(float(jnp.max(jnp.abs(leaf))) > 0 for leaf in gradient["correction"].values())
    with pytest.raises(ArgumentError, match="parts are correction, prior"):
        template({"prior": 2.0})


@pytest.mark.usefixtures("x64")
def test_forces_and_weight_gradients_equal_finite_differences():
    position, neighbor, _, correction = problem()
    params, h = moved(correction.init_params), 1e-5

    @jax.jit
    def energy(params, position):
        return correction.template(params)(position, neighbor, box=BOX)

    @jax.jit
    def force_sum(params):
        force = jax.grad(energy, argnums=1)(params, position)
        return jnp.sum(jnp.sin(10.0 * force))

    gradient = jax.jit(jax.grad(energy, argnums=1))(params, position)
    for atom, axis in ((0, 0), (40, 2)):
        up, down = (float(energy(params, position.at[atom, axis].add(s * h / EDGE))) for s in (1, -1))
        assert float(gradient[atom, axis]) == pytest.approx((up - down) / (2 * h), rel=TOL["finite-difference-f64"])
    weights = jax.jit(jax.grad(force_sum))(params)
    for name, leaf in params.items():
        assert bool(jnp.all(jnp.isfinite(weights[name])))
        where = (0,) * leaf.ndim
        up, down = (float(force_sum({**params, name: leaf.at[where].add(s * h)})) for s in (1, -1))
        # The last bias shifts the energy and nothing else.
        assert float(weights[name][where]) == pytest.approx((up - down) / (2 * h), rel=1e-5, abs=1e-7)


@pytest.mark.usefixtures("x64")
def test_a_rotated_crystal_has_the_same_energy():
    position, neighbor, _, correction = problem()
    rotation, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(3, 3)))
    energy_fn = jax.jit(lambda box: correction.template(moved(correction.init_params))(position, neighbor, box=box))
    assert float(energy_fn(jnp.asarray(rotation) * EDGE)) == pytest.approx(
        float(energy_fn(jnp.eye(3) * EDGE)), rel=1e-10
    )


def test_senseless_widths_and_samples_are_refused():
    with pytest.raises(ArgumentError, match="none negative"):
        symmetry_functions(2.0, [-1.0])
    with pytest.raises(ArgumentError, match="thermal motion"):
        NeuralCorrection.create(symmetry_functions(2.0, [1.0]), jnp.ones((4, 5)), key=jax.random.key(0))
    with pytest.raises(ArgumentError, match="at least one part"):
        sum_template()
