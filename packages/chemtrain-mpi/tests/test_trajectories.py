from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax_md import dataclasses, partition, simulate, space
from scipy.special import gamma as gamma_function

from chemtrain_mpi import moving_box, process_printouts
from chemtrain_mpi.capacity import Capacity
from chemtrain_mpi.errors import ArgumentError, OverflowRetriesError
from chemtrain_mpi.potentials import pair_energy_template
from chemtrain_mpi.sampler import Job, Sampler

PARAMS = {"epsilon": jnp.float32(1.0), "sigma": jnp.float32(1.0)}
KWARGS = {"kT": jnp.float32(1.5), "box": jnp.float32(3.6)}
KEY = jax.random.PRNGKey(1)


def sampler(retries=12, multiplier=1.05, simulator=None, timings=None, skin=0.3):
    timings = timings or process_printouts(0.005, 0.5, 0.1, 0.05)
    template = pair_energy_template(problems.TERMS)
    made = simulator or problems.simulator()
    return Sampler(template, made, problems.neighbor_fn(skin=skin), timings, multiplier, retries, 1)


def started(s, position=None):
    position = jnp.asarray(problems.lattice(), jnp.float32) if position is None else position
    return s.start(PARAMS, {"position": position}, KWARGS, KEY)


def run(s, before, key=KEY, kwargs=None, name="here"):
    (after,) = s.run(PARAMS, [Job(before, kwargs or KWARGS, key, name)])
    return after


def test_snapshots_are_what_the_timings_say():
    s = sampler()
    trajectory = run(s, started(s))
    assert trajectory.snapshots.position.shape == (8, 27, 3)
    assert trajectory.reference_energy.shape == (8,)
    np.testing.assert_array_equal(trajectory.snapshots.position[-1], trajectory.chains[0].state.position)


def test_overflow_repeats_with_the_bits_of_a_run_that_began_with_the_final_capacity():
    s = sampler()
    # A perfect lattice needs few slots, its melt needs more.
    before = started(s)
    after = run(s, before)
    assert after.capacity.slots > before.capacity.slots
    generous = type(before)(**{**vars(before), "capacity": after.capacity, "cache": {}})
    straight = run(sampler(retries=0), generous)
    for a, b in ((after.chains, straight.chains), (after.snapshots, straight.snapshots)):
        assert problems.bits(a) == problems.bits(b)
    assert problems.bits(after.reference_energy) == problems.bits(straight.reference_energy)


def test_too_many_overflows_are_an_error_with_the_capacity_and_the_remedy():
    s = sampler(retries=1)
    before = type(started(s))(**{**vars(started(s)), "capacity": Capacity(8), "cache": {}})
    with pytest.raises(OverflowRetriesError, match=r"state point 5 overflowed 2 times.*raise max_neighbor_retries"):
        run(s, before, name="state point 5")


def test_cached_lists_have_the_bits_of_fresh_ones():
    s = sampler()
    trajectory = run(s, started(s))
    bare = type(trajectory)(**{**vars(trajectory), "cache": {}})
    np.testing.assert_array_equal(s.neighbors(bare)[0].idx, s.neighbors(trajectory)[0].idx)
    np.testing.assert_array_equal(s.slots(bare), s.slots(trajectory))
    (again,) = s.energies(PARAMS, [(bare, KWARGS)])
    assert problems.bits(again) == problems.bits(trajectory.reference_energy)


def test_a_run_continues_with_the_bits_of_its_stored_state():
    s = sampler()
    first = run(s, started(s))
    stored = type(first)(**{**vars(first), "chains": jax.tree.map(np.asarray, first.chains), "cache": {}})
    a, b = (run(s, t, jax.random.PRNGKey(2)) for t in (first, stored))
    assert problems.bits(a.snapshots) == problems.bits(b.snapshots)


