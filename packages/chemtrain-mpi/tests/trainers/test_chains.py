"""Several chains a state point. What several ranks do with them is in ``test_ranks.py``."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax_md import simulate, space

from chemtrain_mpi import process_printouts
from chemtrain_mpi.chains import chain_keys, with_fresh_momenta
from chemtrain_mpi.sampler import Job
from chemtrain_mpi.trainers.memory import estimate
from distmd_protocol import CheckpointError

pytestmark = pytest.mark.once

SHORT = process_printouts(0.005, 0.25, 0.05, 0.05)


@pytest.fixture(scope="module")
def three():
    """A trainer of two state points with three chains of four snapshots."""
    trainer = problems.trainer(2, timings=SHORT, num_chains=3, reweight_ratio=0.97, overflow_capacity_multiplier=3.0)
    trainer.initialize_trajstates()
    return trainer


def test_all_snapshots_of_all_chains_are_reweighted_together(three):
    trajectory = three.trajectories[0]
    assert trajectory.snapshots.position.shape == (12, 27, 3)
    assert trajectory.reference_energy.shape == (12,)
    np.testing.assert_allclose(three.predict()["n_eff"], 12.0, rtol=1e-5)
    energies = three._sampler.energies(three.params, [(trajectory, trajectory.reference_kwargs)])[0]
    assert problems.bits(energies) == problems.bits(trajectory.reference_energy)
    assert float(three.predict()["energy"][0]) == pytest.approx(float(jnp.mean(energies)), rel=1e-5)


def test_chains_are_independent_and_each_has_the_bits_of_a_run_alone(three):
    trajectory, point = three.trajectories[0], three._points
    last = [problems.bits(chain.state.position) for chain in trajectory.chains]
    assert len({tuple(each) for each in last}) == 3
    # The same three starts, each run alone with the chain's key.
    before, kwargs = point.start(three.params)[0], point.kwargs[0]
    keys = chain_keys(point.key(1, 0, 0, 1), 3)
    for chain, key, expected in zip(before.chains, keys, trajectory.chains, strict=True):
        alone = type(before)(**{**vars(before), "chains": (chain,), "cache": {}, "capacity": trajectory.capacity})
        (run,) = three._sampler.run(three.params, [Job(alone, kwargs, key, "alone")])
        assert problems.bits(run.chains[0]) == problems.bits(expected)


def test_keys_of_chains_collide_with_no_split_of_one_another():
    key = jax.random.PRNGKey(5)
    assert problems.bits(chain_keys(key, 1)[0]) == problems.bits(key)
    keys = chain_keys(key, 4)
    made = [*keys, *(split for each in keys for split in jax.random.split(each, 3))]
    assert len({tuple(problems.bits(each)) for each in made}) == 16


def test_new_starts_are_drawn_by_weight_from_all_chains(three):
    trajectory, point = three.trajectories[1], three._points
    # Snapshots 5 and 11, of the second and third chain, with weights of a quarter and three quarters.
    tilt = jnp.full(12, -60.0).at[5].set(jnp.log(0.25)).at[11].set(jnp.log(0.75))
    tilted = type(trajectory)(
        **{**vars(trajectory), "reference_energy": trajectory.reference_energy + tilt * point.kwargs[1]["kT"]}
    )
    point._resample = True
    try:
        drawn = [point._resampled(three.params, tilted, 1, epoch, 0) for epoch in range(60)]
    finally:
        point._resample = False
    positions = np.asarray(trajectory.snapshots.position)
    found = [
        next(i for i in range(12) if np.array_equal(positions[i], chain.state.position))
        for each in drawn
        for chain in each.chains
    ]
    assert set(found) == {5, 11}
    assert np.mean(np.array(found) == 11) == pytest.approx(0.75, abs=4 * (0.75 * 0.25 / 180) ** 0.5)
    assert all(np.array_equal(chain.reference_position, chain.state.position) for chain in drawn[0].chains)


@pytest.mark.parametrize("constant_pressure", [False, True])
def test_simulators_without_noise_get_momenta_of_their_own(constant_pressure):
    _, shift = space.periodic_general(4.0, fractional_coordinates=True)
    template = problems.arguments(1)["energy_fn_template"]
    keywords = {"shift_fn": shift, "dt": 0.002, "kT": 1.3}
    if constant_pressure:
        made = partial(simulate.npt_nose_hoover, pressure=1.0, **keywords)
    else:
        made = partial(simulate.nvt_nose_hoover, **keywords)
    init, apply = made(template({"epsilon": 1.0, "sigma": 0.9}))
    position, box = jnp.asarray(problems.lattice(jitter=0.1), jnp.float32), jnp.eye(3) * 4.0
    neighbors = problems.neighbor_fn().allocate(position, box=box)
    state = init(jax.random.PRNGKey(0), position, box=box, neighbor=neighbors)
    fresh = jax.jit(jax.vmap(lambda key: with_fresh_momenta(state, key, 1.3)))(
        jax.random.split(jax.random.PRNGKey(1), 400)
    )
    # 26·3 degrees of freedom: the centre of mass is at rest.
    kinetic = np.sum(np.asarray(fresh.momentum) ** 2, axis=(1, 2)) / 2
    assert np.mean(kinetic) == pytest.approx(39 * 1.3, abs=4 * 1.3 * (39 / 400) ** 0.5)
    thermostat = fresh.thermostat if constant_pressure else fresh.chain
    np.testing.assert_allclose(thermostat.kinetic_energy, kinetic, rtol=1e-4)
    np.testing.assert_array_equal(fresh.position[7], state.position)
    one = jax.tree.map(lambda leaf: leaf[0], fresh)
    call = {"neighbor": neighbors} if constant_pressure else {"neighbor": neighbors, "box": box}
    assert bool(jnp.all(jnp.isfinite(apply(one, **call).position)))
    langevin = simulate.NVTLangevinState(position, position, position, jnp.ones(()), jax.random.PRNGKey(0))
    assert with_fresh_momenta(langevin, jax.random.PRNGKey(1), 1.0) is langevin


def test_overflow_of_one_chain_repeats_its_state_point_and_no_other(three):
    sampler, point = three._sampler, three._points
    starts = point.start(three.params)
    # One chain of the second state point starts where its list is too small: a clump.
    clump = starts[1].chains[1]
    squeezed = type(clump)(clump.state.set(position=clump.state.position * 0.75), clump.state.position * 0.75)
    changed = (starts[1].chains[0], squeezed, starts[1].chains[2])
    before = [starts[0], type(starts[1])(**{**vars(starts[1]), "chains": changed, "cache": {}})]
    assert [t.capacity.slots for t in before] == [24, 24]
    calls, simulate_all = [], sampler._simulate

    def counted(params, items):
        calls.append(len(items))
        return simulate_all(params, items)

    sampler._simulate = counted
    try:
        jobs = [Job(t, point.kwargs[k], point.key(1, 7, k), f"state point {k}") for k, t in enumerate(before)]
        runs = sampler.run(three.params, jobs)
    finally:
        sampler._simulate = simulate_all
    # Two state points of three chains, then the second one again.
    assert calls == [6, 3]
    assert [t.capacity.slots for t in runs] == [24, 72]
    assert runs[1].snapshots.position.shape == (12, 27, 3)


def test_checkpoints_hold_the_chains_and_are_refused_under_another_number(three, tmp_path):
    keywords = {"timings": SHORT, "num_chains": 3, "reweight_ratio": 0.97, "overflow_capacity_multiplier": 3.0}
    keywords["resample_simstates"] = True
    whole, resumed = problems.trainer(2, **keywords), problems.trainer(2, **keywords)
    whole.load_trajstates(three.save_trajstates(tmp_path / "t"))
    whole.train(2)
    resumed.restore(whole.save(tmp_path / "c"))
    for trainer in (whole, resumed):
        trainer.train(3)
    assert sum(len(entry["recomputed"]) for entry in resumed.history) > 0
    states = [problems.bits([(t.chains, t.snapshots) for t in x.trajectories]) for x in (whole, resumed)]
    assert states[0] == states[1]
    assert problems.bits(whole.params) == problems.bits(resumed.params)
    fewer = problems.trainer(2, timings=SHORT, num_chains=2)
    for call in (lambda: fewer.restore(tmp_path / "c"), lambda: fewer.load_trajstates(tmp_path / "t")):
        with pytest.raises(CheckpointError, match="num_chains=3 and this trainer has num_chains=2"):
            call()
    assert fewer.trajectories is None


def test_memory_estimate_is_what_the_trajectories_take(three):
    stored, lists = estimate(three._sampler, three._points.start(three.params))
    arrays = [(t.snapshots, [chain.state for chain in t.chains]) for t in three.trajectories]
    assert stored == sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    assert lists == pytest.approx(2 * 3 * 5 * 27 * 4 * three.trajectories[0].capacity.slots, rel=1e-6)
    more, _ = estimate(three._sampler, three._points.start(three.params), three.params)
    assert more == stored + 2 * 2 * 4
