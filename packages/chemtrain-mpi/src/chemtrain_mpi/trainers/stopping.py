"""Early stopping on the history of epoch losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from chemtrain_mpi.errors import ArgumentError

Criterion = Callable[[Sequence[float]], float]

WINDOW = 5
"""Epochs that the windowed criteria look at."""


def max_loss(losses: Sequence[float]) -> float:
    """Largest loss of the last ``WINDOW`` epochs."""
    return float(np.max(losses[-WINDOW:])) if len(losses) >= WINDOW else np.inf


def ave_loss(losses: Sequence[float]) -> float:
    """Mean loss of the last ``WINDOW`` epochs."""
    return float(np.mean(losses[-WINDOW:])) if len(losses) >= WINDOW else np.inf


def window_median(losses: Sequence[float]) -> float:
    """Relative fall of the median loss between the last two windows of ``WINDOW`` epochs."""
    if len(losses) < 2 * WINDOW:
        return np.inf
    before, after = np.median(losses[-2 * WINDOW : -WINDOW]), np.median(losses[-WINDOW:])
    return float((before - after) / max(abs(before), np.finfo(float).tiny))


CRITERIA: dict[str, Criterion] = {"max_loss": max_loss, "ave_loss": ave_loss, "window_median": window_median}


def criterion(name: str | Criterion | None) -> Criterion | None:
    """The criterion of that name; a callable is taken as it is.

    Raises
    ------
    ArgumentError
        Naming the known ones.
    """
    if name is None or callable(name):
        return name
    if name not in CRITERIA:
        raise ArgumentError(f"convergence_criterion {name!r} is unknown; use {', '.join(CRITERIA)}, or a function")
    return CRITERIA[name]
