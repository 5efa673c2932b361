"""MACE decomposed equals MACE alone, which equals its own calculator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from decomposed import check_equal, check_parameter_gradients, check_trajectory, compare, crystal, every
from networks import LAYERS, THIRD_PARTY_WARNINGS, building, mace_network, needs, scripted_mace, wrapper
from systems import single

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.errors import ModelError

pytestmark = [needs("mace"), *THIRD_PARTY_WARNINGS]
gloo = pytest.mark.gloo
EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed" / "03_mace_nvt_distributed.py"


@pytest.mark.parametrize("kind", ["mace", "mace-script", "mace-density"])
def test_equals_its_own_calculator(kind):
    from mace.calculators import MACECalculator
    from networks import mace_settings

    data = crystal((3, 3, 3))
    outputs = single(wrapper(kind), Batch.from_data_list([data]), skin=0.5)
    atoms = data.to_atoms()
    with building(torch.float64, 0):
        atoms.calc = MACECalculator(models=[mace_network(**mace_settings(kind))], device="cpu", default_dtype="float64")
        energy, forces = atoms.get_potential_energy(), atoms.get_forces()
        stress = atoms.get_stress(voigt=False)
    assert abs(float(outputs["energy"]) - energy) <= 1e-10 * abs(energy)
    assert np.abs(outputs["forces"].numpy() - forces).max() <= 1e-10 * np.abs(forces).max()
    assert np.abs(outputs["stress"][0].numpy() - stress).max() <= 1e-10 * np.abs(stress).max()


@gloo
@pytest.mark.parametrize(
    ("kind", "ranks", "dtype"),
    [
        *every("mace", ["2 float64", "4 float64", "2x2 float64", "2 float32"]),
        ("mace-script", "2", "float64"),
        ("mace-three", "2", "float64"),
        ("mace-density", "2", "float64"),
        pytest.param("mace-cueq", "2", "float64", marks=needs("cuequivariance_torch")),
        pytest.param("mace-script", "4", "float64", marks=pytest.mark.slow),
        pytest.param("mace-script", "2x2", "float64", marks=pytest.mark.slow),
        pytest.param("mace-script", "2", "float32", marks=pytest.mark.slow),
        pytest.param("mace-three", "2x2", "float64", marks=pytest.mark.slow),
    ],
)
def test_decomposed_equals_one_process(kind, ranks, dtype):
    check_equal(kind, ranks, LAYERS[kind], dtype)


@gloo
def test_fifty_steps_with_migration():
    check_trajectory("mace")


@gloo
@pytest.mark.slow
def test_fifty_steps_of_torchscript():
    check_trajectory("mace-script", "2x2")


@gloo
@pytest.mark.parametrize("kind", ["mace", pytest.param("mace-script", marks=pytest.mark.slow)])
def test_gradients_of_parameters(kind):
    """Double backward through MACE's exchange."""
    check_parameter_gradients(kind)


@gloo
def test_ranks_without_atoms():
    """A slab in vacuum and cuts that do not follow it."""
    case = {"kind": "mace", "grid": (4, 1, 1), "repeat": (2, 3, 3), "corner": True, "rebalance_above": 1e9}
    results = run_ranks(compare, 4, case, launcher="gloo")
    assert max(results[0]["errors"].values()) <= 1e-10
    assert [r["counts"][0] == 0 for r in results].count(True) >= 2, results


