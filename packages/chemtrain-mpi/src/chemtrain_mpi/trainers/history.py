"""What happened, one entry an update: in memory, as JSON lines, and in the log."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


class Stopwatch:
    """Seconds by phase, summed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"simulating": 0.0, "reweighting": 0.0, "communicating": 0.0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


class History:
    """Entries of all updates.

    Parameters
    ----------
    path
        File that rank zero appends each entry to as a line of JSON; ``None`` for none.
    writes
        Whether this rank writes and logs.
    """

    def __init__(self, path: Path | None, writes: bool) -> None:
        self.entries: list[dict[str, Any]] = []
        self._path = path if writes else None
        self._logs = writes

    def add(self, entry: dict[str, Any]) -> None:
        """Record one update."""
        self.entries.append(entry)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(entry) + "\n")
        if self._logs:
            sizes = entry["n_eff"].values()
            _log.info(
                "epoch %d update %d: loss %.6g, |gradient| %.3g, N_eff %.1f to %.1f, recomputed %d of %d, step %.3g, "
                "%.2f s simulating, %.2f s reweighting, %.2f s communicating",
                entry["epoch"],
                entry["update"],
                entry["loss"],
                entry["gradient_norm"],
                min(sizes),
                max(sizes),
                len(entry["recomputed"]),
                len(entry["batch"]),
                entry["step_size"],
                *(entry["seconds"][name] for name in ("simulating", "reweighting", "communicating")),
            )
