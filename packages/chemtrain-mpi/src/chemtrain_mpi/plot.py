"""Pictures of a training run. Needs the extra ``plot`` (matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from chemtrain_mpi.errors import MissingExtraError

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise MissingExtraError(
        f"matplotlib cannot be imported ({error}); install the extra: pip install 'chemtrain-mpi[plot]'"
    ) from error


def loss_curve(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss and smallest ``N_eff`` by update, from a trainer's ``history``; updates that recomputed are marked."""
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    updates = [entry["update"] for entry in history]
    losses = [entry["loss"] for entry in history]
    above.semilogy(updates, losses, color="tab:blue")
    recomputed = [(e["update"], e["loss"]) for e in history if e["recomputed"]]
    if recomputed:
        above.semilogy(*zip(*recomputed, strict=True), "o", color="tab:blue", markersize=4, label="new trajectories")
        above.legend()
    above.set_ylabel("loss")
    below.plot(updates, [min(entry["n_eff"].values()) for entry in history], color="tab:orange")
    below.set_ylabel("smallest effective sample size")
    below.set_xlabel("update")
    below.set_ylim(bottom=0)
    return figure


def targets_against_predictions(
    labels: Sequence[str],
    panels: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float] | None]],
) -> Figure:
    """One panel a target: reference and prediction of every state point.

    Parameters
    ----------
    labels
        State points ``(K,)``.
    panels
        By axis label (with the unit): targets ``(K,)``, predictions ``(K,)`` and their standard errors or ``None``.
    """
    figure = Figure(figsize=(5.2 * len(panels), 4.2), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(panels)))
    at = np.arange(len(labels))
    for axis, (title, (target, prediction, error)) in zip(axes, panels.items(), strict=True):
        axis.plot(at, target, "_", color="black", markersize=16, markeredgewidth=1.5, label="target")
        axis.errorbar(at, prediction, error, fmt="o", color="tab:blue", markersize=5, capsize=3, label="prediction")
        axis.set_xticks(at, labels, rotation=45, ha="right")
        axis.set_ylabel(title)
        axis.legend()
    return figure


def traces(columns: Mapping[str, Sequence[float]]) -> Figure:
    """One panel a quantity, by update."""
    figure = Figure(figsize=(6.4, 2.2 * len(columns) + 0.6), layout="constrained")
    axes = np.atleast_1d(figure.subplots(len(columns), 1, sharex=True))
    for axis, (label, values) in zip(axes, columns.items(), strict=True):
        axis.plot(range(len(values)), values, color="tab:green")
        axis.set_ylabel(label)
    axes[-1].set_xlabel("update")
    return figure
