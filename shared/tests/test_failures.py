from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import failure_cases as cases
import pytest

from distmd_protocol import LocalComm, RankError, agree, rank_zero
from distmd_protocol.testkit import run_ranks

SIZES = [1, 2, 4]
ANY_ONE = [(size, failing) for size in SIZES for failing in range(size)]


def same_on_every_rank(results, keys=("class", "text", "failures")):
    for result in results:
        assert isinstance(result, dict), result
        assert result["seconds"] < cases.LIMIT_S
        assert result["after"] == list(range(len(results)))
        assert {key: result[key] for key in keys} == {key: results[0][key] for key in keys}


@pytest.mark.parametrize(("size", "failing"), ANY_ONE)
def test_agree_names_the_failing_rank_on_every_rank(size, failing):
    results = run_ranks(cases.agree_raises_on, size, [failing])
    same_on_every_rank(results)
    assert results[0]["failures"] == [[failing, "ValueError", f"no luck on {failing}"]]
    assert f"the list build failed on 1 of {size} ranks: rank {failing}" in results[0]["text"]
    assert [result["cause"] for result in results] == [
        "ValueError" if rank == failing else "NoneType" for rank in range(size)
    ]


def test_agree_lists_every_failing_rank():
    results = run_ranks(cases.agree_raises_on, 4, [3, 1])
    same_on_every_rank(results)
    assert [failure[0] for failure in results[0]["failures"]] == [1, 3]


@pytest.mark.parametrize("size", SIZES)
def test_agree_is_quiet_when_all_is_well(size):
    assert run_ranks(cases.agree_is_quiet, size) == [[rank, list(range(size))] for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["OSError", "CheckpointError", "AgreementError"])
def test_rank_zero_raises_the_same_on_every_rank(size, kind):
    results = run_ranks(cases.rank_zero_raises, size, kind)
    same_on_every_rank(results)
    assert results[0]["failures"] == [[0, kind, "the disk is full"]]
    assert all(result["is_checkpoint_error"] == (kind == "CheckpointError") for result in results)
    assert results[0]["cause"] == kind


@pytest.mark.parametrize("size", SIZES)
def test_rank_zero_returns_the_same_on_every_rank(size):
    for rank, result in enumerate(run_ranks(cases.rank_zero_returns, size)):
        assert result["results"] == [None, 3, "x", {"a": [1, 2]}, [1, 2], 0.1]
        assert result["path"] == [True, "a/b"]
        assert result["bytes"] == [True, [0, 255]]
        assert result["ran"] == ([0] if rank == 0 else [])


@pytest.mark.parametrize("size", SIZES)
def test_rank_zero_result_that_cannot_travel_fails_on_every_rank(size):
    results = run_ranks(cases.rank_zero_returns_nonsense, size)
    same_on_every_rank(results)
    assert "cannot travel" in results[0]["text"]


def test_interrupt_reaches_the_others_and_stays_an_interrupt():
    first, second = run_ranks(cases.interrupted_in_agree, 2)
    assert first == "KeyboardInterrupt"
    assert second["failures"] == [[0, "KeyboardInterrupt", ""]]


def test_one_rank_alone_raises_the_same_class():
    with pytest.raises(RankError, match="rank zero's int failed on 1 of 1 ranks: rank 0: ValueError"):
        rank_zero(LocalComm(), int, "x")
    with pytest.raises(RankError, match="rank 0: KeyError"), agree(LocalComm(), "x"):
        raise KeyError("k")
    with pytest.raises(KeyboardInterrupt), agree(LocalComm(), "x"):
        raise KeyboardInterrupt
    with pytest.raises(SystemExit):
        rank_zero(LocalComm(), sys.exit, 3)


@pytest.mark.parametrize(("size", "failing"), [(2, 0), (2, 1), (4, 2)])
def test_an_uncaught_error_ends_all_ranks(size, failing):
    outcomes = run_ranks(cases.uncaught_on, size, failing, fresh=True)
    assert outcomes[failing].failure.type == "ValueError"
    assert all(outcome.exit_code == 1 for outcome in outcomes)
    assert all(outcome.seconds < cases.LIMIT_S for outcome in outcomes)


def test_a_killed_rank_ends_all_ranks():
    outcomes = run_ranks(cases.killed, 2, 1, fresh=True)
    assert [outcome.exit_code for outcome in outcomes] == [1, -9]
    assert all(outcome.seconds < cases.LIMIT_S for outcome in outcomes)


def run_script(body):
    begin = time.monotonic()
    text = "import os, sys, threading, time\nfrom distmd_protocol import abort_on_uncaught\n" + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    return done, time.monotonic() - begin


def test_abort_on_uncaught_prints_the_traceback_and_calls_abort():
    done, _ = run_script("""
        abort_on_uncaught(lambda code: (print("aborting", code, flush=True), os._exit(7)))
        raise ValueError("the cause")
    """)
    assert done.stdout == "aborting 1\n"
    assert "ValueError: the cause" in done.stderr
    assert done.returncode == 7


@pytest.mark.parametrize("abort", ["lambda code: None", "lambda code: 1 / 0", "lambda code: time.sleep(60)"])
def test_an_abort_that_fails_or_hangs_still_ends_the_process(abort):
    done, seconds = run_script(f"""
        abort_on_uncaught({abort})
        raise ValueError("the cause")
    """)
    assert "ValueError: the cause" in done.stderr
    assert done.returncode == 1
    assert seconds < cases.LIMIT_S


def test_abort_on_uncaught_covers_threads():
    done, _ = run_script("""
        abort_on_uncaught(lambda code: os._exit(7))
        threading.Thread(target=lambda: 1 / 0).start()
        time.sleep(30)
    """)
    assert "ZeroDivisionError" in done.stderr
    assert done.returncode == 7


def test_a_thread_that_leaves_by_sys_exit_is_left_alone():
    done, _ = run_script("""
        abort_on_uncaught(lambda code: os._exit(7))
        thread = threading.Thread(target=sys.exit)
        thread.start()
        thread.join()
    """)
    assert done.returncode == 0


def test_a_normal_exit_is_left_alone():
    done, _ = run_script("""
        abort_on_uncaught(lambda code: os._exit(7))
        sys.exit(3)
    """)
    assert done.returncode == 3
