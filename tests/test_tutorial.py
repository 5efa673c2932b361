"""The tutorial's two scripts, run as the tutorial says; the guides show parts of the same scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distmd_protocol import load_potential

CODE = Path(__file__).resolve().parents[1] / "docs" / "code"
LIMIT = 300.0


def run(*command: str) -> str:
    """Run a launch line with this environment's own launchers first on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "NPROC": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    launcher = shutil.which(command[0], path=path)
    assert launcher, f"{command[0]} is not in this environment"
    done = subprocess.run(
        [launcher, *command[1:]], capture_output=True, text=True, timeout=LIMIT, env=variables, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python_blocks(page: Path) -> list[list[str]]:
    """Return the lines of each python block of a page."""
    blocks: list[list[str]] = []
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("```"):
            inside = line.strip() == "```python"
            if inside:
                blocks.append([])
        elif inside:
            blocks[-1].append(line.strip())
    return blocks


@pytest.mark.parametrize("page", ["tutorial.md", "guides/difftre.md", "guides/simulations.md"])
def test_python_in_the_docs_is_taken_from_scripts_that_are_run(page: str) -> None:
    blocks = python_blocks(CODE.parent / page)
    assert blocks
    for line in (line for block in blocks for line in block):
        assert line.startswith('--8<-- "code/'), f"{page}: {line!r} is run by no test; put it into docs/code"
        script, section = line.split('"')[1].removeprefix("code/").split(":")
        assert f"[start:{section}]" in (CODE / script).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("tutorial")
    return out, run("mpirun", "-np", "2", sys.executable, str(CODE / "train.py"), str(out))


@pytest.mark.mpi
def test_training_lowers_the_loss(trained: tuple[Path, str]) -> None:
    _, text = trained
    before, after = (float(word) for word in text.split("loss ")[1].splitlines()[0].split(" -> "))
    assert after < 0.5 * before


@pytest.mark.mpi
def test_training_leaves_an_artefact_that_states_its_units(trained: tuple[Path, str]) -> None:
    out, _ = trained
    potential = load_potential(out / "potential")
    assert potential.units.length == "nm"
    assert potential.tail_correction
    assert potential.species == ("Ar",)


@pytest.mark.gloo
def test_simulation_is_decomposed_and_its_trajectory_complete(trained: tuple[Path, str]) -> None:
    ase_io = pytest.importorskip("ase.io")
    out, _ = trained
    text = run(
        *("torchrun", "--standalone", "--nproc_per_node=2"),
        *(str(CODE / "simulate.py"), str(out / "potential"), str(out / "simulation")),
    )
    owned, ghosts = (int(text.split("rank 0 owns ")[1].split()[i]) for i in (0, 3))
    assert 0 < owned < 1000
    assert owned + ghosts <= 1000
    frames = ase_io.read(out / "simulation" / "trajectory.extxyz", index=":")
    assert len(frames) == 5
    assert all(len(frame) == 1000 for frame in frames)
