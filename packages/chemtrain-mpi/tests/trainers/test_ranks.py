"""What several MPI ranks do together: bitwise the same, evenly shared, and no rank left waiting."""

import os

import numpy as np
import pytest
import ranks_jobs

from distmd_protocol import LocalComm
from distmd_protocol.testkit import run_ranks

pytestmark = pytest.mark.mpi
LONG = 240.0


def ranks(job, size, *arguments, **keywords):
    return run_ranks(getattr(ranks_jobs, job), size, *arguments, launcher="mpi", timeout=LONG, **keywords)


@pytest.mark.parametrize(
    ("job", "keywords"),
    [
        ("train", {}),
        pytest.param("train_64", {}, marks=pytest.mark.once),
        pytest.param("train_with_matrix_products", {"epochs": 4}, marks=pytest.mark.once),
        pytest.param("train_with_matrix_products", {}, marks=pytest.mark.slow),
        pytest.param("train_with_matrix_products_64", {}, marks=pytest.mark.slow),
    ],
)
def test_one_two_and_four_ranks_agree_bit_for_bit(job, keywords):
    # The one rank may use every core of this machine, and would if its number of threads were not fixed.
    assert len(os.sched_getaffinity(0)) > 1 or os.cpu_count() == 1
    alone = getattr(ranks_jobs, job)(LocalComm(), **keywords)
    assert len(alone["losses"]) == keywords.get("epochs", 20)
    assert sum(map(len, alone["recomputed"])) > 0, "without recomputation the test says little"
    for size in (2, 4):
        for result in ranks(job, size, **keywords):
            assert result == alone


@pytest.mark.parametrize("job", ["train_harmonic_chains", pytest.param("train_chains", marks=pytest.mark.slow)])
def test_chains_and_free_energies_do_not_depend_on_the_ranks(job):
    alone = getattr(ranks_jobs, job)(LocalComm())
    assert sum(map(len, alone["recomputed"])) >= 2
    assert ranks(job, 2) == [alone, alone]


@pytest.mark.once
def test_two_ranks_at_constant_pressure_agree_with_one_bit_for_bit():
    alone = ranks_jobs.train_at_constant_pressure(LocalComm())
    assert sum(map(len, alone["recomputed"])) > 0
    assert ranks("train_at_constant_pressure", 2) == [alone, alone]


@pytest.mark.once
def test_nose_hoover_and_bounded_steps_do_not_depend_on_the_ranks():
    alone = ranks_jobs.train_with_nose_hoover_and_bounded_steps(LocalComm())
    assert sum(map(len, alone["recomputed"])) > 0
    assert min(alone["steps"]) < 1.0
    assert ranks("train_with_nose_hoover_and_bounded_steps", 2) == [alone, alone]


@pytest.mark.once
def test_vectorised_state_points_and_all_reduce_agree_with_the_ordered_sum_to_rounding():
    ordered = ranks_jobs.train_by_all_reduce(LocalComm(), deterministic=True)
    assert ordered["recomputed"] == [0, 2]
    for result in ranks("train_by_all_reduce", 2):
        # Rank zero has two state points at first and one later; rank one has one.
        assert result["compilations"]["gradient"] <= 2
        assert result["recomputed"] == ordered["recomputed"]
        # Rounding grows over the fifty steps of the trajectories in between.
        np.testing.assert_allclose(result["steps"], ordered["steps"], rtol=1e-3)
        np.testing.assert_allclose(result["loss"], ordered["loss"], rtol=1e-3)
        np.testing.assert_allclose(result["n_eff"], ordered["n_eff"], rtol=1e-3)


@pytest.mark.once
def test_overflow_on_one_rank_repeats_only_that_state_point():
    alone = ranks_jobs.train_with_overflow_on_one_state_point(LocalComm())
    slots = [capacity[0] for capacity in alone["capacities"]]
    assert slots[1] == max(slots)
    for result in ranks("train_with_overflow_on_one_state_point", 2):
        assert result == alone


def test_stale_state_points_are_dealt_evenly():
    assert ranks("simulated_here", 2) == [[3], [6]]


@pytest.mark.parametrize(
    "name",
    [
        "targets",
        "timings",
        "state_kwargs",
        "init_params",
        "key",
        "optimizer",
        "convergence_criterion",
        "traj_states_on_host",
        "num_chains",
        "simulator_template",
    ],
)
def test_arguments_that_differ_between_ranks_are_named(name):
    for message in ranks("differing_argument", 2, name):
        assert message.startswith("AgreementError")
        assert f"{name} (ranks 1)" in message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("optimizer", "optimizer (ranks 1)"),
        ("schedule", "optimizer (ranks 1)"),
        ("convergence_criterion", "convergence_criterion (ranks 1)"),
        ("loss_fn", "loss_fn, target_loss_fns (ranks 1)"),
        ("energy_fn_template", "at the start of the state points (ranks 1)"),
        ("observable", "the observable 'energy' (ranks 1)"),
    ],
)
def test_functions_that_do_something_else_on_a_rank_are_named(name, says):
    for message in ranks("differing_function", 2, name):
        assert message.startswith("AgreementError")
        assert says in message
        assert "'pressure'" not in message


