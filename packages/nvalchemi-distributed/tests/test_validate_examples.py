"""The bring-your-own-model examples: validated, saved, and run with what was saved."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvalchemi_distributed import MLIPSpec

pytestmark = pytest.mark.gloo
EXAMPLES = Path(__file__).parents[1] / "examples" / "distributed"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name[:2]}", EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main_of(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["example", *map(str, arguments)])
    module.main()


def test_descriptor_network(tmp_path, monkeypatch):
    main_of(load("04_byo_pytorch_mpnn.py"), monkeypatch, "--out", tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"]
    assert max(report["attempts"][0]["deviations"].values()) < 1e-10
    total = sum(owned for owned, _ in report["attempts"][0]["rows"])
    assert all(owned + ghosts < total for owned, ghosts in report["attempts"][0]["rows"])
    command = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc_per_node", "2"]
    script = EXAMPLES / "04_byo_pytorch_mpnn.py"
    done = subprocess.run(
        [*command, script, "--out", tmp_path, "--simulate", "--steps", "10"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["ranks"] == 2
    assert run["atoms"] == total
    assert run["energy_after"] == pytest.approx(run["energy_before"], rel=1e-4)


def test_graph_transformer(tmp_path, monkeypatch):
    module = load("05_byo_graph_transformer.py")
    main_of(module, monkeypatch, "--out", tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"]
    assert max(report["attempts"][0]["deviations"].values()) < 1e-10
    spec = MLIPSpec.load(tmp_path / "spec.json")
    assert spec.distribution.custom_ops == (module.ADAPTER,)
    with pytest.raises(SystemExit, match="unsupported_op in byo::attention"):
        main_of(module, monkeypatch, "--out", tmp_path, "--without-adapter")


def test_the_kernel_of_the_graph_transformer():
    """Its backward formula against finite differences, and edges beyond the cutoff count for nothing."""
    module = load("05_byo_graph_transformer.py")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(4, 3, dtype=torch.float64, generator=g).requires_grad_() for _ in range(3))
    receivers, senders = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([1, 2, 0, 3, 1])
    bias = torch.rand(5, dtype=torch.float64, generator=g).requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: module.attention(*a, receivers, senders), (q, k, v, bias))
    model = module.make_model().model
    r = torch.tensor([2.0, 3.0, 7.0, 2.5, 6.0], dtype=torch.float64, requires_grad=True)
    energy = model(r, torch.tensor([11, 17, 11, 17]), receivers, senders)
    (slope,) = torch.autograd.grad(energy.sum(), r)
    assert torch.isfinite(slope).all()
    assert slope[2] == slope[4] == 0
    near = r < 5.0
    assert torch.allclose(energy, model(r[near], torch.tensor([11, 17, 11, 17]), receivers[near], senders[near]))
