"""The main job, shortened: what it leaves behind is complete and says what it should."""

import json
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest

from distmd_protocol import Units, latest, load_checkpoint, load_potential

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import demo as demo_job  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.gloo]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder of one shortened run."""
    out = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, str(ROOT / "tools" / "demo.py"), "--small", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return out


def test_result_names_everything_that_the_readme_quotes(demo):
    result = json.loads((demo / "result.json").read_text(encoding="utf-8"))
    fit, start = result["fit"], result["start"]
    # The start is 15 % and 8 % off; the shortened training must get most of the way.
    assert abs(start["epsilon_over_kB"] / 117.3 - 1) > 0.14
    assert abs(fit["epsilon_over_kB"] / 117.3 - 1) < 0.05
    assert abs(fit["sigma"] / 3.396 - 1) < 0.02
    assert len(result["states"]) >= 4
    for row in [*result["states"], result["held_out"]]:
        values = [row[f"{name}_{unit}"] for name, unit in (("pressure", "MPa"), ("energy", "kJ_per_mol"))]
        errors = [row["pressure_error_MPa"], row["energy_error_kJ_per_mol"]]
        assert np.isfinite(values).all()
        assert all(error > 0 for error in errors)
    assert all(value <= 1e-10 for value in result["handover_deviation"].values())
    assert all(value <= 1e-12 for value in result["step_0_deviation"].values())
    assert {"training", "handover", "simulation", "total"} <= set(result["seconds"])
    assert {"chemtrain-mpi", "nvalchemi-distributed", "jax", "torch"} <= set(result["versions"])


def test_decomposition_was_not_degenerate(demo):
    simulation = json.loads((demo / "simulation" / "simulation.json").read_text(encoding="utf-8"))
    counts = simulation["owned_and_ghosts"]
    assert len(counts) == 2
    assert sum(owned for owned, _ in counts) == simulation["atoms"]
    assert all(owned + ghosts < simulation["atoms"] for owned, ghosts in counts)


def test_artefact_says_its_units_and_converts(demo):
    result = json.loads((demo / "result.json").read_text(encoding="utf-8"))
    stored = load_potential(demo / "training" / "potential")
    assert (stored.units.length, stored.units.energy) == ("nm", "kJ/mol")
    assert stored.tail_correction
    metal = stored.to_units(Units.METAL)
    assert metal.cutoff == pytest.approx(8.5, rel=1e-12)
    assert float(metal.parameters["sigma"][0, 0]) == pytest.approx(result["fit"]["sigma"], rel=1e-6)


def test_training_left_a_checkpoint(demo):
    newest = latest(demo / "training" / "checkpoints")
    assert newest is not None
    checkpoint = load_checkpoint(newest, kind="difftre-trainer")
    assert checkpoint.world_size == 2
    assert "jax" in checkpoint.precision.backends


def test_trajectory_opens_in_ase_with_every_atom_in_order(demo):
    frames = ase.io.read(demo / "simulation" / "trajectory.extxyz", index=":")
    simulation = json.loads((demo / "simulation" / "simulation.json").read_text(encoding="utf-8"))
    assert len(frames) >= 5
    for frame in frames:
        assert len(frame) == simulation["atoms"]
        assert (frame.arrays["atom_id"] == np.arange(len(frame))).all()
        assert frame.get_pbc().all()


def test_snapshots_of_the_ranks_add_up_to_the_trajectory(demo):
    frames = ase.io.read(demo / "simulation" / "trajectory.extxyz", index=":")
    parts = [np.load(path) for path in sorted((demo / "simulation" / "snapshots").glob("rank-*.npz"))]
    assert len(parts) == 2
    steps = sorted({int(name.split("/")[0]) for name in parts[0].files})
    assert len(steps) == len(frames)
    for step, frame in zip(steps, frames, strict=True):
        ids = np.concatenate([part[f"{step}/atom_id"] for part in parts])
        positions = np.concatenate([part[f"{step}/positions"] for part in parts])[np.argsort(ids)]
        assert (np.sort(ids) == np.arange(len(frame))).all()
        np.testing.assert_allclose(positions, frame.get_positions(), atol=1e-6)


def test_pictures_are_there(demo):
    for name in ("demo.png", "training/training_loss.png", "training/training_predictions.png", "simulation/rdf.png"):
        assert (demo / name).read_bytes().startswith(b"\x89PNG")


def test_a_nan_is_no_agreement():
    same = {"configurations": [{"energy": 1.0, "forces": [[0.5, -0.5, 2.0]], "virial": [[1.0]]}]}
    other = {"configurations": [{"energy": 1.0, "forces": [[0.5, float("nan"), 2.0]], "virial": [[1.0]]}]}
    demo_job.check_within(demo_job.handover_deviation(same, same), 1e-10, "same")
    with pytest.raises(demo_job.DemoError, match="nan"):
        demo_job.check_within(demo_job.handover_deviation(same, other), 1e-10, "other")


def test_a_folder_of_something_else_is_not_emptied(tmp_path):
    (tmp_path / "thesis.tex").write_text("do not lose me", encoding="utf-8")
    command = [sys.executable, str(ROOT / "tools" / "demo.py"), "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "holds files of something else" in done.stderr
    assert (tmp_path / "thesis.tex").exists()
