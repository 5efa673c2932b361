"""One record format for every benchmark of the repository."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Record:
    """One measured number beside the number it is compared with.

    Parameters
    ----------
    name
        Who was measured (``"protocol"``, ``"safetensors"``).
    work
        What it did (``"checkpoint-write-1GB"``).
    ranks
        Number of ranks.
    dtype
        Element type.
    metric, value, unit
        What was measured (``"throughput"``, ``2.1``, ``"GB/s"``).
    anchor, anchor_value
        What it is compared with, measured in the same run, and its value.
    versions
        Versions of what took part.
    """

    name: str
    work: str
    ranks: int
    dtype: str
    metric: str
    value: float
    unit: str
    anchor: str | None = None
    anchor_value: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Value over anchor value."""
        return self.value / self.anchor_value if self.anchor_value else None


def write_records(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Write records as a JSON list."""
    rows = [{**asdict(record), "ratio": record.ratio} for record in records]
    order = ("name", "work", "ranks", "dtype", "metric", "value", "unit", "anchor", "anchor_value", "ratio", "versions")
    with open(path, "w", encoding="utf-8") as file:
        json.dump([{name: row[name] for name in order} for row in rows], file, indent=2)
        file.write("\n")


def format_table(records: Sequence[Record]) -> str:
    """Return records as a table in text."""
    rows = [("name", "work", "ranks", "dtype", "metric", "value", "unit", "anchor", "anchor value", "ratio")]
    for record in records:
        anchor = "" if record.anchor_value is None else f"{record.anchor_value:.4g}"
        ratio = "" if record.ratio is None else f"{record.ratio:.3g}"
        measured = (record.metric, f"{record.value:.4g}", record.unit)
        compared = (record.anchor or "", anchor, ratio)
        rows.append((record.name, record.work, str(record.ranks), record.dtype, *measured, *compared))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
