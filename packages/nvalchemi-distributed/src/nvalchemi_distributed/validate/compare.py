"""Lays the ranks' events beside those of one process and finds the first that differs.

Letters: N atoms, E edges, S systems. Rows of atoms are laid side by side by their numbers; whether a plain tensor's
rows are atoms is read off its size here, where a wrong reading can only hide a hint: the outputs decide.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Run:
    """What one run recorded.

    Attributes:
        notes: (what, module, caller, kind, partial) of each event.
        values: of each event.
        extra: ``ids`` (rows), ``batch_idx`` (rows), ``output/NAME``.
        n_owned: rows that count.
    """

    notes: list[list[Any]]
    values: list[np.ndarray]
    extra: dict[str, np.ndarray]
    n_owned: int


@dataclass(frozen=True)
class Difference:
    """The first event that differs.

    Attributes:
        what, module, caller: of the event.
        gap: relative to the largest value.
        stale: arguments of the running module whose ghost rows differ from their owners'.
    """

    what: str
    module: str
    caller: str
    gap: float
    stale: tuple[str, ...]


def read_run(path: Path, n_owned: int | None = None) -> Run:
    """Read what a run wrote."""
    with np.load(path, allow_pickle=False) as file:
        notes = json.loads(file["notes"].tobytes().decode())
        values = [file[f"event/{k}"] for k in range(len(notes))]
        extra = {k[6:]: file[k] for k in file.files if k.startswith("extra/")}
    return Run(notes, values, extra, len(extra["ids"]) if n_owned is None else n_owned)


def relative(a: np.ndarray, b: np.ndarray, atol: float = 0.0) -> float:
    """Largest |a − b| beyond ``atol``, relative to the largest |b|; infinite where shapes differ or a is not finite."""
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    if b.size == 0:
        return 0.0
    scale = float(np.abs(b).max())
    gap = max(float(np.abs(a - b).max()) - atol, 0.0)
    return gap if scale == 0 else gap / scale


def first_difference(one: Run, ranks: list[Run], rtol: float) -> Difference | None:
    """The first event whose rows differ from those of one process by more than ``rtol``."""
    stale: dict[str, list[str]] = {}
    length = min(len(one.notes), *(len(r.notes) for r in ranks))
    for k in range(length):
        what, module, caller, _, _ = one.notes[k]
        if any(r.notes[k][0] != what for r in ranks):
            return Difference(f"{what} (ranks: {ranks[0].notes[k][0]})", module, caller, float("inf"), ())
        gap, ghosts = _gap(one, ranks, k)
        if what.startswith("argument "):
            target = what.rpartition(" of ")[2]
            if "argument " in what and what.startswith("argument 0 "):
                stale[target] = []
            if ghosts > rtol:
                stale.setdefault(target, []).append(what)
        if gap > rtol:
            return Difference(what, module, caller, gap, tuple(_stale_around(module, what, stale)))
    return None


def _stale_around(module: str, what: str, stale: dict[str, list[str]]) -> list[str]:
    """Stale arguments of the module that was running, or of one that encloses it; the outermost."""
    target = what.rpartition(" of ")[2] if what.startswith("argument ") else module
    paths = [p for p in stale if stale[p] and (target == p or target.startswith(f"{p}.") or p == module)]
    return stale[min(paths, key=len)] if paths else []


def _gap(one: Run, ranks: list[Run], k: int) -> tuple[float, float]:
    """How far event ``k`` is off on owned rows, and on ghost rows; zero where its rows cannot be told."""
    whole = one.values[k]
    n_atoms, kinds = len(one.extra["ids"]), {r.notes[k][3] for r in ranks}
    got = [r.values[k] for r in ranks]
    sharded = kinds - {""}
    if sharded == {"system"}:
        parts = [r.notes[k][4] for r in ranks]
        total = np.sum([g.astype(np.float64) for g in got], axis=0)
        return (relative(total, whole) if any(parts) else max(relative(g, whole) for g in got)), 0.0
    is_node = sharded == {"node"} or (
        not sharded
        and all(g.shape[:1] in ((r.n_owned,), (len(r.extra["ids"]),)) for g, r in zip(got, ranks, strict=True))
    )
    if is_node and whole.shape[:1] == (n_atoms,):
        order = np.argsort(one.extra["ids"])
        owned, ghosts = 0.0, 0.0
        for g, r in zip(got, ranks, strict=True):
            if g.shape[1:] != whole.shape[1:]:
                return float("inf"), 0.0
            expected = whole[order[np.searchsorted(one.extra["ids"][order], r.extra["ids"][: len(g)])]]
            scale = float(np.abs(whole).max()) or 1.0
            apart = np.abs(g - expected).reshape(len(g), -1).max(1, initial=0.0) / scale
            owned = max(owned, float(apart[: r.n_owned].max(initial=0.0)))
            ghosts = max(ghosts, float(apart[r.n_owned :].max(initial=0.0)))
        return owned, ghosts
    if not sharded and whole.shape[:1] != (n_atoms,) and all(g.shape == whole.shape for g in got):
        # A per-system value, a part of one, or the same number everywhere.
        total = np.sum([g.astype(np.float64) for g in got], axis=0)
        return min(relative(total, whole), max(relative(g, whole) for g in got)), 0.0
    return 0.0, 0.0
