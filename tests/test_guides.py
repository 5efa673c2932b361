"""Every code block of the two guides that define the public behaviour, run as printed through the guide runners.

The guides lie beside the tree, not in it (``--guides FOLDER``); where they are absent these tests are skipped.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import guide_blocks
import guide_setups
import pytest
from guide_blocks import BLOCKS

import chemtrain_mpi.guide
import nvalchemi_distributed.guide
from distmd_protocol.module_aliases import install_aliases

LIMIT = 480.0
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "NPROC": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def run(command: list[str], folder: Path) -> None:
    """Run a launch line; past the time limit the launcher is asked to end its ranks, then killed."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                output, _ = process.communicate(timeout=20.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
            pytest.fail(f"not done within {LIMIT:.0f} s:\n{output[-8000:]}")
    assert process.returncode == 0, output[-8000:]


def figures(folder: Path, pattern: str) -> list[dict]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))]
    assert len(found) == 2, f"{pattern}: {len(found)} of 2 ranks reported"
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_each_block_is_found_exactly_once(guides: Path, name: str) -> None:
    first, last = BLOCKS[name].find(guides)
    assert last > first


@pytest.mark.parametrize("guide", [guide_blocks.DIFFTRE, guide_blocks.SIMULATIONS])
def test_no_line_of_python_or_shell_is_left_out(guides: Path, guide: str) -> None:
    begins = ("import ", "from ", "mpirun ", "torchrun ", "trainer", "dynamics =", "domain_cfg =", "pin_fp32(")
    lines = guide_blocks.read(guides, guide)
    code = {number for number, line in enumerate(lines) if line.strip().startswith(begins)}
    assert code
    left_out = [lines[n] for n in sorted(code - guide_blocks.covered(guides, guide, BLOCKS.values()))]
    assert not left_out


# Every name that the guides import or mention as a path, under their names and under ours.
NAMES = [
    ("chemtrain.trainers", "chemtrain_mpi.trainers", "DifftreParallel"),
    ("nvalchemi.data", "nvalchemi_distributed.data", "Batch"),
    ("nvalchemi.distributed", "nvalchemi_distributed", "DomainParallel"),
    ("nvalchemi.distributed.config", "nvalchemi_distributed.config", "StrategyKind"),
    ("nvalchemi.distributed.distributed_model", "nvalchemi_distributed.distributed_model", "DistributedModel"),
    ("nvalchemi.distributed.spec", "nvalchemi_distributed.spec", "MLIPSpec"),
    ("nvalchemi.dynamics", "nvalchemi_distributed.dynamics", "NVTLangevin"),
    ("nvalchemi.dynamics.base", "nvalchemi_distributed.dynamics.base", "BaseDynamics"),
    ("nvalchemi.dynamics.hooks", "nvalchemi_distributed.dynamics.hooks", "SnapshotHook"),
    ("nvalchemi.hooks", "nvalchemi_distributed.hooks", "NeighborListHook"),
    ("nvalchemi.models.base", "nvalchemi_distributed.models.base", "BaseModelMixin"),
    ("nvalchemi._typing", "nvalchemi_distributed._typing", "ModelOutputs"),
]


@pytest.fixture
def aliased(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both packages under the guides' names, for one test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    install_aliases({**chemtrain_mpi.guide.ALIASES, **nvalchemi_distributed.guide.ALIASES})
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("chemtrain", "nvalchemi")]:
        del sys.modules[name]


@pytest.mark.parametrize(("alias", "real", "name"), NAMES)
def test_a_guide_s_module_is_ours(aliased: None, alias: str, real: str, name: str) -> None:
    assert importlib.import_module(alias) is importlib.import_module(real)
    assert getattr(importlib.import_module(alias), name) is getattr(importlib.import_module(real), name)


