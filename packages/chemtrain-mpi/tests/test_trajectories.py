from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax_md import simulate, space
from scipy.special import gamma as gamma_function

from chemtrain_mpi import process_printouts
from chemtrain_mpi.capacity import Capacity
from chemtrain_mpi.errors import OverflowRetriesError
from chemtrain_mpi.potentials import pair_energy_template
from chemtrain_mpi.trajectories import Sampler

PARAMS = {"epsilon": jnp.float32(1.0), "sigma": jnp.float32(1.0)}
KWARGS = {"kT": jnp.float32(1.5), "box": jnp.float32(3.6)}
KEY = jax.random.PRNGKey(1)


def sampler(retries=12, multiplier=1.05, simulator=None, timings=None):
    timings = timings or process_printouts(0.005, 0.5, 0.1, 0.05)
    template = pair_energy_template(problems.TERMS)
    made = simulator or problems.simulator()
    return Sampler(template, made, problems.neighbor_fn(), timings, multiplier, retries, 1)


def started(s, position=None):
    position = jnp.asarray(problems.lattice(), jnp.float32) if position is None else position
    return s.start(PARAMS, {"position": position}, KWARGS, KEY)


def test_snapshots_are_what_the_timings_say():
    s = sampler()
    trajectory = s.run(PARAMS, started(s), KWARGS, KEY, "here")
    assert trajectory.snapshots.position.shape == (8, 27, 3)
    assert trajectory.reference_energy.shape == (8,)
    np.testing.assert_array_equal(trajectory.snapshots.position[-1], trajectory.state.position)


def test_overflow_repeats_with_the_bits_of_a_run_that_began_with_the_final_capacity():
    s = sampler()
    # A perfect lattice needs few slots, its melt needs more.
    before = started(s)
    after = s.run(PARAMS, before, KWARGS, KEY, "here")
    assert after.capacity.slots > before.capacity.slots
    generous = type(before)(**{**vars(before), "capacity": after.capacity, "cache": {}})
    straight = sampler(retries=0).run(PARAMS, generous, KWARGS, KEY, "here")
    for a, b in ((after.state, straight.state), (after.snapshots, straight.snapshots)):
        assert problems.bits(a) == problems.bits(b)
    assert problems.bits(after.reference_energy) == problems.bits(straight.reference_energy)


def test_too_many_overflows_are_an_error_with_the_capacity_and_the_remedy():
    s = sampler(retries=1)
    before = type(started(s))(**{**vars(started(s)), "capacity": Capacity(8), "cache": {}})
    with pytest.raises(OverflowRetriesError, match=r"state point 5 overflowed 2 times.*raise max_neighbor_retries"):
        s.run(PARAMS, before, KWARGS, KEY, "state point 5")


def test_cached_lists_have_the_bits_of_fresh_ones():
    s = sampler()
    trajectory = s.run(PARAMS, started(s), KWARGS, KEY, "here")
    bare = type(trajectory)(**{**vars(trajectory), "cache": {}})
    np.testing.assert_array_equal(s.neighbors(bare).idx, s.neighbors(trajectory).idx)
    np.testing.assert_array_equal(s.slots(bare), s.slots(trajectory))
    again = s.energies(PARAMS, bare, KWARGS)
    assert problems.bits(again) == problems.bits(trajectory.reference_energy)


def test_a_run_continues_with_the_bits_of_its_stored_state():
    s = sampler()
    first = s.run(PARAMS, started(s), KWARGS, KEY, "here")
    stored = type(first)(**{**vars(first), "state": jax.tree.map(np.asarray, first.state), "cache": {}})
    a, b = (s.run(PARAMS, t, KWARGS, jax.random.PRNGKey(2), "here") for t in (first, stored))
    assert problems.bits(a.snapshots) == problems.bits(b.snapshots)


def test_constant_pressure_trajectories_carry_their_box():
    _, shift = space.periodic_general(4.0, fractional_coordinates=True)
    barostat = partial(simulate.npt_nose_hoover, shift_fn=shift, dt=0.002, pressure=1.0, kT=1.0)
    timings = process_printouts(0.002, 0.4, 0.2, 0.05)
    s = sampler(multiplier=1.6, simulator=barostat, timings=timings)
    kwargs = {**KWARGS, "pressure": jnp.float32(1.5)}
    before = s.start(PARAMS, {"position": jnp.asarray(problems.lattice(), jnp.float32)}, kwargs, KEY)
    trajectory = s.run(PARAMS, before, kwargs, KEY, "here")
    boxes = jax.vmap(lambda state: jnp.linalg.det(state.box))(trajectory.snapshots)
    assert float(jnp.std(boxes)) > 0.0
    assert bool(jnp.all(jnp.isfinite(trajectory.reference_energy)))


def free_particles(masses, steps, kT=0.7, dt=0.02, gamma=2.0):
    """Positions of particles in the well x⁶ (each axis for itself), sampled every 20 steps."""
    _, shift = space.free()
    init, apply = simulate.nvt_langevin(lambda r, **_: jnp.sum(r**6), shift, dt, kT, gamma)
    state = init(KEY, jnp.zeros((masses.shape[0], 1)), mass=masses)

    def sample(state, _):
        state = jax.lax.fori_loop(0, 20, lambda _, s: apply(s), state)
        return state, state.position[:, 0]

    return jax.jit(lambda s: jax.lax.scan(sample, s, None, length=steps)[1])(state)


def test_langevin_gives_the_boltzmann_density_for_every_mass():
    # D19. <x²> in the well x⁶ is kT^(1/3) Γ(1/2)/Γ(1/6).
    masses = jnp.where(jnp.arange(1000) % 2 == 0, 1.0, 10.0)
    x = np.asarray(free_particles(masses, 400))[50:]
    expected = 0.7 ** (1 / 3) * gamma_function(0.5) / gamma_function(1 / 6)
    for offset in (0, 1):
        assert np.mean(x[:, offset::2] ** 2) == pytest.approx(expected, rel=0.01)


def test_langevin_without_temperature_and_friction_is_verlet():
    # D19.
    _, shift = space.free()
    energy = partial(lambda r, **_: jnp.sum(r**4))
    start = jnp.array([[0.3], [-0.8]])
    momenta = jnp.array([[0.1], [0.4]])
    init, apply = simulate.nvt_langevin(energy, shift, 0.01, kT=0.0, gamma=0.0)
    state = init(KEY, start, mass=jnp.array([1.0, 10.0]), momenta=momenta)
    _, nve = simulate.nve(energy, shift, 0.01)
    plain = simulate.NVEState(start, momenta, state.force, state.mass)
    for _ in range(200):
        state, plain = apply(state), nve(plain)
    np.testing.assert_allclose(state.position, plain.position, rtol=1e-4)
