"""What the ranks run for ``test_comm.py``."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from distmd_protocol import ProtocolError


def control_objects(comm: Any) -> list[Any]:
    gathered = comm.allgather({"rank": comm.rank, "text": "x" * comm.rank})
    from_last = comm.broadcast(["last", comm.rank], root=comm.size - 1)
    raw = comm.broadcast(bytes(range(256)) if comm.rank == 0 else None)
    comm.barrier()
    empty = comm.allgather(b"") == [b""] * comm.size
    return [comm.rank, comm.size, gathered, from_last, raw == bytes(range(256)), empty]


def expected(rank: int, size: int) -> list[Any]:
    return [rank, size, [{"rank": r, "text": "x" * r} for r in range(size)], ["last", size - 1], True, True]


def refuse_objects(comm: Any) -> str:
    try:
        comm.allgather(object())
    except ProtocolError as error:
        return f"ProtocolError: {error}"
    return "no error"


def separate_contexts(comm: Any) -> bool:
    from mpi4py import MPI

    request = MPI.COMM_WORLD.Irecv(theirs := np.zeros(1), source=MPI.ANY_SOURCE)
    ours = comm.allgather(comm.rank)
    MPI.COMM_WORLD.Send(np.array([7.0]), dest=(comm.rank + 1) % comm.size)
    request.Wait()
    return ours == list(range(comm.size)) and theirs[0] == 7.0


def raise_on_rank_one(comm: Any) -> None:
    if comm.rank == 1:
        raise RuntimeError("nobody catches this")
    time.sleep(60.0)


def jitted_sum(comm: Any) -> bool:
    from chemtrain_mpi.jit_collectives import jit_sum

    matrix = np.arange(12.0, dtype=np.float32).reshape(3, 4).T * (comm.rank + 1)
    expected = np.arange(12.0, dtype=np.float32).reshape(3, 4).T * 3
    return all(bool(np.array_equal(np.asarray(jit_sum(comm.mpi, matrix)), expected)) for _ in range(3))


def chunked_broadcast(comm: Any) -> bool:
    from chemtrain_mpi import comm as module

    whole, module._CHUNK_BYTES = module._CHUNK_BYTES, 1000
    try:
        buffer = np.arange(5001.0) if comm.rank == 1 else np.zeros(5001)
        comm.broadcast_buffer(buffer, root=1)
        long = comm.allgather("y" * 3000 * (comm.rank + 1))
    finally:
        module._CHUNK_BYTES = whole
    return bool(np.array_equal(buffer, np.arange(5001.0))) and [len(text) for text in long] == [3000, 6000]
