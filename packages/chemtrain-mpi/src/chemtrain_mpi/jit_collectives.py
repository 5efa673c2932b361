"""MPI inside a compiled program. Importing this module initialises MPI.

An eager mpi4jax call compiles each time, so everything here is jitted. mpi4jax orders its calls by effects.
"""

from __future__ import annotations

from functools import partial

import jax

from chemtrain_mpi.errors import MissingExtraError

try:
    import mpi4jax
    from mpi4py import MPI
except ImportError as error:
    raise MissingExtraError(
        f"mpi4jax cannot be imported ({error}); install the extra: pip install 'chemtrain-mpi[mpi]'"
    ) from error


# By handle: a communicator object cannot be hashed, and a program belongs to one communicator.
@partial(jax.jit, static_argnums=0)
def _sum(handle: int, buffer: jax.Array) -> jax.Array:
    return mpi4jax.allreduce(buffer, op=MPI.SUM, comm=MPI.Comm.fromhandle(handle))


def jit_sum(comm: MPI.Comm, buffer: jax.Array) -> jax.Array:
    """Elementwise sum of every rank's array, finished when it returns.

    Waiting matters: a process that ends with the call still queued takes MPI down before its kernel has run.
    """
    return jax.block_until_ready(_sum(comm.handle, buffer))