@pytest.fixture(scope="module")
def trained(guides: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The DiffTRe guide: its launch line starts its snippet on two ranks."""
    folder = tmp_path_factory.mktemp("difftre")
    script = guide_setups.DIFFTRE_BEFORE + BLOCKS["trainer"].text(guides) + guide_setups.DIFFTRE_AFTER
    (folder / "train_difftre.py").write_text(script, encoding="utf-8")
    run(["bash", "-c", guide_blocks.substitute(BLOCKS["launch"].text(guides), guide_blocks.TO_RUNNER)], folder)
    return figures(folder, "rank*.json")


@pytest.mark.mpi
def test_difftre_snippet_trains_a_hundred_epochs_on_two_ranks(trained: list[dict]) -> None:
    for rank in trained:
        assert rank["module"].startswith("chemtrain_mpi.")
        assert rank["size"] == 2
        assert rank["updates"] == 100
        assert rank["batches"] == [[0, 1, 2, 3]]
        assert 0 < rank["recomputed"] < 400
        assert rank["losses"][1] < 0.5 * rank["losses"][0]


@pytest.mark.mpi
def test_difftre_snippet_ends_with_the_same_parameters_on_both_ranks(trained: list[dict]) -> None:
    assert trained[0]["params"] == trained[1]["params"]


@pytest.fixture(scope="module")
def simulated(guides: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulations guide: all its blocks in one script, in an order in which each has what it needs."""
    folder = tmp_path_factory.mktemp("simulations")
    text = {name: block.text(guides) for name, block in BLOCKS.items()}
    parts = [
        guide_setups.SIMULATIONS_BEFORE,
        text["pin_fp32"],
        guide_setups.AFTER_PIN_FP32,
        guide_blocks.substitute(text["mace"], guide_blocks.TO_CPU, guide_blocks.MACE_STAND_IN),
        guide_setups.AFTER_MACE,
        guide_setups.BEFORE_COMPILE,
        textwrap.indent(text["compile"], "    "),
        guide_setups.AFTER_COMPILE,
        guide_setups.BEFORE_GLOBAL_HOOK,
        text["global_hook"],
        guide_setups.AFTER_GLOBAL_HOOK,
    ]
    (folder / "script.py").write_text("".join(parts), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run([*torchrun, "-m", "nvalchemi_distributed.guide", "script.py"], folder)
    return folder


@pytest.mark.gloo
def test_pin_fp32_block_reaches_torch_and_the_environment(simulated: Path) -> None:
    for rank in figures(simulated, "pin_fp32-*.json"):
        assert rank["variable"] == "0"
        assert rank["precision"] == "highest"
        assert rank["module"].startswith("distmd_protocol")


@pytest.mark.gloo
def test_mace_block_with_a_pair_potential_in_the_model_s_place(simulated: Path) -> None:
    ranks = figures(simulated, "mace-*.json")
    assert sum(rank["owned"] for rank in ranks) == ranks[0]["total"] == 128
    for rank in ranks:
        assert rank["model"].startswith("nvalchemi_distributed.")
        assert rank["finite"]
        assert 0 < rank["owned"] + rank["ghosts"] < rank["total"], "each rank holds the whole system: says little"
        assert len(rank["steps"]) == 20
        assert rank["steps"][-1] - rank["steps"][0] == 190
    for atoms in zip(*(rank["atoms"] for rank in ranks), strict=True):
        assert sum(atoms) == 128


@pytest.mark.gloo
def test_compile_block_is_refused_for_now(simulated: Path) -> None:
    for rank in figures(simulated, "compile-*.json"):
        assert rank["error"] == "ConfigError"
        assert "compile=True" in rank["message"]
        assert "leave compile at False" in rank["message"]


@pytest.mark.gloo
def test_global_hook_gives_every_rank_the_kinetic_energy_of_the_whole_system(simulated: Path) -> None:
    ranks = figures(simulated, "global_hook-*.json")
    assert ranks[0]["seen"] == ranks[1]["seen"]
    assert sum(rank["share"] for rank in ranks) == pytest.approx(ranks[0]["expected"])
    for rank in ranks:
        assert len(rank["seen"]) == 3
        # The hook runs before the step: at the first one the velocities are those of the start.
        assert rank["seen"][0] == pytest.approx(rank["expected"], rel=1e-12)
        assert rank["share"] < 0.9 * rank["expected"]
