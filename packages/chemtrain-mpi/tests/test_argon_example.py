"""The argon example, shortened: from the reference table to an artefact."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chemtrain_mpi.potentials import load
from distmd_protocol import Units, latest

pytestmark = pytest.mark.once

EXAMPLE = Path(__file__).parents[1] / "examples" / "argon_training.py"
TABLE = Path(__file__).parents[3] / "tools" / "data" / "argon_reference.csv"


def test_small_run_ends_near_the_equation_of_state_and_leaves_everything(tmp_path):
    if not TABLE.exists():
        pytest.skip(f"the reference table is not beside this package: {TABLE}")
    command = [sys.executable, str(EXAMPLE), "--reference", str(TABLE), "--out", str(tmp_path)]
    command += ["--small", "--parallelism", "single"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "training.json").read_text())
    # Four short state points of 108 atoms: within 3 % and 1 %.
    assert report["fit"]["epsilon_over_kB"] == pytest.approx(117.3, rel=0.03)
    assert report["fit"]["sigma"] == pytest.approx(3.396, rel=0.01)
    assert report["start"]["sigma"] == pytest.approx(3.396 * 0.92, rel=0.01)
    assert report["recomputed_trajectories"] > 0
    assert {row["state"] for row in report["states"]} == {"100K-sat", "130K-sat", "120K-20MPa", "140K-30MPa"}
    artefact = load(tmp_path / "potential", units=Units.METAL)
    assert float(artefact.params["sigma"][0, 0]) == pytest.approx(report["fit"]["sigma"], rel=1e-6)
    assert artefact.potential.tail_correction
    assert artefact.potential.smoothing == "none"
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == report["updates"]
    assert latest(tmp_path / "checkpoints").name == "epoch-000016"
    for name in ("loss", "predictions", "parameters"):
        assert (tmp_path / f"training_{name}.png").stat().st_size > 10_000
