"""The MACE program of the public guide, as it is printed there, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from networks import THIRD_PARTY_WARNINGS, mace_network, needs

pytestmark = [needs("mace"), pytest.mark.gloo, *THIRD_PARTY_WARNINGS]

# The folder lies beside the repository, and not everywhere.
GUIDE = Path(__file__).resolve().parents[5] / "shared" / "guides" / "distributed-simulations.md"
FIRST, LAST = "import torch\nimport torch.distributed as dist\n", "dist.destroy_process_group()\n"
# Literal, in this order; each must be found.
SUBSTITUTIONS = [
    ("nvalchemi.distributed", "nvalchemi_distributed"),
    ("nvalchemi.", "nvalchemi_distributed."),
    ('"nccl"', '"gloo"'),
    ('torch.device(f"cuda:{dist.get_rank()}")', 'torch.device("cpu")'),
    ("torch.cuda.set_device(device)\n", ""),
    ('    "cuda", list(', '    "cpu", list('),
    ("n_steps=200", "n_steps=20"),
]
BATCH = """
import ase.build

def build_my_batch(device):
    atoms = ase.build.bulk("Si", cubic=True) * (6, 2, 2)
    atoms.rattle(0.05, seed=1)
    return Batch.from_data_list([AtomicData.from_atoms(atoms, device=device)])

"""
CHECK = """
import os
from pathlib import Path

Path("done-" + os.environ["RANK"]).write_text(f"{len(sink)} frames, {dynamics.step_count} steps")
"""


def program(guide: Path) -> str:
    """The block, with the substitutions made and printed, and with what it leaves to the reader."""
    text = guide.read_text(encoding="utf-8")
    start = text.index(FIRST)
    block = text[start : text.index(LAST, start) + len(LAST)]
    assert "MACEWrapper.from_checkpoint" in block
    for old, new in SUBSTITUTIONS:
        assert old in block, old
        print(f"{old!r} → {new!r}")
        block = block.replace(old, new)
    assert "build_my_batch(device)" in block
    return block.replace("# 4. Build", BATCH + "# 4. Build", 1) + CHECK


@pytest.mark.skipif(not GUIDE.is_file(), reason="the folder of the public guides is not beside the repository")
def test_the_program_of_the_guide(tmp_path):
    run_program(GUIDE, tmp_path)


def run_program(guide: Path, folder: Path) -> None:
    cache = folder / "mace"
    cache.mkdir()
    # Random weights, named as mace-torch names what it has downloaded for "medium-0b2".
    torch.save(mace_network(), cache / "macemediumdensityagnesistressmodel")
    script = folder / "guide.py"
    script.write_text(program(guide), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(folder))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    for rank in range(2):
        assert (folder / f"done-{rank}").read_text() == "2 frames, 20 steps"
