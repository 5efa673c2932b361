"""How ranks are started: as plain processes, under ``mpirun``, or for a gloo process group."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import distmd_protocol
from distmd_protocol.errors import ProtocolError
from distmd_protocol.testkit import socket_comm
from distmd_protocol.testkit.errors import LauncherUnavailable

FACTORIES: Mapping[str, str] = {
    "local": "distmd_protocol.testkit.socket_comm:world_comm",
    "mpi": "chemtrain_mpi.comm:world_comm",
    "gloo": "nvalchemi_distributed.comm:world_comm",
}
"""Where each launcher's ranks get their communicator; resolved in the worker."""

_NEEDS = {"local": (), "mpi": ("chemtrain_mpi", "mpi4py"), "gloo": ("nvalchemi_distributed", "torch")}

# Ranks share few cores in tests: one thread each, and an MPI that gives its core away while it waits.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NPROC": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PYTHONFAULTHANDLER": "1",
}


@dataclass(frozen=True)
class Started:
    """Processes that were started: one a rank, or one for all under ``mpirun``."""

    processes: Sequence[subprocess.Popen[bytes]]
    one_each: bool


def why_unavailable(launcher: str) -> str | None:
    """Say what is missing for a launcher on this machine; ``None`` if nothing is."""
    if launcher not in FACTORIES:
        raise ProtocolError(f"unknown launcher {launcher!r}; use one of {', '.join(FACTORIES)}")
    missing = [name for name in _NEEDS[launcher] if importlib.util.find_spec(name) is None]
    if missing:
        return f"launcher {launcher!r} needs the modules {', '.join(missing)}"
    if launcher == "mpi" and _mpirun() is None:
        return "launcher 'mpi' needs mpirun beside the interpreter or on the PATH"
    return None


def start(launcher: str, size: int, arguments: Sequence[str], folder: Path, env: Mapping[str, str]) -> Started:
    """Start ``size`` workers.

    Parameters
    ----------
    launcher
        ``"local"``, ``"mpi"`` or ``"gloo"``.
    size
        Number of ranks.
    arguments
        Command line of the worker, after the interpreter.
    folder
        For sockets and logs.
    env
        Additions to the environment.
    """
    command = [sys.executable, *arguments]
    base = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": _python_path(), **env}
    if launcher == "mpi":
        with open(folder / "output.log", "wb") as log:
            return Started([_popen([*mpirun_command(size), *command], base, log)], one_each=False)
    port = str(_free_port())
    processes = []
    for rank in range(size):
        if launcher == "local":
            own = {
                socket_comm.RANK_VARIABLE: str(rank),
                socket_comm.SIZE_VARIABLE: str(size),
                socket_comm.ADDRESS_VARIABLE: str(folder / "comm"),
            }
        else:
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
        with open(folder / f"output-{rank}.log", "wb") as log:
            processes.append(_popen(command, base | own, log))
    return Started(processes, one_each=True)


def mpirun_command(size: int) -> list[str]:
    """Return the command line that starts ``size`` MPI ranks on this machine, as root and with few cores too."""
    program = _mpirun()
    if program is None:
        raise LauncherUnavailable("there is no mpirun beside the interpreter or on the PATH")
    if "open mpi" in _version(program) or "open-mpi" in _version(program):
        flags = ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            flags.append("--allow-run-as-root")
        return [program, *flags, "-np", str(size)]
    return [program, "-np", str(size)]


@cache
def _version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout + done.stderr).lower()


def _mpirun() -> str | None:
    beside = os.path.dirname(sys.executable)
    return shutil.which("mpirun", path=beside) or shutil.which("mpirun") or shutil.which("mpiexec")


def _popen(command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    # A session of its own, so that the whole group can be ended and a Ctrl-C goes to the test process alone.
    return subprocess.Popen(
        command, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def _python_path() -> str:
    source = str(Path(distmd_protocol.__file__).parents[1])
    return os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
