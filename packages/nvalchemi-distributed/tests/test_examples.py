"""The examples run as a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch

from distmd_protocol import Potential, Units, save_potential

PACKAGE = Path(__file__).parents[1]
EXAMPLES = PACKAGE / "examples"


def call(*command, cwd, limit=240):
    environment = dict(os.environ, OMP_NUM_THREADS="1", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=limit, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def artefact(path):
    potential = Potential(
        family="lennard_jones",
        species=("Ar",),
        masses=np.array([39.948]),
        parameters={"epsilon": np.array([[0.97529]]), "sigma": np.array([[0.3396]])},
        cutoff=0.85,
        smoothing="none",
        tail_correction=True,
        units=Units.MOLAR,
    )
    save_potential(path, potential)
    return path


@pytest.mark.gloo
def test_held_out_argon_on_two_ranks(tmp_path):
    reference = tmp_path / "reference.csv"
    reference.write_text(
        "# source: a test\n"
        "state,temperature_K,density_mol_per_L,pressure_MPa,residual_internal_energy_kJ_per_mol,role\n"
        "a,90,34.5,0.1,-5.7,fit\nb,115,31.437,10.0,-5.0505,held-out\n"
    )
    out = tmp_path / "out"
    script = EXAMPLES / "distributed" / "argon_heldout.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    where = ["--potential", artefact(tmp_path / "potential"), "--reference", reference, "--out", out]
    call(*torchrun, script, *where, "--small", cwd=tmp_path)
    result = json.loads((out / "simulation.json").read_text())
    deviations = result["step_zero_relative_deviation"]
    assert max(deviations["energy"], deviations["forces"], deviations["stress"]) <= 1e-12
    assert result["ranks"] == 2
    for owned, ghosts in result["owned_and_ghosts"]:
        assert owned + ghosts < result["atoms"]
    energy = result["residual_internal_energy_kJ_per_mol"]
    assert abs(energy["mean"] - energy["reference"]) < 0.1
    assert result["pressure_MPa"]["error"] > 0
    assert abs(result["temperature_K"]["mean"] - 115.0) < 5.0
    assert 3.4 < result["rdf_first_peak"]["r_angstrom"] < 4.0
    frames = ase.io.read(out / "trajectory.extxyz", index=":")
    assert len(frames) == 20
    for frame in frames:
        assert (frame.arrays["atom_id"] == np.arange(result["atoms"])).all()
    parts = [np.load(out / "snapshots" / f"rank-{r:05d}.npz") for r in range(2)]
    steps = sorted({int(k.split("/")[0]) for k in parts[0].files})
    assert len(steps) == 20
    for step in steps:
        ids = np.concatenate([p[f"{step}/atom_id"] for p in parts])
        assert (np.sort(ids) == np.arange(result["atoms"])).all()
    assert (out / "rdf.png").stat().st_size > 1000


def test_evaluate_artefact(tmp_path):
    asked = {"configurations": [{"positions": [[0, 0, 0], [3.8, 0, 0]], "cell": [[30, 0, 0], [3, 30, 0], [0, 0, 30]]}]}
    (tmp_path / "in.json").write_text(json.dumps(asked))
    script = EXAMPLES / "evaluate_artefact.py"
    where = ["--potential", artefact(tmp_path / "p"), "--configurations", tmp_path / "in.json"]
    call(sys.executable, script, *where, "--out", tmp_path / "out.json", cwd=tmp_path)
    (answer,) = json.loads((tmp_path / "out.json").read_text())["configurations"]
    epsilon, sigma = 0.97529 / 96.48533212331, 3.396
    s6 = (sigma / 3.8) ** 6
    force = 24 * epsilon * (2 * s6 * s6 - s6) / 3.8
    assert answer["forces"][1][0] == pytest.approx(force, rel=1e-9)
    assert answer["forces"][0] == pytest.approx([-force, 0, 0], rel=1e-9)


def test_readme_example_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        call(sys.executable, "-c", block, cwd=tmp_path)


def test_default_dtype_is_left_alone():
    assert torch.get_default_dtype() is torch.float32