def test_constant_pressure_trajectories_carry_their_box():
    _, shift = space.periodic_general(4.0, fractional_coordinates=True)
    barostat = partial(simulate.npt_nose_hoover, shift_fn=shift, dt=0.002, pressure=1.0, kT=1.0)
    timings = process_printouts(0.002, 0.4, 0.2, 0.05)
    s = sampler(multiplier=1.6, simulator=barostat, timings=timings)
    kwargs = {**KWARGS, "pressure": jnp.float32(1.5)}
    before = s.start(PARAMS, {"position": jnp.asarray(problems.lattice(), jnp.float32)}, kwargs, KEY)
    trajectory = run(s, before, kwargs=kwargs)
    boxes = jax.vmap(lambda state: jnp.linalg.det(state.box))(trajectory.snapshots)
    assert float(jnp.std(boxes)) > 0.0
    assert bool(jnp.all(jnp.isfinite(trajectory.reference_energy)))


@dataclasses.dataclass
class Breathing:
    """A state in a box of its own, and the energy that the simulation saw."""

    position: jax.Array
    mass: jax.Array
    box: jax.Array
    energy: jax.Array


def breathe(edge, factor):
    """A barostat at its simplest: scaled coordinates stand still and the box is scaled in every step."""

    def template(energy_fn):
        def init(key, position, mass=1.0, **_):
            return Breathing(position, jnp.float32(mass), jnp.float32(edge) * jnp.eye(3), jnp.float32(0.0))

        def apply(state, neighbor, **_):
            energy = energy_fn(state.position, neighbor=neighbor, box=state.box)
            return state.set(box=factor * state.box, energy=energy)

        return init, apply

    return template


@dataclasses.dataclass
class Counting:
    """A state that stands still, counts its steps, and keeps the temperatures and the force that it was handed."""

    position: jax.Array
    rng: jax.Array
    force: jax.Array
    steps: jax.Array
    first_kT: jax.Array
    kT: jax.Array


COUNTED = process_printouts(0.005, 0.05, 0.02, 0.01)


def counting(energy_fn):
    def init(key, position, kT=0.0, **_):
        return Counting(position, key, jnp.zeros_like(position), jnp.int32(0), jnp.float32(kT), jnp.float32(0.0))

    def apply(state, kT=0.0, **_):
        return state.set(steps=state.steps + 1, kT=jnp.float32(kT))

    return init, apply


def test_snapshots_come_after_equilibration_at_the_temperature_of_the_state_point():
    # Simulators have temperatures of their own, which would be taken silently if the state point's did not arrive.
    s = sampler(simulator=counting, timings=COUNTED)
    snapshots = run(s, started(s)).snapshots
    np.testing.assert_array_equal(snapshots.steps, [6, 8, 10])
    np.testing.assert_array_equal(snapshots.first_kT, KWARGS["kT"])
    np.testing.assert_array_equal(snapshots.kT, KWARGS["kT"])


@pytest.mark.parametrize("program", ["_simulate", "_lists"])
def test_overflow_of_the_last_chain_repeats_the_run_wherever_it_shows(program):
    # Mostly both programs overflow together; each must be believed alone.
    s = sampler(simulator=counting, timings=COUNTED)
    before = s.start(PARAMS, {"position": jnp.asarray(problems.lattice(), jnp.float32)}, KWARGS, KEY, chains=2)
    call, calls = getattr(s, program), []

    def flagged(shared, items):
        calls.append(len(items))
        *others, last = call(shared, items)
        return [*others, (*last[:-1], jnp.asarray(len(calls) == 1))]

    setattr(s, program, flagged)
    after = run(s, before)
    assert calls == [2, 2]
    assert after.capacity == s.lists.larger(before.capacity)


def test_a_run_starts_with_the_force_of_its_own_parameters():
    # The stored force is that of the parameters before the last update.
    s = sampler(simulator=counting, timings=COUNTED)
    position = jnp.asarray(problems.lattice(jitter=0.1), jnp.float32)
    snapshots = run(s, started(s, position)).snapshots
    energy_fn, whole = s.template(PARAMS), problems.neighbor_fn(skin=9.0).allocate(position, box=KWARGS["box"])
    expected = -jax.jit(jax.grad(lambda r: energy_fn(r, neighbor=whole, **KWARGS)))(position)
    assert float(jnp.max(jnp.abs(expected))) > 1.0
    np.testing.assert_allclose(snapshots.force[0], expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=[(6.3, 0.995), (4.66, 1.005)], ids=["shrinks", "grows"])
