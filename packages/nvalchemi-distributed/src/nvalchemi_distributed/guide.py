"""Runs a script that is written for the names of the guide: ``python -m nvalchemi_distributed.guide script.py``.

Under torchrun: ``torchrun --nproc_per_node=2 -m nvalchemi_distributed.guide script.py [arguments]``.
``nvalchemi.distributed.X`` and ``nvalchemi.X`` are ``nvalchemi_distributed.X``, in that process alone: processes that
the script spawns do not know them. The package nvalchemi, which owns the name, must not be installed beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from distmd_protocol.module_aliases import run_script

__all__ = ["ALIASES", "main"]

ALIASES: Mapping[str, str] = {
    "nvalchemi": "nvalchemi_distributed",
    "nvalchemi.distributed": "nvalchemi_distributed",
}
"""What each name of the guide stands for; the longest that fits counts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script with the guide's names and return the exit code.

    Args:
        arguments: the script's path and its own arguments; ``None`` takes those of the command line.
    """
    return run_script("nvalchemi_distributed.guide", ALIASES, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
