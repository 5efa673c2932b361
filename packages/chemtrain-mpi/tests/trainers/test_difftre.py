"""The trainer on one rank. What several ranks add is in ``test_ranks.py``."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest

from chemtrain_mpi import DifftreParallel, process_printouts
from chemtrain_mpi.errors import ArgumentError, NonFiniteError, NotInitializedError
from distmd_protocol import CheckpointError, RankError, list_checkpoints, load_checkpoint

SHORT = process_printouts(0.005, 0.25, 0.05, 0.05)


def poisoned(template):
    """Energy functions that are NaN once ε passes 0.93, smoothly below: a failure in the middle of training."""

    def energy_fn_template(params):
        energy_fn = template(params)
        return lambda position, neighbor, **kw: (
            energy_fn(position, neighbor, **kw) + jnp.where(params["epsilon"] > 0.93, jnp.nan, 0.0)
        )

    return energy_fn_template


@pytest.fixture(scope="module")
def trained():
    """A trainer after two epochs."""
    trainer = problems.trainer(2, timings=SHORT)
    trainer.initialize_trajstates()
    trainer.train(2)
    return trainer


def test_training_lowers_the_loss():
    trainer = problems.trainer(2, optimizer=optax.adam(0.05), reweight_ratio=0.7)
    trainer.initialize_trajstates(num_runs=2)
    trainer.train(12)
    losses = [entry["loss"] for entry in trainer.history]
    assert min(losses[-3:]) < 0.5 * losses[0]
    assert trainer.epoch == 12


def test_history_tells_what_happened(trained):
    entry = trained.history[0]
    assert entry["recomputed"] == []
    assert set(entry["n_eff"]) == {"0", "1"}
    assert entry["step_size"] == 1.0
    assert set(entry["seconds"]) == {"simulating", "reweighting", "communicating"}
    json.dumps(trained.history, allow_nan=False)


def test_unchanged_parameters_reuse_every_snapshot():
    trainer = problems.trainer(2, timings=SHORT, optimizer=optax.sgd(0.0))
    trainer.initialize_trajstates()
    trainer.train(2)
    assert all(entry["recomputed"] == [] for entry in trainer.history)
    assert trainer.history[-1]["n_eff"]["0"] == pytest.approx(4.0, rel=1e-5)
    assert trainer.history[0]["loss"] == trainer.history[1]["loss"]


def test_low_effective_sample_size_recomputes():
    trainer = problems.trainer(2, timings=SHORT, reweight_ratio=1.0)
    trainer.initialize_trajstates()
    before = problems.bits([t.snapshots for t in trainer.trajectories])
    trainer.train(2)
    assert trainer.history[1]["recomputed"] == [0, 1]
    assert problems.bits([t.snapshots for t in trainer.trajectories]) != before
    assert min(trainer.history[1]["n_eff"].values()) == pytest.approx(4.0, rel=1e-5)


def test_training_before_trajectories_is_refused():
    trainer = problems.trainer(2)
    for call in (lambda: trainer.train(1), trainer.predict, lambda: trainer.save_trajstates("x")):
        with pytest.raises(NotInitializedError, match="initialize_trajstates"):
            call()


def test_gradient_of_the_loss_equals_finite_differences():
    # Same trajectories, so the reweighted loss is a smooth function of the parameters.
    trainer = problems.trainer(2, optimizer=optax.sgd(1.0), timings=SHORT)
    trainer.initialize_trajstates()
    point = trainer._points

    def loss(sigma):
        params = {**trainer.params, "sigma": jnp.float32(sigma)}
        (result,) = point.evaluate_here([0], params, trainer.trajectories)
        return float(result.loss), float(result.gradient["sigma"])

    h = 2e-3
    expected = (loss(0.95 + h)[0] - loss(0.95 - h)[0]) / (2 * h)
    assert loss(0.95)[1] == pytest.approx(expected, rel=2e-2)


@pytest.mark.once
def test_ten_epochs_equal_five_restored_and_five_more_bit_for_bit(tmp_path):
    keywords = {"timings": SHORT, "reweight_ratio": 0.97, "sim_batch_size": 2, "checkpoint_path": tmp_path}
    whole = problems.trainer(3, **keywords)
    whole.initialize_trajstates()
    whole.train(10, checkpoint_freq=5)
    assert sum(len(entry["recomputed"]) for entry in whole.history) > 5
    other_start = {"epsilon": jnp.asarray(0.5), "sigma": jnp.asarray(0.9)}
    resumed = problems.trainer(3, **keywords, init_params=other_start)
    resumed.restore(tmp_path / "epoch-000005")
    assert resumed.epoch == 5
    resumed.train(5)
    for a, b in ((whole.params, resumed.params), (whole.best_params, resumed.best_params)):
        assert problems.bits(a) == problems.bits(b)
    for name in ("loss", "batch", "epoch", "update"):
        assert [e[name] for e in whole.history[-5:]] == [e[name] for e in resumed.history[-5:]]
    assert problems.bits(whole._state.opt_state) == problems.bits(resumed._state.opt_state)
    # Early stopping and the best parameters look at these.
    assert whole._state.epoch_losses == resumed._state.epoch_losses
    assert whole._state.best_loss == resumed._state.best_loss
    states = [[(t.chains, t.snapshots) for t in x.trajectories] for x in (whole, resumed)]
    assert problems.bits(states[0]) == problems.bits(states[1])


@pytest.mark.once
@pytest.mark.parametrize("box", [4.0, [4.0, 4.1, 3.9], np.diag([4.0, 4.1, 3.9])], ids=["edge", "edges", "matrix"])
def test_training_at_constant_pressure_knows_the_volume_of_every_snapshot(box):
    trainer = DifftreParallel(**problems.constant_pressure(2, box))
    trainer.initialize_trajstates()
    trainer.train(1)
    assert np.isfinite(trainer.history[0]["loss"])
    # Reweighted to another pressure by hand.
    trajectory, point = trainer.trajectories[0], trainer._points
    wanted = {**point.kwargs[0], "pressure": jnp.float32(0.6)}
    params = {"epsilon": jnp.float32(0.9), "sigma": jnp.float32(0.95)}
    boxes = np.asarray(jax.vmap(lambda state: state.box)(trajectory.snapshots))
    volumes = np.linalg.det(boxes) if boxes.ndim == 3 else np.prod(boxes, axis=1)
    (exponent,) = point.objective.weights(params, [(trajectory, wanted)])
    np.testing.assert_allclose(exponent, -0.1 * volumes / wanted["kT"], rtol=1e-4, atol=1e-4)


@pytest.mark.once
def test_constant_pressure_resumes_bit_for_bit(tmp_path):
    keywords = {"reweight_ratio": 0.999, "checkpoint_path": tmp_path}
    whole, resumed = (DifftreParallel(**problems.constant_pressure(2, **keywords)) for _ in range(2))
    whole.initialize_trajstates()
    whole.train(4, checkpoint_freq=2)
    assert sum(len(entry["recomputed"]) for entry in whole.history[2:]) > 0
    resumed.restore(tmp_path / "epoch-000002")
    resumed.train(2)
    assert [e["loss"] for e in whole.history[-2:]] == [e["loss"] for e in resumed.history]
    states = [[(t.chains, t.snapshots) for t in x.trajectories] for x in (whole, resumed)]
    assert problems.bits((whole.params, states[0])) == problems.bits((resumed.params, states[1]))


def test_an_epoch_that_broke_off_is_not_saved(tmp_path):
    trainer = problems.trainer(2, timings=SHORT, sim_batch_size=1)
    trainer.initialize_trajstates()
    update, calls = trainer._rule.update, []

    def second_fails(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise NonFiniteError("bad luck")
        return update(*arguments)

    trainer._rule.update = second_fails
    with pytest.raises(NonFiniteError):
        trainer.train(1)
    with pytest.raises(CheckpointError, match="epoch 1 broke off"):
        trainer.save(tmp_path / "c")
    assert not (tmp_path / "c").exists()
    trainer.train(1)
    trainer.save(tmp_path / "c")


@pytest.mark.parametrize("name", ["key", "timings", "state_kwargs", "targets"])
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(trained, tmp_path, name):
    own = problems.arguments(2, timings=SHORT)
    other = {
        "key": jax.random.PRNGKey(9),
        "timings": process_printouts(0.005, 0.3, 0.1, 0.05),
        "state_kwargs": {**own["state_kwargs"], "kT": jnp.full(2, 1.1)},
        "targets": {**own["targets"], "pressure": {"target": jnp.zeros(2), "gamma": jnp.ones(2)}},
    }
    trainer = problems.trainer(2, **{"timings": SHORT, name: other[name]})
    with pytest.raises(CheckpointError, match=f"another {name};"):
        trainer.restore(trained.save(tmp_path / "c"))
    assert trainer.trajectories is None
    trained.save_trajstates(tmp_path / "t")
    if name in ("timings", "state_kwargs"):
        with pytest.raises(CheckpointError, match=f"another {name};"):
            trainer.load_trajstates(tmp_path / "t")
    else:
        trainer.load_trajstates(tmp_path / "t")


def test_refreshed_trajectories_after_a_restore_are_those_of_the_uninterrupted_run(tmp_path):
    whole, resumed = (problems.trainer(2, timings=SHORT, traj_states_on_host=host) for host in (False, True))
    whole.initialize_trajstates()
    whole.refresh_trajstates()
    resumed.restore(whole.save(tmp_path / "c"))
    assert isinstance(resumed.trajectories[0].snapshots.position, np.ndarray)
    for trainer in (whole, resumed):
        trainer.refresh_trajstates(num_runs=2)
    snapshots = [problems.bits([t.snapshots for t in x.trajectories]) for x in (whole, resumed)]
    assert snapshots[0] == snapshots[1]


def test_a_nan_rejects_the_update_and_leaves_an_error_state(tmp_path):
    arguments = problems.arguments(2, timings=SHORT, checkpoint_path=tmp_path)
    arguments["energy_fn_template"] = poisoned(arguments["energy_fn_template"])
    trainer = type(problems.trainer(2))(**arguments)
    trainer.initialize_trajstates()
    trainer.train(1, checkpoint_freq=1)
    before = problems.bits((trainer.params, trainer.trajectories[0].chains))
    with pytest.raises(NonFiniteError, match="not finite"):
        trainer.train(5, checkpoint_freq=1)
    assert trainer.epoch == len(trainer.history) == 2
    assert float(trainer.params["epsilon"]) > 0.93
    error = next(tmp_path.glob("*_error_state"))
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        trainer.restore(error)
    with pytest.raises(CheckpointError, match="error"):
        load_checkpoint(error)
    stored = load_checkpoint(error, allow_error_state=True)
    assert stored.meta["epoch_complete"] is False
    assert all(np.all(np.isfinite(a)) for k, a in stored.arrays.items() if k.startswith("params"))
    assert len(list_checkpoints(tmp_path)) >= 2
    assert before != problems.bits((trainer.params, trainer.trajectories[0].chains))


def test_rejected_update_leaves_everything_as_it_was():
    trainer = problems.trainer(2, timings=SHORT, optimizer=optax.chain(optax.adam(0.02), optax.scale(jnp.nan)))
    trainer.initialize_trajstates()

    def everything():
        return problems.bits((trainer.params, trainer._state.opt_state, [t.snapshots for t in trainer.trajectories]))

    before = everything()
    with pytest.raises(NonFiniteError, match="parameters were left"):
        trainer.train(1)
    assert everything() == before
    assert trainer.history == []


@pytest.mark.parametrize("name", ["x_error_state", "x_error_state.pkl"])
def test_error_states_are_refused_by_name(trained, tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        trained.restore(tmp_path / name)


def test_checkpoint_of_other_shapes_is_refused_and_changes_nothing(trained, tmp_path):
    path = trained.save(tmp_path / "c")
    other = problems.trainer(3, timings=SHORT)
    before = problems.bits(other.params)
    with pytest.raises(CheckpointError, match="trajectories/2"):
        other.restore(path)
    assert problems.bits(other.params) == before
    assert other.epoch == 0


def test_trajectories_are_saved_and_loaded_bit_for_bit(trained, tmp_path):
    trained.save_trajstates(tmp_path / "t")
    other = problems.trainer(2, timings=SHORT)
    other.load_trajstates(tmp_path / "t")
    for a, b in zip(trained.trajectories, other.trajectories, strict=True):
        assert problems.bits((a.chains, a.snapshots, a.reference_energy)) == problems.bits(
            (b.chains, b.snapshots, b.reference_energy)
        )
        assert a.capacity == b.capacity
    with pytest.raises(CheckpointError, match="kind"):
        other.restore(tmp_path / "t")


def test_unwritable_path_is_an_error_of_the_right_type(trained, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((CheckpointError, RankError)):
        trained.save_trajstates(tmp_path / "file" / "t")


def test_predictions_follow_the_temperature(trained):
    here = trained.predict()
    warmer = trained.predict(state_kwargs={"kT": jnp.array([1.05, 1.65])})
    assert here["energy"].shape == (2,)
    assert np.all(warmer["n_eff"] < here["n_eff"] + 1e-6)
    assert np.all(warmer["energy"] > here["energy"])


def test_predictions_in_another_box_are_refused(trained):
    with pytest.raises(ArgumentError, match="at another box"):
        trained.predict(state_kwargs={"kT": 1.0, "box": 4.0})


def test_a_barostat_without_a_pressure_is_refused():
    kwargs = {"kT": jnp.ones(2), "box": jnp.full(2, 4.0)}
    trainer = DifftreParallel(**problems.constant_pressure(2, state_kwargs=kwargs))
    with pytest.raises(RankError, match="has no 'pressure'"):
        trainer.initialize_trajstates()


def test_no_program_is_compiled_after_the_first_epochs():
    keywords = {"sim_batch_size": 2, "reweight_ratio": 0.99, "overflow_capacity_multiplier": 3.0}
    trainer = problems.trainer(4, timings=SHORT, **keywords)
    trainer.initialize_trajstates()
    trainer.train(2)
    before = trainer.compilations
    trainer.train(10)
    counts = {len(entry["recomputed"]) for entry in trainer.history}
    assert len(counts) > 1, "the number of stale state points must vary for this test to mean anything"
    assert trainer.compilations == before
    assert before["simulate"] == before["gradient"] == before["energies"] == 1


@pytest.mark.once
def test_bucketing_puts_stale_state_points_together():
    trainer = problems.trainer(4, timings=SHORT, sim_batch_size=2, reweight_ratio=0.5)
    trainer.initialize_trajstates()
    rule, state = trainer._rule, trainer._state
    shifted = [t.reference_energy for t in state.trajectories]
    for k in (1, 2):
        tilt = jnp.arange(4.0) * 50.0
        state.trajectories[k] = type(state.trajectories[k])(
            **{**vars(state.trajectories[k]), "reference_energy": shifted[k] + tilt}
        )
    trainer.train(1)
    assert rule is trainer._rule
    assert sorted(map(tuple, (entry["recomputed"] for entry in trainer.history))) == [(), (1, 2)]


def test_step_size_search_keeps_the_effective_sample_size():
    keywords = {"timings": SHORT, "optimizer": optax.sgd(0.01), "reweight_ratio": 0.9}
    free = problems.trainer(2, **keywords)
    bound = problems.trainer(2, allowed_reduction=0.9, **keywords)
    for trainer in (free, bound):
        trainer.initialize_trajstates()
        trainer.train(1)
    assert bound.history[0]["step_size"] < 1.0
    moved = jax.tree.map(lambda a, b: float(abs(a - b)), bound.params, {"epsilon": 0.9, "sigma": 0.95})
    assert max(moved.values()) > 0.0
    assert float(np.min(bound.predict()["n_eff"])) >= 0.9 * 4 - 1e-4
    assert float(np.min(free.predict()["n_eff"])) < 0.9 * 4


def test_a_step_that_nothing_shortens_enough_is_logged(caplog):
    keywords = {"timings": SHORT, "optimizer": optax.sgd(10.0)}
    trainer = problems.trainer(2, allowed_reduction=0.9, **keywords)
    trainer.initialize_trajstates()
    trainer._points.effective_samples = lambda points, *_: dict.fromkeys(points, 0.0)
    assert trainer._rule._step_size(
        3.6, [0, 1], trainer.params, trainer.params, trainer.trajectories, None
    ) == pytest.approx(1 / 64)
    assert "no fraction of the update" in caplog.text


def test_resampled_starts_and_host_trajectories_work():
    trainer = problems.trainer(
        2, timings=SHORT, reweight_ratio=1.0, resample_simstates=True, traj_states_on_host=True, vmap_batch=2
    )
    trainer.initialize_trajstates()
    trainer.train(3)
    assert isinstance(trainer.trajectories[0].snapshots.position, np.ndarray)
    assert all(np.isfinite(entry["loss"]) for entry in trainer.history)


def test_early_stopping_stops():
    trainer = problems.trainer(2, timings=SHORT, optimizer=optax.sgd(0.0), convergence_criterion="window_median")
    trainer.initialize_trajstates()
    trainer.train(50, threshold=1e-3)
    assert trainer.epoch == 10


def test_custom_losses_and_weights():
    losses = {"energy": lambda prediction, target: jnp.abs(prediction - target)}
    trainer = problems.trainer(2, timings=SHORT, target_loss_fns=losses)
    trainer.initialize_trajstates()
    predictions = trainer.predict()
    trainer.train(1)
    targets = problems.arguments(2)["targets"]
    expected = 1e-3 * np.abs(predictions["energy"] - targets["energy"]["target"])
    expected += (predictions["pressure"] - targets["pressure"]["target"]) ** 2
    assert trainer.history[0]["loss"] == pytest.approx(float(expected.mean()), rel=1e-4)


def test_one_log_line_an_update(caplog):
    with caplog.at_level(logging.INFO, "chemtrain_mpi"):
        trainer = problems.trainer(2, timings=SHORT)
        trainer.initialize_trajstates()
        trainer.train(2)
    assert sum("loss" in record.message for record in caplog.records) == 2
    assert any("MB of trajectories" in record.message for record in caplog.records)


def test_reference_states_may_be_simulator_states(trained):
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(t.chains[0].state for t in trained.trajectories))
    other = problems.trainer(2, timings=SHORT, reference_states=states)
    other.initialize_trajstates()
    assert np.isfinite(other.predict()["energy"]).all()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"parallelism": "jax"}, "not supported"),
        ({"parallelism": "threads"}, "use 'auto'"),
        ({"sim_batch_size": 0}, "sim_batch_size is 0"),
        ({"sim_batch_size": 9}, "1 to 2"),
        ({"reweight_ratio": 1.5}, "reweight_ratio is 1.5"),
        ({"allowed_reduction": 0.0}, "allowed_reduction is 0.0"),
        ({"allowed_reduction": 0.95, "reweight_ratio": 0.9}, "0.95 is above reweight_ratio 0.9"),
        ({"max_neighbor_retries": -1}, "cannot be negative"),
        ({"vmap_batch": 0}, "at least 1"),
        ({"num_chains": 0}, "num_chains is 0"),
        ({"overflow_capacity_multiplier": 0.9}, "above 1"),
        ({"state_kwargs": {"box": 4.0}}, "no 'kT'"),
        ({"state_kwargs": {"kT": np.ones(3), "box": 4.0}}, "first axis must be the 2 state points"),
        ({"targets": {}}, "targets is empty"),
        ({"targets": {"energy": {"target": np.ones(2)}}}, "'gamma'"),
        ({"targets": {"colour": {"target": np.ones(2), "gamma": np.ones(2)}}}, "no observable"),
        ({"target_loss_fns": {"colour": abs}}, "no targets"),
        ({"convergence_criterion": "luck"}, "max_loss"),
        ({"key": jax.random.key(0, impl="rbg")}, "threefry"),
    ],
)
def test_senseless_arguments_are_refused_at_construction(overrides, says):
    with pytest.raises((ArgumentError, RankError), match=says):
        problems.trainer(2, **overrides)


def test_typed_and_raw_keys_are_the_same_seed():
    trainers = [problems.trainer(2, timings=SHORT, key=key) for key in (jax.random.PRNGKey(3), jax.random.key(3))]
    for trainer in trainers:
        trainer.initialize_trajstates()
    assert problems.bits(trainers[0].trajectories[0].chains) == problems.bits(trainers[1].trajectories[0].chains)


def test_threshold_without_a_criterion_and_checkpoints_without_a_folder_are_refused(trained):
    with pytest.raises(ArgumentError, match="convergence_criterion"):
        trained.train(1, threshold=0.1)
    with pytest.raises(ArgumentError, match="checkpoint_path"):
        trained.train(1, checkpoint_freq=1)


def test_the_history_file_and_the_bar_tell_every_update(tmp_path, capsys):
    path = tmp_path / "made" / "history.jsonl"
    trainer = problems.trainer(2, timings=SHORT, history_path=path, progress=True)
    trainer.initialize_trajstates()
    trainer.train(2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == trainer.history
    bar = capsys.readouterr().err
    assert "trajectories: 100%" in bar
    assert "2/2" in bar
    assert f"loss {trainer.history[1]['loss']:.4g}" in bar
