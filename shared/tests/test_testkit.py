from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from distmd_protocol import ProtocolError
from distmd_protocol.testkit import (
    RanksFailed,
    RanksTimedOut,
    close_pools,
    launchers,
    run_ranks,
    runner,
    why_unavailable,
)
from distmd_protocol.testkit.launchers import mpirun_command

HERE = os.path.dirname(__file__)


def pid(comm):
    comm.barrier()
    return os.getpid()


def give_back(comm, *args, **kwargs):
    return [comm.rank, comm.size, list(args), kwargs]


def numpy_result(comm):
    return {"array": np.arange(3.0), "scalar": np.float32(0.5)}


def fail_on(comm, rank):
    if comm.rank == rank:
        raise LookupError(f"on {rank}")
    return comm.rank


def fail_and_leave_the_others_waiting(comm):
    if comm.rank == 1:
        raise LookupError("on 1")
    comm.barrier()


def hang_on(comm, rank):
    if comm.rank == rank:
        a_long_sleep()
    return comm.rank


def a_long_sleep():
    time.sleep(300)


def hang_far_down(comm, depth):
    if depth == 0:
        a_long_sleep()
    hang_far_down(comm, depth - 1)


def hold_the_interpreter_lock(comm):
    import re

    re.match("(a+)+$", "a" * 60 + "b")


def die(comm, rank):
    if comm.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def start_a_child_and_hang(comm):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with open(f"{os.environ['CHILD_FILE']}", "w") as file:
        file.write(str(child.pid))
    time.sleep(300)


def unjsonable(comm):
    return object()


def environment(comm):
    return {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "NPROC", "EXTRA")}


def different_collectives(comm):
    if comm.rank == 0:
        comm.barrier()
    else:
        comm.allgather(1)


