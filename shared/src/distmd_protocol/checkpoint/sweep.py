"""Removing what crashed writers left behind, and nothing else."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path

from distmd_protocol.checkpoint.layout import MANIFEST, REPLACED, Leftover, parse_leftover
from distmd_protocol.checkpoint.limits import STALE_AFTER_S

_log = logging.getLogger(__name__)


def leftovers(folder: Path) -> list[Leftover]:
    """Return the leftovers in a folder, of writers dead or alive."""
    with os.scandir(folder) as entries:
        found = [parse_leftover(Path(entry.path)) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [leftover for leftover in found if leftover is not None]


def sweep(folder: Path, stale_after: float = STALE_AFTER_S) -> list[Path]:
    """Remove leftovers whose writer is provably gone or which nobody has touched for ``stale_after`` seconds.

    A replaced checkpoint whose successor never arrived gets its name back instead.

    Returns
    -------
    list of Path
        What was removed or renamed.
    """
    swept = []
    for leftover in leftovers(folder):
        try:
            if not leftover.writer.is_gone() and time.time() - _last_touched(leftover.path) < stale_after:
                continue
            _put_away(leftover)
        except OSError as error:
            # Another writer may be sweeping too; what stays is tried again at the next save.
            _log.info("leftover %s stays: %s", leftover.path, error)
            continue
        _log.info("swept %s", leftover.path)
        swept.append(leftover.path)
    return swept


def _put_away(leftover: Leftover) -> None:
    successor = leftover.path.with_name(leftover.name)
    if leftover.role == REPLACED and not (successor / MANIFEST).exists():
        leftover.path.rename(successor)
    else:
        shutil.rmtree(leftover.path)


def _last_touched(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
