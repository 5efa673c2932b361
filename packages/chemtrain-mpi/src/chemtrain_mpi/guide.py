"""Runs a script that is written for the names of the guide: ``python -m chemtrain_mpi.guide script.py [arguments]``.

``chemtrain.X`` is ``chemtrain_mpi.X``, in that process alone. The package chemtrain, which owns the name, must not be
installed beside it. What a script sets in ``os.environ`` comes after jax was imported; set it on the launch line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from distmd_protocol.module_aliases import run_script

__all__ = ["ALIASES", "main"]

ALIASES: Mapping[str, str] = {"chemtrain": "chemtrain_mpi"}
"""What each name of the guide stands for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script with the guide's names and return the exit code.

    Parameters
    ----------
    arguments
        The script's path and its own arguments; ``None``: those of the command line.
    """
    return run_script("chemtrain_mpi.guide", ALIASES, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