def exists(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def gone_within(processes, seconds):
    deadline = time.monotonic() + seconds
    while any(exists(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_results_come_by_rank_and_arguments_go_there():
    assert run_ranks(give_back, 2, 1, "a", x=[None]) == [[rank, 2, [1, "a"], {"x": [None]}] for rank in range(2)]
    assert run_ranks("test_testkit:give_back", 1) == [[0, 1, [], {}]]


def test_numpy_results_travel_as_lists():
    assert run_ranks(numpy_result, 1) == [{"array": [0, 1, 2], "scalar": 0.5}]


def test_workers_are_kept_by_size_and_replaced_after_a_failure():
    two, one = run_ranks(pid, 2), run_ranks(pid, 1)
    assert run_ranks(pid, 2) == two
    with pytest.raises(RanksFailed):
        run_ranks(fail_on, 2, 0)
    assert gone_within(two, 5)
    again = run_ranks(pid, 2)
    assert not set(again) & set(two)
    assert run_ranks(pid, 1) == one


def test_idle_workers_are_limited(monkeypatch):
    monkeypatch.setattr(runner, "MAX_IDLE_RANKS", 3)
    one, two = run_ranks(pid, 1), run_ranks(pid, 2)
    assert run_ranks(pid, 1) == one
    run_ranks(pid, 3)
    assert gone_within([*one, *two], 5)
    close_pools()


def test_a_failure_names_every_rank_with_its_traceback():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_on, 2, 1)
    (failure,) = caught.value.failures
    assert (failure.rank, failure.type, failure.message) == (1, "LookupError", "on 1")
    assert "raise LookupError" in failure.traceback
    assert "fail_on on 2 ranks (local)" in str(caught.value)


def test_ranks_left_waiting_by_a_failure_are_shown_and_ended(monkeypatch):
    monkeypatch.setattr("distmd_protocol.testkit.pool.AFTER_FAILURE_S", 0.5)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_and_leave_the_others_waiting, 2)
    assert [failure.type for failure in caught.value.failures] == ["no answer", "LookupError"]
    assert "in fail_and_leave_the_others_waiting" in str(caught.value)


def test_a_timeout_ends_all_ranks_and_shows_each_stack():
    processes = run_ranks(pid, 2)
    begin = time.monotonic()
    with pytest.raises(RanksTimedOut) as caught:
        run_ranks(hang_on, 2, 1, timeout=1.0)
    assert time.monotonic() - begin < 10
    assert caught.value.missing == (1,)
    text = str(caught.value)
    assert "stack of rank 0" in text
    assert "stack of rank 1" in text
    assert "in a_long_sleep" in text
    assert gone_within(processes, 5)
    assert run_ranks(give_back, 2)[1][0] == 1


def test_a_stack_is_shown_whole():
    # 70 calls are some 8,000 characters, and the innermost comes first: it is the one that says what is waited for.
    with pytest.raises(RanksTimedOut) as caught:
        run_ranks(hang_far_down, 2, 70, timeout=1.0)
    for stack in str(caught.value).split("--- stack of rank ")[1:]:
        assert "in a_long_sleep" in stack
        assert stack.count("in hang_far_down") == 71
        assert "in main" in stack


def test_a_rank_that_holds_the_interpreter_lock_is_shown_and_ended_too():
    with pytest.raises(RanksTimedOut, match="in hold_the_interpreter_lock"):
        run_ranks(hold_the_interpreter_lock, 1, timeout=1.0)


def test_a_rank_that_dies_is_a_failure():
    with pytest.raises(RanksFailed, match="rank 1: died"):
        run_ranks(die, 2, 1)


def test_children_of_ranks_are_ended_with_them(tmp_path):
    file = tmp_path / "child"
    with pytest.raises(RanksTimedOut):
        run_ranks(start_a_child_and_hang, 1, timeout=2.0, fresh=True, env={"CHILD_FILE": str(file)})
    assert gone_within([int(file.read_text())], 5)


def test_ranks_in_different_collectives_get_an_error_naming_both():
    with pytest.raises(RanksFailed, match=r"different collectives: rank 0: barrier .*; rank 1: allgather"):
        run_ranks(different_collectives, 2)


def test_results_that_cannot_travel_are_a_failure():
    with pytest.raises(RanksFailed, match="return JSON-able values"):
        run_ranks(unjsonable, 1)


def test_functions_must_be_found_by_another_process():
    with pytest.raises(ProtocolError, match="top level of a module"):
        run_ranks(lambda comm: 1, 1)
    with pytest.raises(ProtocolError, match="fresh=True"):
        run_ranks(pid, 1, env={"A": "1"})
    with pytest.raises(ProtocolError, match="unknown launcher 'pvm'; use one of local, mpi, gloo"):
        run_ranks(pid, 1, launcher="pvm")


def test_ranks_have_one_thread_each_and_the_environment_asked_for():
    (outcome,) = run_ranks(environment, 1, fresh=True, env={"EXTRA": "x"})
    assert outcome.result == {"OMP_NUM_THREADS": "1", "NPROC": "1", "EXTRA": "x"}
    assert (outcome.exit_code, outcome.failure) == (0, None)


def test_fresh_ranks_leave_when_done_and_their_failures_are_outcomes():
    outcomes = run_ranks(fail_on, 2, 1, fresh=True)
    assert [outcome.exit_code for outcome in outcomes] == [0, 1]
    assert outcomes[1].failure.message == "on 1"
    assert outcomes[0].result == 0


def test_a_fresh_run_has_its_time_limit():
    with pytest.raises(RanksTimedOut, match="in a_long_sleep"):
        run_ranks(hang_on, 2, 0, fresh=True, timeout=1.0)


def test_a_call_inside_an_except_block_keeps_the_workers():
    first = run_ranks(pid, 1)
    try:
        raise LookupError
    except LookupError:
        assert run_ranks(pid, 1) == first
    assert run_ranks(pid, 1) == first


def run_a_parent(body):
    code = f"import sys, os, signal; sys.path.insert(0, {HERE!r})\n"
    code += "import test_testkit as t\nfrom distmd_protocol.testkit import *\n"
    return subprocess.run([sys.executable, "-c", code + body], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)", "sys.exit(0)"])
def test_workers_do_not_outlive_the_test_process(ending):
    done = run_a_parent(
        "from distmd_protocol.testkit import runner\nprint(*run_ranks(t.pid, 2), flush=True)\n"
        f"print(runner._pools.get('local', 2)._folder, file=sys.stderr, flush=True)\n{ending}"
    )
    processes = [int(word) for word in done.stdout.split()]
    assert len(processes) == 2, done.stderr
    assert gone_within(processes, 5)
    assert not os.path.exists(done.stderr.strip())


def test_workers_waiting_in_a_collective_do_not_outlive_the_test_process():
    done = run_a_parent(
        "import threading, time\nprint(*run_ranks(t.pid, 2), flush=True)\n"
        "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()\nrun_ranks(t.hang_on, 2, 0)"
    )
    processes = [int(word) for word in done.stdout.split()]
    assert len(processes) == 2, done.stderr
    assert gone_within(processes, 5)


def test_a_communicator_that_cannot_be_made_says_why(monkeypatch):
    monkeypatch.setattr(launchers, "FACTORIES", {"local": "test_testkit:no_such_factory"})
    monkeypatch.setenv("PYTHONPATH", HERE)
    with pytest.raises(RanksFailed, match="no_such_factory"):
        run_ranks(pid, 3)


def test_two_modules_of_one_name_are_kept_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twin.py").write_text(f"def where(comm):\n    return {folder!r}\n")
    found = []
    for folder in ("a", "b"):
        sys.path.insert(0, str(tmp_path / folder))
        try:
            import twin

            found += run_ranks(twin.where, 1)
        finally:
            sys.path.pop(0)
            del sys.modules["twin"]
    assert found == ["a", "b"]


@pytest.mark.parametrize(
    ("version", "root", "flags"),
    [
        ("mpirun (Open MPI) 5.0.11", True, ["--oversubscribe", "--bind-to", "none", "--allow-run-as-root", "-np", "3"]),
        ("mpirun (Open MPI) 4.1.4", False, ["--oversubscribe", "--bind-to", "none", "-np", "3"]),
        ("HYDRA build details:\n Version: 4.3", True, ["-np", "3"]),
    ],
)
def test_the_command_line_of_each_mpi(tmp_path, monkeypatch, version, root, flags):
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{version}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setattr(launchers, "_mpirun", lambda: str(program))
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    assert mpirun_command(3) == [str(program), *flags]


def test_what_is_missing_is_said(monkeypatch):
    assert why_unavailable("local") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_unavailable("mpi") == "launcher 'mpi' needs the modules chemtrain_mpi, mpi4py"
    with pytest.raises(ProtocolError, match="needs the modules nvalchemi_distributed, torch"):
        run_ranks(pid, 1, launcher="gloo")
