"""The code blocks of the two guides, and what stands in for what a test machine has not.

The guides are plain text without fences: a table gives the first and the last line of each block.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DIFFTRE = "distributed-difftre.md"
SIMULATIONS = "distributed-simulations.md"


@dataclass(frozen=True)
class Block:
    """A code block: from the only line of the guide that is ``first`` to the next one that is ``last``.

    Lines count with their indentation.
    """

    guide: str
    first: str
    last: str

    def find(self, folder: Path) -> tuple[int, int]:
        """Numbers of the first and the last line, from 0."""
        lines = read(folder, self.guide)
        starts = [number for number, line in enumerate(lines) if line == self.first]
        assert len(starts) == 1, f"{self.guide}: {self.first!r} begins {len(starts)} lines, not one"
        ends = [number for number, line in enumerate(lines) if line == self.last and number >= starts[0]]
        assert ends, f"{self.guide}: no line {self.last!r} after {self.first!r}"
        return starts[0], ends[0]

    def text(self, folder: Path) -> str:
        """The block as printed, without common indentation."""
        first, last = self.find(folder)
        return textwrap.dedent("\n".join(read(folder, self.guide)[first : last + 1])) + "\n"


BLOCKS = {
    "launch": Block(
        DIFFTRE,
        "mpirun -np 2 bash -c \\",
        "  'CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK python train_difftre.py'",
    ),
    "trainer": Block(DIFFTRE, "from chemtrain.trainers import DifftreParallel", "trainer.train(max_epochs=100)"),
    "mace": Block(SIMULATIONS, "import torch", "dist.destroy_process_group()"),
    "compile": Block(SIMULATIONS, "domain_cfg = DomainConfig(", ")"),
    "pin_fp32": Block(
        SIMULATIONS,
        "from nvalchemi.distributed import pin_fp32",
        "pin_fp32()  # before constructing models, and before any CUDA context exists",
    ),
    "global_hook": Block(SIMULATIONS, "   from nvalchemi.dynamics.base import DynamicsStage", "   )"),
}

# Literal, and each must be found: the guide's device, the guide's interpreter.
TO_RUNNER = {"python train_difftre.py": f"{sys.executable} -m chemtrain_mpi.guide train_difftre.py"}
TO_CPU = {
    'backend="nccl"': 'backend="gloo"',
    'torch.device(f"cuda:{dist.get_rank()}")': 'torch.device("cpu")',
    "torch.cuda.set_device(device)\n": "",
    '"cuda", list(range': '"cpu", list(range',
}
# MACE has an environment of its own, where tests/models/test_guide.py of nvalchemi-distributed runs the block with it.
# Here everything else of that block runs, with a pair potential.
MACE_STAND_IN = {
    "from nvalchemi.models.mace import MACEWrapper": "from nvalchemi.models.lj import LennardJonesModelWrapper",
    'MACEWrapper.from_checkpoint("medium-0b2", device=device)': "LennardJonesModelWrapper(0.0101, 3.4, 5.0)",
}


def read(folder: Path, guide: str) -> list[str]:
    """Lines of a guide, without trailing blanks."""
    return [line.rstrip() for line in (folder / guide).read_text(encoding="utf-8").splitlines()]


def substitute(text: str, *tables: dict[str, str]) -> str:
    """Apply literal substitutions and print them; one that finds nothing is out of date, and an error."""
    for old, new in ((old, new) for table in tables for old, new in table.items()):
        assert old in text, f"the guide no longer says {old!r}"
        print(f"substituted: {old!r} -> {new!r}")
        text = text.replace(old, new)
    return text


def covered(folder: Path, guide: str, blocks: Iterable[Block]) -> set[int]:
    """Numbers of the lines of a guide that lie in a block."""
    ranges = [block.find(folder) for block in blocks if block.guide == guide]
    return {number for first, last in ranges for number in range(first, last + 1)}
