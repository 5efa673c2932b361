"""The protocol's failure cases on real MPI ranks and on real gloo ranks."""

import sys
import time
from pathlib import Path

import pytest

from distmd_protocol.testkit import RanksTimedOut, run_ranks

# The bodies are the protocol's own; here they meet the communicators that the two packages hand it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared" / "tests"))
import failure_cases as cases

SIZES = [1, 2, 4]
ANY_ONE = [(size, failing) for size in SIZES for failing in range(size)]
pytestmark = pytest.mark.parametrize(
    "launcher", [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("gloo", marks=pytest.mark.gloo)]
)


def same_on_every_rank(results):
    for result in results:
        assert isinstance(result, dict), result
        assert result["seconds"] < cases.LIMIT_S
        assert result["after"] == list(range(len(results))), "the communicator is out of step"
        assert [result[key] for key in ("class", "text", "failures")] == [
            results[0][key] for key in ("class", "text", "failures")
        ]


@pytest.mark.parametrize(("size", "failing"), ANY_ONE)
def test_a_raise_inside_agree_is_the_same_error_on_every_rank(launcher, size, failing):
    results = run_ranks(cases.agree_raises_on, size, [failing], launcher=launcher)
    same_on_every_rank(results)
    assert results[0]["failures"] == [[failing, "ValueError", f"no luck on {failing}"]]


@pytest.mark.parametrize("size", SIZES)
def test_a_raise_inside_rank_zero_is_the_same_error_on_every_rank(launcher, size):
    results = run_ranks(cases.rank_zero_raises, size, "OSError", launcher=launcher)
    same_on_every_rank(results)
    assert results[0]["failures"] == [[0, "OSError", "the disk is full"]]


@pytest.mark.parametrize("size", SIZES)
def test_results_of_rank_zero_arrive_everywhere(launcher, size):
    for result in run_ranks(cases.rank_zero_returns, size, launcher=launcher):
        assert result["results"] == [None, 3, "x", {"a": [1, 2]}, [1, 2], 0.1]
        assert result["path"] == [True, "a/b"]
        assert result["bytes"] == [True, [0, 255]]


@pytest.mark.parametrize(("size", "failing"), [(2, 1), (4, 0)])
@pytest.mark.parametrize("body", [cases.uncaught_on, cases.killed], ids=["uncaught", "killed"])
def test_all_ranks_are_gone_within_ten_seconds(launcher, body, size, failing):
    outcomes = run_ranks(body, size, failing, launcher=launcher, fresh=True, timeout=60)
    assert len(outcomes) == size
    for outcome in outcomes:
        assert outcome.result is None, f"rank {outcome.rank} went on"
        assert outcome.exit_code != 0
        assert outcome.seconds < cases.LIMIT_S


def test_a_hang_is_a_failure_with_every_stack(launcher):
    with pytest.raises(RanksTimedOut) as caught:
        run_ranks(wait_for_nobody, 2, launcher=launcher, timeout=3)
    assert "wait_for_nobody" in str(caught.value)


def wait_for_nobody(comm):
    """Rank zero waits in a collective that rank one never enters."""
    if comm.rank == 0:
        comm.barrier()
    time.sleep(300)
