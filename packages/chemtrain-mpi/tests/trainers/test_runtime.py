import os
import subprocess
import sys

import pytest

from chemtrain_mpi.errors import ArgumentError, MissingExtraError
from chemtrain_mpi.trainers import runtime
from distmd_protocol import AgreementError, LocalComm, check_environment


def python(code, **environment):
    """Run a program in a fresh process with exactly these thread settings."""
    env = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    command, env = [sys.executable, "-c", code], {**env, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


CHECK = "from chemtrain_mpi.trainers.runtime import check_deterministic; check_deterministic(); print('fine')"


def test_one_thread_is_accepted():
    assert "fine" in python(CHECK, NPROC="1").stdout


def test_missing_setting_is_refused_with_the_command_line():
    answer = python(CHECK)
    assert "NPROC=1 python train.py" in answer.stderr
    assert "mpirun -np 2 -x NPROC=1" in answer.stderr


def test_setting_that_comes_too_late_is_refused():
    if (os.cpu_count() or 1) < 2:
        pytest.skip("this machine has one core, so XLA has one thread anyway")
    late = "import jax, os; x = jax.numpy.ones((300, 300)); (x @ x).block_until_ready()"
    answer = python(f"{late}; os.environ['NPROC'] = '1'; {CHECK}")
    assert "too late" in answer.stderr


def test_a_gpu_without_deterministic_kernels_is_refused_with_the_command_line(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    with pytest.raises(ArgumentError, match=r"XLA_FLAGS=--xla_gpu_deterministic_ops=true python train\.py"):
        runtime.check_deterministic()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    runtime.check_deterministic()


def test_several_devices_are_a_warning_alone_and_an_error_under_mpi():
    code = (
        "import warnings; from distmd_protocol import LocalComm; from chemtrain_mpi.trainers.runtime import *\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always'); check_devices('single', LocalComm()); print(seen[0].message)\n"
        "check_devices('mpi', LocalComm())"
    )
    answer = python(code, NPROC="1", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert "2 devices are visible and only the first is used" in answer.stdout
    assert "CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK" in answer.stderr


def test_an_active_mesh_is_refused():
    code = (
        "import jax; from chemtrain_mpi.trainers.runtime import *\n"
        "mesh = jax.make_mesh((2,), ('x',))\n"
        "with jax.sharding.set_mesh(mesh) if hasattr(jax.sharding, 'set_mesh') else jax.sharding.use_mesh(mesh):\n"
        "    check_devices('single', LocalComm())"
    )
    answer = python(code, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert "device mesh" in answer.stderr


def test_jax_distributed_is_refused(monkeypatch):
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    with pytest.raises(ArgumentError, match="use either it or MPI ranks"):
        runtime.check_devices("auto", LocalComm())


@pytest.mark.slow
def test_active_jax_distributed_is_refused():
    code = (
        "import jax, socket\n"
        "with socket.socket() as s:\n    s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]\n"
        "jax.distributed.initialize(f'127.0.0.1:{port}', 1, 0)\n"
        # jax asks for this order: importing jax-md already computes.
        "from chemtrain_mpi.trainers.runtime import *\n"
        "check_devices('auto', LocalComm())"
    )
    answer = python(code, NPROC="1")
    assert "ArgumentError: jax.distributed is active in this run; use either it or MPI ranks" in answer.stderr


def test_absent_mpi_is_an_error_naming_the_extra():
    code = (
        "import sys; sys.modules['mpi4py'] = None; sys.modules['mpi4jax'] = None\n"
        "from chemtrain_mpi.trainers.runtime import resolve_comm; resolve_comm('mpi', None)"
    )
    answer = python(code)
    assert "MissingExtraError" in answer.stderr
    assert "chemtrain-mpi[mpi]" in answer.stderr


def test_one_of_the_two_mpi_packages_is_not_enough(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4jax", None)
    with pytest.raises(MissingExtraError, match=r"both mpi4py and mpi4jax, and mpi4jax cannot be imported"):
        runtime.resolve_comm("mpi", None)


def test_importing_the_package_does_not_start_mpi():
    answer = python("import chemtrain_mpi, sys; print('mpi4py.MPI' in sys.modules, 'torch' in sys.modules)")
    assert answer.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"PMI_SIZE": "2"}, True),
        ({"SLURM_STEP_NUM_TASKS": "8"}, False),
        ({"SLURM_STEP_NUM_TASKS": "8", "PMI_RANK": "3"}, True),
    ],
)
def test_launchers_are_recognised(environment, several, monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert runtime._launched_with_several_ranks(environment) is several


class OtherProcessor(LocalComm):
    """A second rank whose processor lacks what the first one's has."""

    def allgather(self, obj):
        return [obj, {name: "less" if "cpu." in name else value for name, value in obj.items()}]


def test_processors_that_differ_are_refused_in_deterministic_mode_only():
    assert runtime.processor_features()
    check_environment(OtherProcessor())
    with pytest.raises(AgreementError, match="deterministic mode, cpu"):
        check_environment(OtherProcessor(), runtime.processor_features())


def test_values_of_parallelism():
    assert isinstance(runtime.resolve_comm("single", None), LocalComm)
    for wrong in ("jax", "threads"):
        with pytest.raises(ArgumentError):
            runtime.resolve_comm(wrong, None)