def test_two_devices_on_one_rank_are_an_error_on_all():
    messages = ranks("two_devices_on_one_rank", 2)
    assert messages[0] == messages[1]
    assert "rank 1 sees 2 devices" in messages[0]


def test_batch_smaller_than_the_ranks_is_refused():
    for message in ranks("construction_error", 2, sim_batch_size=1):
        assert "fewer than the 2 MPI ranks" in message


@pytest.mark.parametrize("where", ["simulation", "evaluation", "history"])
def test_a_failure_on_one_rank_is_the_same_error_on_all(where, tmp_path):
    messages = ranks("one_rank_fails", 2, where, str(tmp_path))
    assert messages[0] == messages[1]
    assert "no error" not in messages
    assert ("rank 0" if where == "history" else "rank 1: ValueError: bad luck") in messages[0]


def test_a_file_that_one_rank_cannot_write_or_read_is_the_same_error_on_all(tmp_path):
    results = ranks("files_that_fail", 2, str(tmp_path))
    for method in ("save", "save_trajstates"):
        assert results[0][method] == results[1][method]
        assert "rank 0" in results[0][method]
        assert "blocked" in results[0][method]
    # Each rank also names the path that it was given itself.
    for method in ("restore", "load_trajstates"):
        for result in results:
            assert "rank 1" in result[method]
            assert "there is no checkpoint at" in result[method]
            assert "-gone" in result[method]


def test_a_nan_on_one_rank_rejects_the_update_on_all(tmp_path):
    for result in ranks("nan_on_one_rank", 2, str(tmp_path)):
        assert result["message"].startswith("NonFiniteError")
        assert "state points [2]" in result["message"]
        assert result["unchanged"]
        assert result["epoch"] == 2
    assert (tmp_path / "epoch-000003_error_state").is_dir()


# The ranks run under other thread settings than this process, and the checkpoint says so.
@pytest.mark.filterwarnings("ignore::distmd_protocol.PrecisionWarning")
def test_checkpoints_need_the_same_number_of_ranks_and_trajectories_do_not(tmp_path):
    saved = ranks("save_and_report", 2, str(tmp_path))
    for message in [ranks_jobs.restore_and_train(LocalComm(), str(tmp_path / "epoch-000002"), 1)]:
        assert "mpirun -np 2" in message
    alone = ranks_jobs.load_trajectories(LocalComm(), str(tmp_path / "trajectories"))
    assert ranks("load_trajectories", 2, str(tmp_path / "trajectories")) == [alone, alone]
    assert saved[0] == saved[1]


@pytest.mark.once
def test_killed_rank_ends_the_others_and_the_run_resumes_bit_for_bit(tmp_path):
    outcomes = run_ranks(ranks_jobs.killed_in_epoch_two, 2, str(tmp_path), launcher="mpi", timeout=LONG, fresh=True)
    assert all(outcome.result is None for outcome in outcomes)
    assert sorted(path.name for path in tmp_path.glob("epoch-*")) == ["epoch-000001", "epoch-000002"]
    whole = ranks("save_and_report", 2, str(tmp_path / "whole"), epochs=4)
    resumed = ranks("restore_and_train", 2, str(tmp_path / "epoch-000002"), 2)
    assert resumed[0]["params"] == whole[0]["params"]
    assert resumed[1]["states"] == whole[1]["states"]


def test_ranks_in_different_operations_get_an_error_naming_both():
    for message in ranks("mismatched_operations", 2):
        assert message.startswith("OrderError")
        assert "'train: broadcast'" in message
        assert "'predict: broadcast'" in message


@pytest.mark.parametrize("size", [2, 4])
def test_arrays_are_shared_bit_for_bit(size):
    results = ranks("share_arrays", size)
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 15


def test_sum_over_ranks():
    assert ranks("sum_arrays", 2) == [[0.0, 3.0, 6.0]] * 2


def test_reduced_precision_is_warned_of_once_a_process():
    for messages in ranks("warnings_under_reduced_precision", 2):
        assert len(messages) == 1
        assert "bfloat16" in messages[0]
        assert "pin_fp32" in messages[0]
