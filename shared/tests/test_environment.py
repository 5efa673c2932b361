from __future__ import annotations

import pytest

from distmd_protocol import AgreementError, LocalComm, check_environment
from distmd_protocol.environment import environment, table
from distmd_protocol.testkit import run_ranks


class Scripted(LocalComm):
    """A communicator whose other ranks report what the test says."""

    def __init__(self, *changes):
        self.changes = changes
        self.size = 1 + len(changes)

    def allgather(self, obj):
        return [obj, *({**obj, **change} for change in self.changes)]


def disagree(comm, extra):
    """Run check_environment with a value that differs on the last rank."""
    try:
        check_environment(comm, {"seed": 1, "dtype": extra if comm.rank == comm.size - 1 else "float64"})
    except AgreementError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_ranks_agree(size):
    assert run_ranks(disagree, size, "float64") == ["agreed"] * size


def test_every_rank_gets_the_table_of_differences():
    results = run_ranks(disagree, 4, "float32")
    assert len(set(results)) == 1
    lines = results[0].splitlines()
    assert "differ in 1 settings" in lines[0]
    assert [line.split() for line in lines[1:]] == [
        ["setting", "value", "ranks"], ["dtype", "float64", "0-2"], ["dtype", "float32", "3"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"version of numpy": "0.1"},
        {"environment.XLA_FLAGS": "--fast"},
        {"backends.jax.x64": "False"},
        {"python": "2.7"},
    ],
)
def test_versions_flags_and_dtypes_must_be_equal(change):
    ((name, value),) = change.items()
    with pytest.raises(AgreementError) as caught:
        check_environment(Scripted(change))
    assert name in str(caught.value)
    assert value in str(caught.value)


def test_another_processor_is_only_logged(caplog):
    check_environment(Scripted({"cpu.features": "none"}))
    assert "not be bitwise reproducible" in caplog.text
    assert "cpu.features" in caplog.text


def test_what_is_compared():
    lines = environment({"mine": 3})
    assert lines["mine"] == "3"
    assert {"python", "version of numpy", "version of torch", "cpu.machine"} <= set(lines)
    assert all(isinstance(value, str) for value in lines.values())


def test_table_gives_ranks_as_ranges():
    every = [{"a": "1"}, {"a": "1"}, {}, {"a": "1"}]
    assert "1      0-1, 3" in table(["a"], every)
