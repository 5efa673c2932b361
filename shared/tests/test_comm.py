from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmd_protocol import Comm, LocalComm, ProtocolError, decode, encode
from distmd_protocol.testkit import run_ranks

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)


@given(json_values | st.binary())
def test_objects_come_back(obj):
    assert decode(encode(obj)) == obj


@pytest.mark.parametrize("obj", [object(), {1, 2}, {"a": b"bytes inside"}, lambda: 0])
def test_what_is_not_json_is_refused(obj):
    with pytest.raises(ProtocolError, match="cannot travel between ranks"):
        encode(obj)


@pytest.mark.parametrize("data", [b"", b"J", b"J{", b"J\xff", b"X{}", b"\x80\x04N."])
def test_damaged_messages_are_refused(data):
    with pytest.raises(ProtocolError, match="control message"):
        decode(data)


def test_local_comm_is_a_comm_of_one_rank():
    comm = LocalComm()
    assert isinstance(comm, Comm)
    assert (comm.rank, comm.size) == (0, 1)
    comm.barrier()
    assert comm.broadcast({"a": (1, 2)}) == {"a": [1, 2]}
    assert comm.allgather(b"x") == [b"x"]
    with pytest.raises(ProtocolError, match="root=0"):
        comm.broadcast(1, root=1)
    with pytest.raises(ProtocolError):
        comm.broadcast(object())


def contract(comm):
    """What every communicator must do."""
    comm.barrier()
    last = comm.size - 1
    return {
        "gathered": comm.allgather({"rank": comm.rank}),
        "from_last": comm.broadcast(["from", comm.rank], root=last),
        "bytes": [len(part) for part in comm.allgather(b"x" * (comm.rank * 100_000))],
        "is_comm": isinstance(comm, Comm),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_contract(size):
    for result in run_ranks(contract, size):
        assert result == {
            "gathered": [{"rank": rank} for rank in range(size)],
            "from_last": ["from", size - 1],
            "bytes": [rank * 100_000 for rank in range(size)],
            "is_comm": True,
        }
