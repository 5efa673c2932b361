"""The MPI communicator, seen as the protocol's ``Comm``. Importing this module initialises MPI.

Control objects travel as JSON or bytes; arrays travel as buffers. Nothing is pickled.
"""

from __future__ import annotations

import logging

import numpy as np

from chemtrain_mpi.errors import MissingExtraError
from distmd_protocol import abort_on_uncaught, decode, encode

try:
    from mpi4py import MPI
except ImportError as error:
    raise MissingExtraError(
        f"mpi4py cannot be imported ({error}); install the extra: pip install 'chemtrain-mpi[mpi]', with an MPI "
        "library on the machine"
    ) from error

_log = logging.getLogger(__name__)

# The counts of classic MPI calls are 32-bit integers; also bounds what one message pins in memory.
_CHUNK_BYTES = 1 << 30


class MPIComm:
    """A duplicate of an mpi4py communicator with the protocol's methods.

    A duplicate, so that our messages never meet those of the user's code. All methods are collective.

    Parameters
    ----------
    mpi_comm
        The user's communicator; it is duplicated, which is collective.
    """

    def __init__(self, mpi_comm: MPI.Comm) -> None:
        self.mpi = mpi_comm.Dup()
        self.rank: int = self.mpi.Get_rank()
        self.size: int = self.mpi.Get_size()

    def barrier(self) -> None:
        """Return on no rank before every rank has called."""
        self.mpi.Barrier()

    def broadcast(self, obj: object, root: int = 0) -> object:
        """Return ``root``'s JSON-able object or bytes on every rank."""
        message = np.frombuffer(encode(obj), np.uint8) if self.rank == root else None
        length = np.array([0 if message is None else message.size], np.int64)
        self.mpi.Bcast(length, root=root)
        buffer = np.empty(int(length[0]), np.uint8) if message is None else message.copy()
        self.broadcast_buffer(buffer, root)
        return decode(buffer.tobytes())

    def allgather(self, obj: object) -> list:
        """Return every rank's JSON-able object or bytes, by rank, on every rank."""
        message = np.frombuffer(encode(obj), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.mpi.Allgather(np.array([message.size], np.int64), lengths)
        if lengths.sum() <= _CHUNK_BYTES:
            gathered = np.empty(int(lengths.sum()), np.uint8)
            self.mpi.Allgatherv(message, [gathered, lengths.tolist()])
            return [decode(part.tobytes()) for part in np.split(gathered, np.cumsum(lengths)[:-1])]
        parts = []
        for root, length in enumerate(lengths):
            buffer = message.copy() if root == self.rank else np.empty(int(length), np.uint8)
            self.broadcast_buffer(buffer, root)
            parts.append(decode(buffer.tobytes()))
        return parts

    def broadcast_buffer(self, buffer: np.ndarray, root: int) -> None:
        """Fill the contiguous ``buffer``, of the same size on every rank, with ``root``'s contents, in place."""
        view = buffer.reshape(-1).view(np.uint8)
        for start in range(0, view.size, _CHUNK_BYTES):
            self.mpi.Bcast(view[start : start + _CHUNK_BYTES], root=root)

    def sum_buffer(self, buffer: np.ndarray) -> np.ndarray:
        """Sum of every rank's contiguous array, elementwise, on every rank. The order of the sum is MPI's."""
        total = np.empty_like(buffer)
        self.mpi.Allreduce(buffer, total, op=MPI.SUM)
        return total

    def abort(self, code: int = 1) -> None:
        """End all ranks of the whole job at once."""
        MPI.COMM_WORLD.Abort(code)


def world_comm() -> MPIComm:
    """A duplicate of ``COMM_WORLD``; from now on an uncaught error on one rank ends all ranks."""
    comm = MPIComm(MPI.COMM_WORLD)
    abort_on_uncaught(comm.abort)
    _log.debug("rank %d of %d", comm.rank, comm.size)
    return comm
