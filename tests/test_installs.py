"""Each distribution's wheel alone in an empty environment: it installs, runs a job, and never loads the other backend.

The protocol comes from the same folder of wheels. The versions are those of the constraints file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "tools" / "constraints" / "cpu-py311.txt"
FOLDERS = {
    "distmd-protocol": ROOT / "shared",
    "chemtrain-mpi": ROOT / "packages" / "chemtrain-mpi",
    "nvalchemi-distributed": ROOT / "packages" / "nvalchemi-distributed",
}
# What must not be in sys.modules after the job. Without the extra `mpi`, chemtrain-mpi needs no MPI either.
ABSENT = {
    "distmd-protocol": ["jax", "torch", "mpi4py"],
    "chemtrain-mpi": ["torch", "mpi4py", "mpi4jax", "nvalchemi_distributed"],
    "nvalchemi-distributed": ["jax", "mpi4py", "mpi4jax", "chemtrain_mpi"],
}
LIMIT = 600.0
RUN = """
import json, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("loaded:" + json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def call(*command: str, cwd: Path) -> str:
    """Run a command outside the tree, without the caller's Python settings."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env=variables | {"OMP_NUM_THREADS": "1", "NPROC": "1"},
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheels of the three distributions, built from the tree."""
    pytest.importorskip("hatchling", reason="wheels are built in the `cross` environment")
    dist = tmp_path_factory.mktemp("dist")
    for folder in FOLDERS.values():
        call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist), cwd=folder)
    found = {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in dist.glob("*.whl")}
    assert set(found) == set(FOLDERS)
    return found


@pytest.mark.parametrize("name", list(FOLDERS))
def test_wheel_alone(name: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    call(sys.executable, "-m", "venv", str(venv), cwd=tmp_path)
    python = str(venv / "bin" / "python")
    chosen = dict.fromkeys([wheels["distmd-protocol"], wheels[name]])
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    call(*pip, "install", "--quiet", "--no-compile", "-c", str(CONSTRAINTS), *map(str, chosen), cwd=tmp_path)
    call(*pip, "check", cwd=tmp_path)

    job = ROOT / "tests" / "smoke" / f"{name.replace('-', '_')}_job.py"
    out = tmp_path / "out"
    text = call(python, "-c", RUN, str(job), str(out), str(ROOT / "docs" / "code"), cwd=tmp_path)
    loaded = set(json.loads(text.rsplit("loaded:", 1)[1]))
    assert name.replace("-", "_") in loaded
    assert not loaded & set(ABSENT[name])

    listed = json.loads(call(*pip, "list", "--format=json", cwd=tmp_path))
    installed = {entry["name"].lower().replace("_", "-") for entry in listed}
    others = set(FOLDERS) - {name, "distmd-protocol"}
    assert not installed & others
