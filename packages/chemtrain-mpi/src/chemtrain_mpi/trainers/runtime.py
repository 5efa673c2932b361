"""Where the trainer runs: which ranks, which devices, and whether its arithmetic is reproducible."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import jax

from chemtrain_mpi.errors import ArgumentError, MissingExtraError
from distmd_protocol import Comm, LocalComm, PrecisionPolicy

_log = logging.getLogger(__name__)

# Set by Open MPI, MPICH/Hydra and Intel MPI, MVAPICH2, PMIx launchers for each rank.
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")

_LAUNCH_ONE_DEVICE = (
    "mpirun -np 2 -x NPROC=1 -x XLA_FLAGS=--xla_gpu_deterministic_ops=true "
    "bash -c 'CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK python train.py'"
)


def resolve_comm(parallelism: str, comm: Comm | None) -> Comm:
    """The ranks that ``parallelism`` means.

    Raises
    ------
    ArgumentError
        For an unknown value, and for JAX's own parallelism.
    MissingExtraError
        If MPI is wanted and mpi4py or mpi4jax is absent.
    """
    if parallelism == "jax":
        raise ArgumentError(
            "parallelism='jax' (sharding over a device mesh) is not supported by this trainer; use 'mpi', 'single' or "
            "'auto'"
        )
    if parallelism not in ("auto", "mpi", "single"):
        raise ArgumentError(f"parallelism is {parallelism!r}; use 'auto', 'mpi' or 'single'")
    if comm is not None:
        if parallelism == "single" and comm.size > 1:
            raise ArgumentError(f"parallelism='single' with a communicator of {comm.size} ranks; use 'mpi' or 'auto'")
        return comm
    if parallelism == "mpi" or (parallelism == "auto" and _launched_with_several_ranks(os.environ)):
        return _world_comm()
    return LocalComm()


def check_devices(parallelism: str, comm: Comm) -> None:
    """Refuse what JAX has set up on this rank where it does not fit the ranks. Not collective.

    Raises
    ------
    ArgumentError
        For several devices on an MPI rank, and for an active device mesh or ``jax.distributed``.
    """
    _refuse_jax_mesh()
    devices = jax.local_device_count()
    if devices > 1 and (comm.size > 1 or parallelism == "mpi"):
        raise ArgumentError(f"rank {comm.rank} sees {devices} devices; one a rank, please: {_LAUNCH_ONE_DEVICE}")
    if devices > 1:
        warnings.warn(
            f"{devices} devices are visible and only the first is used; start one rank a device: {_LAUNCH_ONE_DEVICE}",
            stacklevel=4,
        )


def _launched_with_several_ranks(environment: Mapping[str, str]) -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        return mpi.COMM_WORLD.Get_size() > 1
    sizes = [environment.get(name, "") for name in _SIZE_VARIABLES]
    if any(size.isdigit() and int(size) > 1 for size in sizes):
        return True
    # srun sets this for every step, MPI or not; its PMI variables say that it is an MPI step.
    step = environment.get("SLURM_STEP_NUM_TASKS", "")
    return step.isdigit() and int(step) > 1 and any(k.startswith(("PMI", "PMIX_")) for k in environment)


def _world_comm() -> Comm:
    # By name, not by an import statement: importing MPI initialises it, which a run on one process must not do (on a
    # cluster's login node it ends the process).
    for module in ("mpi4jax", "chemtrain_mpi.comm"):
        try:
            loaded = importlib.import_module(module)
        except MissingExtraError:
            raise
        except ImportError as error:
            raise MissingExtraError(
                f"MPI runs need both mpi4py and mpi4jax, and {module} cannot be imported ({error}); install the extra: "
                "pip install 'chemtrain-mpi[mpi]'"
            ) from error
    return loaded.world_comm()


def _refuse_jax_mesh() -> None:
    is_initialized = getattr(jax.distributed, "is_initialized", lambda: jax.process_count() > 1)
    if is_initialized():
        raise ArgumentError("jax.distributed is active in this run; use either it or MPI ranks, not both")
    current_mesh = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    if current_mesh is not None and not current_mesh.empty and current_mesh.size > 1:
        raise ArgumentError(
            f"a JAX device mesh {dict(current_mesh.shape)} is active; JAX sharding is not supported by this trainer, "
            "construct it outside the mesh"
        )


def check_deterministic() -> None:
    """Refuse deterministic mode where XLA may split a sum differently from rank to rank or run to run.

    On CPU the number of XLA threads decides how products are split; only ``NPROC=1`` in the environment, before jax
    starts, holds it at one.

    Raises
    ------
    ArgumentError
        With the command line that mends it.
    """
    if jax.default_backend() == "cpu":
        remedy = (
            "start with NPROC=1 in the environment, before jax is imported:\n"
            "    NPROC=1 python train.py\n"
            "    mpirun -np 2 -x NPROC=1 python train.py      (Open MPI; MPICH: -genv NPROC 1)\n"
            "or pass deterministic=False"
        )
        if os.environ.get("NPROC") != "1":
            raise ArgumentError(f"deterministic mode needs one XLA thread on CPU; {remedy}")
        threads = _xla_threads()
        if threads > 1:
            raise ArgumentError(f"NPROC=1 was set too late: XLA runs {threads} threads already; {remedy}")
    elif "--xla_gpu_deterministic_ops=true" not in os.environ.get("XLA_FLAGS", ""):
        raise ArgumentError(
            "deterministic mode on a GPU needs deterministic kernels; start with\n"
            "    XLA_FLAGS=--xla_gpu_deterministic_ops=true python train.py\n"
            "    mpirun -np 2 -x XLA_FLAGS=--xla_gpu_deterministic_ops=true …      (Open MPI)\n"
            "or pass deterministic=False"
        )


def processor_features() -> dict[str, str]:
    """Vector features of this rank's processor, under names that ``check_environment`` refuses to see differ."""
    lines = PrecisionPolicy.current().flat()
    return {f"deterministic mode, {name}": value for name, value in lines.items() if name.startswith("cpu.")}


def _xla_threads() -> int:
    """Threads of XLA's CPU pool by their names in /proc; 0 where that cannot be read."""
    names = []
    try:
        for task in Path("/proc/self/task").iterdir():
            names.append((task / "comm").read_text().strip())
    except OSError as error:
        _log.debug("the names of this process's threads cannot be read: %s", error)
    return sum(name.startswith("tf_XLAEigen") for name in names)
