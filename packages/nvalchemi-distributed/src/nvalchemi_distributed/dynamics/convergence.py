"""Stops a run when every system has converged. The decision is the same on every rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.domain.reduce import Reducer
from nvalchemi_distributed.errors import ConfigError


class ConvergenceHook:
    """Converged: the largest force on any atom of a system is at most ``fmax`` eV/Å.

    Args:
        fmax: eV/Å.
    """

    def __init__(self, fmax: float) -> None:
        if not (math.isfinite(fmax) and fmax > 0):
            raise ConfigError(f"fmax={fmax}; give a positive force in eV/Å")
        self.fmax = fmax

    @classmethod
    def from_fmax(cls, threshold: float = 0.05) -> ConvergenceHook:
        """By the largest force norm."""
        return cls(threshold)

    def converged(self, batch: Batch, reduce: Reducer) -> Tensor:
        """(S,) booleans, equal on every rank."""
        norms = batch.forces.detach().norm(dim=-1).to(torch.float64)
        largest = norms.new_zeros(batch.num_graphs)
        if norms.numel():
            largest = largest.scatter_reduce(0, batch.batch_idx, norms, "amax")
        return reduce.max(largest, "convergence") <= self.fmax
