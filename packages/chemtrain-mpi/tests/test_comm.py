import comm_jobs
import pytest

from distmd_protocol.testkit import run_ranks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("size", [1, 2, 4])
def test_control_objects_travel_by_json_and_bytes(size):
    for rank, result in enumerate(run_ranks(comm_jobs.control_objects, size, launcher="mpi")):
        assert result == comm_jobs.expected(rank, size)


def test_objects_that_are_not_json_are_refused_before_they_are_sent():
    for message in run_ranks(comm_jobs.refuse_objects, 2, launcher="mpi"):
        assert message.startswith("ProtocolError")


def test_messages_of_the_users_communicator_never_meet_ours():
    assert run_ranks(comm_jobs.separate_contexts, 2, launcher="mpi") == [True, True]


def test_an_uncaught_error_on_one_rank_ends_all_within_ten_seconds():
    outcomes = run_ranks(comm_jobs.raise_on_rank_one, 2, launcher="mpi", fresh=True, timeout=90.0)
    assert all(outcome.seconds < 10.0 for outcome in outcomes)
    assert any(outcome.exit_code not in (0, None) for outcome in outcomes)


def test_jitted_sums_are_finished_and_right():
    # D23: non-contiguous input, and a program that could end right after the call.
    assert run_ranks(comm_jobs.jitted_sum, 2, launcher="mpi", timeout=120.0) == [True, True]


def test_large_buffers_travel_in_chunks():
    assert run_ranks(comm_jobs.chunked_broadcast, 2, launcher="mpi") == [True, True]
