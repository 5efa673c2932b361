"""The simulator at constant temperature and pressure: what it conserves, and that it is a drop-in for jax-md's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax_md import energy, simulate, space

from chemtrain_mpi import constant_pressure, process_printouts
from chemtrain_mpi.potentials import pair_energy_template
from chemtrain_mpi.sampler import Job, Sampler

pytestmark = pytest.mark.once

EDGE, KT, PRESSURE = 3.4, 1.2, 1.0
CHAINS = {"barostat_kwargs": {"tau": 0.5}, "thermostat_kwargs": {"tau": 0.2}}


def invariant(simulator, dt, steps):
    """The conserved energy and the volume every 50 steps, of 27 Lennard-Jones particles."""
    displacement, shift = space.periodic_general(EDGE, fractional_coordinates=True)
    potential = energy.lennard_jones_pair(displacement, r_onset=1.2, r_cutoff=1.6)
    init, apply = simulator(potential, shift, dt, PRESSURE, KT, **CHAINS)
    position = jnp.asarray(problems.lattice(jitter=0.02), jnp.float32)
    state = init(jax.random.PRNGKey(0), position, box=jnp.float32(EDGE) * jnp.eye(3), mass=1.0)

    def sample(state, _):
        state, _ = jax.lax.scan(lambda s, _: (apply(s), None), state, None, length=50)
        conserved = simulate.npt_nose_hoover_invariant(potential, state, PRESSURE, KT)
        return state, (conserved, jnp.linalg.det(state.box))

    _, (conserved, volume) = jax.jit(lambda s: jax.lax.scan(sample, s, None, length=steps // 50))(state)
    return np.asarray(conserved), np.asarray(volume)


def test_invariant_is_conserved_while_the_box_moves():
    conserved, volume = invariant(constant_pressure.npt_nose_hoover, 0.002, 3000)
    assert volume.std() > 0.5
    assert np.abs(conserved - conserved[0]).max() < 0.1


def test_jax_md_s_own_does_not_conserve_it():
    """Once this fails, jax-md is mended and the module that stands in for it may go."""
    conserved, _ = invariant(simulate.npt_nose_hoover, 0.002, 3000)
    assert np.abs(conserved - conserved[0]).max() > 1.0


def test_error_of_a_step_is_of_second_order():
    coarse, _ = invariant(constant_pressure.npt_nose_hoover, 0.008, 800)
    fine, _ = invariant(constant_pressure.npt_nose_hoover, 0.004, 1600)
    assert 2.5 < coarse.std() / fine.std() < 6.5


def test_step_is_that_of_jax_md_where_that_is_right():
    """Free particles at the origin, of which a share is nothing, in a box that grows by more than 15 % in the step."""
    _, shift = space.periodic_general(EDGE, fractional_coordinates=True)
    free = (lambda position, **_: 0.0 * jnp.sum(position), shift, 0.1, PRESSURE, KT)
    steps = []
    for simulator in (constant_pressure.npt_nose_hoover, simulate.npt_nose_hoover):
        init, apply = simulator(*free, **CHAINS)
        state = init(jax.random.PRNGKey(0), jnp.zeros((5, 3)), box=jnp.float32(EDGE) * jnp.eye(3), mass=1.0)
        steps.append(apply(state.set(box_momentum=4.0 * state.box_mass)))
    ours, other = steps
    assert float(ours.box[0, 0]) > 1.15 * EDGE
    moved = np.asarray(ours.position - other.position)
    np.testing.assert_allclose(moved - np.round(moved), 0.0, atol=1e-6)
    for name in ("momentum", "box_position", "box_momentum"):
        np.testing.assert_allclose(getattr(ours, name), getattr(other, name), rtol=1e-5, err_msg=name)


def test_pressure_and_temperature_are_also_keywords():
    displacement, shift = space.periodic_general(EDGE, fractional_coordinates=True)
    potential = energy.lennard_jones_pair(displacement, r_onset=1.2, r_cutoff=1.6)
    position, box = jnp.asarray(problems.lattice(jitter=0.02), jnp.float32), jnp.float32(EDGE) * jnp.eye(3)
    init, apply = constant_pressure.npt_nose_hoover(potential, shift, 0.002, PRESSURE, KT, **CHAINS)
    state = init(jax.random.PRNGKey(0), position, box=box, mass=1.0)
    _, other = constant_pressure.npt_nose_hoover(potential, shift, 0.002, 5.0, 2.0, **CHAINS)
    given = apply(state, pressure=5.0, kT=2.0)
    expected = other(state)
    np.testing.assert_allclose(given.position, expected.position, rtol=1e-6)
    np.testing.assert_allclose(given.box_momentum, expected.box_momentum, rtol=1e-6)
    assert abs(float(given.box_momentum - apply(state).box_momentum)) > 1e-3


def test_trajectories_run_with_it():
    _, shift = space.periodic_general(4.0, fractional_coordinates=True)
    simulator = partial(
        constant_pressure.npt_nose_hoover, shift_fn=shift, dt=0.002, pressure=1.0, kT=1.0, barostat_kwargs={"tau": 0.5}
    )
    timings = process_printouts(0.002, 0.2, 0.05, 0.05)
    s = Sampler(pair_energy_template(problems.TERMS), simulator, problems.neighbor_fn(), timings, 1.5, 6, 1)
    params = {"epsilon": jnp.float32(1.0), "sigma": jnp.float32(1.0)}
    kwargs = {"kT": jnp.float32(1.0), "box": jnp.float32(4.0), "pressure": jnp.float32(0.5)}
    position = jnp.asarray(problems.lattice(jitter=0.1), jnp.float32)
    start = s.start(params, {"position": position}, kwargs, jax.random.PRNGKey(0))
    (trajectory,) = s.run(params, [Job(start, kwargs, jax.random.PRNGKey(1), "0")])
    volumes = np.linalg.det(np.asarray(jax.vmap(lambda state: state.box)(trajectory.snapshots)))
    assert np.all(np.isfinite(trajectory.reference_energy))
    assert len(set(volumes.tolist())) == len(volumes)