def test_checkpoints(tmp_path, monkeypatch):
    """A file, a TorchScript file, and a name in MACE's cache folder; nothing else, and nothing is downloaded."""
    from nvalchemi_distributed.models.mace import MACEWrapper

    batch = Batch.from_data_list([crystal((3, 3, 3))])
    expected = single(wrapper("mace"), batch, 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "mace").mkdir()
    torch.save(mace_network(), tmp_path / "mine.model")
    # As mace-torch names what it has downloaded for "medium-0b2".
    torch.save(mace_network(), tmp_path / "mace" / "macemediumdensityagnesistressmodel")
    torch.jit.save(scripted_mace(), tmp_path / "mine.pt")
    for source in (tmp_path / "mine.model", str(tmp_path / "mine.pt"), "medium-0b2"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = MACEWrapper.from_checkpoint(source).eval()
        assert loaded.scripted == str(source).endswith(".pt")
        assert torch.allclose(single(loaded, batch, 0.0)["forces"], expected["forces"], rtol=0, atol=1e-13)
        assert not any(p.requires_grad for p in loaded.parameters())
    single_precision = MACEWrapper.from_checkpoint(tmp_path / "mine.model", dtype=torch.float32)
    with pytest.raises(ModelError, match=r"float32 parameters, the batch is torch\.float64"):
        single(single_precision, batch, 0.0)
    with pytest.raises(ModelError, match="Nothing is downloaded here; download it once with mace"):
        MACEWrapper.from_checkpoint("small")
    with pytest.raises(ModelError, match="give a file, or one of"):
        MACEWrapper.from_checkpoint("no-such-model")
    torch.save({"weights": torch.ones(3)}, tmp_path / "odd.model")
    with pytest.raises(ModelError, match="holds a dict, not a MACE model"):
        MACEWrapper.from_checkpoint(tmp_path / "odd.model")


def test_what_a_network_does_not_know_is_refused():
    from nvalchemi_distributed.models.mace import MACEWrapper

    data = crystal((3, 3, 3))
    strange = AtomicData(data.positions, torch.full((data.num_nodes,), 26), cell=data.cell[0], pbc=True)
    with pytest.raises(ModelError, match=r"knows the atomic numbers \[14, 32\], but the system holds \[26\]"):
        single(wrapper("mace"), Batch.from_data_list([strange]), 0.0)
    with pytest.raises(ModelError, match="head 'dft' is not one of this model's"):
        MACEWrapper(mace_network(), head="dft")


def test_several_systems_in_one_batch():
    """Each as if it were alone, shifted by whole cells or not (D27)."""
    model = wrapper("mace")
    parts = [crystal((3, 3, 3)), crystal((4, 3, 2), jitter=0.3)]
    together = single(model, Batch.from_data_list(parts), 0.3)
    parts[1].positions += parts[1].cell[0].sum(0) * 3
    start = 0
    for k, part in enumerate(parts):
        alone = single(model, Batch.from_data_list([part]), 0.3)
        assert abs(float(together["energy"][k] - alone["energy"])) < 1e-9
        assert (together["forces"][start : start + part.num_nodes] - alone["forces"]).abs().max() < 1e-10
        assert (together["stress"][k] - alone["stress"][0]).abs().max() < 1e-12
        start += part.num_nodes


def test_forces_are_minus_the_gradient_of_the_energy():
    """D26: central differences in float64 over two steps."""
    model, data = wrapper("mace-density"), crystal((3, 3, 3))
    forces = single(model, Batch.from_data_list([data]), 0.3)["forces"]
    for h in (1e-3, 1e-4):
        ends = []
        for sign in (1, -1):
            moved = Batch.from_data_list([data])
            moved.positions[7, 1] += sign * h
            ends.append(float(single(model, moved, 0.3)["energy"]))
        assert abs(-(ends[0] - ends[1]) / (2 * h) - float(forces[7, 1])) < 1e-6 * float(forces.abs().max()) + 1e-10 / h


def test_isolated_atom_has_no_force():
    """D27."""
    data = AtomicData(
        torch.tensor([[0.0, 0, 0], [2.4, 0, 0], [30, 0, 0]], dtype=torch.float64), torch.tensor([14, 32, 14])
    )
    outputs = single(wrapper("mace"), Batch.from_data_list([data]), 0.5)
    assert bool(torch.isfinite(outputs["forces"]).all())
    assert not bool(outputs["forces"][2].any())
    assert bool(outputs["forces"][0].any())
    assert not bool(outputs["stress"].any())


@gloo
def test_example_on_two_ranks(tmp_path):
    torch.save(mace_network(), tmp_path / "small.model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(EXAMPLE)]
    command += ["--model", str(tmp_path / "small.model"), "--repeat", "6", "2", "2", "--steps", "20", "--every", "5"]
    command += ["--out", str(tmp_path / "out"), "--dt", "1.0"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["ranks"] == 2
    for owned, ghosts in summary["owned_and_ghosts"]:
        assert owned + ghosts < summary["atoms"] == 192
    assert summary["frames_on_this_rank"] == 4
    frames = ase.io.read(tmp_path / "out" / "trajectory.extxyz", index=":")
    assert [len(f) for f in frames] == [192] * 4
    last = Batch.from_data_list([AtomicData.from_atoms(frames[-1])])
    model = wrapper("mace")
    assert abs(float(single(model, last, 0.0)["energy"]) - frames[-1].get_potential_energy()) < 1e-8
    assert frames[-1].get_potential_energy() == summary["energy_eV"]


@needs("cuequivariance_torch")
def test_cuequivariance_network_equals_the_plain_one():
    batch = Batch.from_data_list([crystal((3, 3, 3))])
    expected = single(wrapper("mace"), batch, 0.3)
    converted = single(wrapper("mace-cueq"), batch, 0.3)
    assert (converted["forces"] - expected["forces"]).abs().max() <= 1e-10 * expected["forces"].abs().max()
    assert abs(float(converted["energy"] - expected["energy"])) <= 1e-10 * abs(float(expected["energy"]))