def breathing(request):
    """A lattice of which no two particles are listed in the larger box; with a skin, and with all pairs."""
    edge, factor = request.param
    kwargs = {"kT": jnp.float32(1.0), "box": jnp.float32(edge)}
    position, timings = jnp.asarray(problems.lattice(jitter=0.02), jnp.float32), process_printouts(0.001, 0.06, 0, 0.01)
    runs = []
    for skin in (0.3, 6.0):
        s = sampler(multiplier=3.0, simulator=breathe(edge, factor), timings=timings, skin=skin)
        runs.append((s, run(s, s.start(PARAMS, {"position": position}, kwargs, KEY), kwargs=kwargs)))
    return runs


def edges(trajectory):
    return np.asarray(jax.vmap(lambda state: state.box)(trajectory.snapshots))[:, 0, 0]


def near(position, edge):
    """Pairs nearer than the cutoff, each from both sides."""
    d = np.asarray(position)[:, None] - np.asarray(position)[None]
    r = np.linalg.norm((d - np.round(d)) * edge, axis=-1)
    return {(i, j) for i, j in zip(*np.nonzero(r < 1.7), strict=True) if i != j}


def test_no_pair_is_missed_while_the_box_changes(breathing):
    (s, usual), (_, whole) = breathing
    counts = [len(near(p, edge)) for p, edge in zip(usual.snapshots.position, edges(usual), strict=True)]
    assert min(counts) == 0
    assert max(counts) > 100
    # While it was simulated, and afterwards with the snapshots' own lists.
    assert jnp.any(whole.snapshots.energy < -1.0)
    np.testing.assert_allclose(usual.snapshots.energy, whole.snapshots.energy, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(usual.reference_energy, whole.reference_energy, rtol=1e-5, atol=1e-4)
    for slots, position, edge in zip(s.slots(usual), usual.snapshots.position, edges(usual), strict=True):
        listed = {(i, int(j)) for i, row in enumerate(np.asarray(slots)) for j in row if j < 27}
        assert near(position, edge) <= listed


def test_lists_of_a_box_that_changes_are_made_again_bit_for_bit(breathing):
    s, trajectory = breathing[0]
    bare = replace(trajectory, cache={})
    np.testing.assert_array_equal(s.neighbors(bare)[0].idx, s.neighbors(trajectory)[0].idx)
    np.testing.assert_array_equal(s.slots(bare), s.slots(trajectory))


def test_a_list_lasts_until_a_pair_may_come_in():
    """Pairs 2.1 apart, cutoff 1.7 and skin 0.3: unlisted ones are 2.0 apart, and 1.7 after a contraction by 0.85."""
    position = jnp.asarray(problems.lattice(), jnp.float32)
    made = problems.neighbor_fn(skin=0.3)
    assert moving_box.reach(made) == pytest.approx((1.7, 0.3))
    start = jnp.float32(6.3) * jnp.eye(3)
    neighbors = made.allocate(position, box=start, extra_capacity=26)
    for factor, renewed in [(0.86, False), (0.84, True), (1.5, False)]:
        _, built = moving_box.updated(neighbors, start, position, factor * start, 1.7, 0.3)
        np.testing.assert_array_equal(built, factor * start if renewed else start)
    # Where the shape changes too, the shortest direction counts.
    flat = start @ jnp.diag(jnp.float32([1, 1, 0.8]))
    new, built = moving_box.updated(neighbors, start, position, flat, 1.7, 0.3)
    np.testing.assert_array_equal(built, flat)
    assert int(jnp.sum(new.idx < 27)) == 54


def test_neighbour_functions_that_hide_their_cutoff_are_refused_at_constant_pressure():
    made = problems.neighbor_fn()
    wrapped = partition.NeighborListFns(made.allocate, lambda position, neighbors, **box: neighbors)
    with pytest.raises(ArgumentError, match=r"jax_md\.partition\.neighbor_list"):
        moving_box.reach(wrapped)


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
