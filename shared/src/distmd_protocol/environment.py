"""All ranks compare what must be equal before the first step, and stop together with a table of the differences."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from distmd_protocol.comm import Comm
from distmd_protocol.errors import AgreementError
from distmd_protocol.precision import PrecisionPolicy

_log = logging.getLogger(__name__)

COMPARED_PACKAGES = (
    "distmd-protocol",
    "chemtrain-mpi",
    "nvalchemi-distributed",
    "numpy",
    "jax",
    "jaxlib",
    "jax-md",
    "mpi4py",
    "mpi4jax",
    "torch",
)
"""Distributions whose installed versions are compared, where they are installed."""


def environment(extra: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return what ``check_environment`` compares, as lines of text by name."""
    lines = {"python": platform.python_version()}
    for name in COMPARED_PACKAGES:
        try:
            lines[f"version of {name}"] = version(name)
        except PackageNotFoundError:
            lines[f"version of {name}"] = "not installed"
    lines.update(PrecisionPolicy.current().flat())
    lines.update({name: str(value) for name, value in (extra or {}).items()})
    return lines


def check_environment(comm: Comm, extra: Mapping[str, Any] | None = None) -> None:
    """Compare versions, dtype settings and precision policy over all ranks. Collective.

    Parameters
    ----------
    comm
        The communicator.
    extra
        More values that must be equal, by name. They are compared as text.

    Raises
    ------
    AgreementError
        On every rank, with a table of what differs, if anything does. Processors with other vector features are only
        reported in the log: the results are right on each, but not bitwise equal.
    """
    every = comm.allgather(environment(extra))
    names = sorted({name for lines in every for name in lines})
    differing = [name for name in names if len({lines.get(name) for lines in every}) > 1]
    fatal = [name for name in differing if not name.startswith("cpu.")]
    if differing and comm.rank == 0 and not fatal:
        _log.warning("ranks differ, results will not be bitwise reproducible:\n%s", table(differing, every))
    if fatal:
        raise AgreementError(
            f"the ranks differ in {len(fatal)} settings; start all of them in the same environment:\n"
            + table(fatal, every)
        )


def table(names: Sequence[str], every: Sequence[Mapping[str, str]]) -> str:
    """Return a table with one line a setting and value: the setting, the value, the ranks that have it."""
    rows = [("setting", "value", "ranks")]
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, lines in enumerate(every):
            ranks_of.setdefault(lines.get(name, "-"), []).append(rank)
        rows.extend((name, value, _ranges(ranks)) for value, ranks in ranks_of.items())
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows)


def _ranges(ranks: Sequence[int]) -> str:
    """Write ranks as ranges: ``0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
