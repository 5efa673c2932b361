"""Lennard-Jones for one kind of atom."""

from __future__ import annotations

import numpy as np

from nvalchemi_distributed.models.pair import PairPotentialWrapper


class LennardJonesModelWrapper(PairPotentialWrapper):
    """4ε[(σ/r)¹² − (σ/r)⁶] between all atoms, truncated at the cutoff.

    Args:
        epsilon: eV.
        sigma: Å.
        cutoff: Å.
        smoothing: ``none`` or ``shift``.
        tail_correction: see :class:`PairPotentialWrapper`.
        compile: see :class:`PairPotentialWrapper`.
    """

    def __init__(
        self,
        epsilon: float,
        sigma: float,
        cutoff: float,
        *,
        smoothing: str = "none",
        tail_correction: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__(
            "lennard_jones",
            {"epsilon": np.array([[epsilon]]), "sigma": np.array([[sigma]])},
            cutoff,
            smoothing=smoothing,
            tail_correction=tail_correction,
            compile=compile,
        )
