"""Pieces that integrators share."""

from __future__ import annotations

import math

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.units import FEMTOSECOND


def internal_time(dt: float) -> float:
    """A time step in fs as Å·√(amu/eV).

    Raises:
        ConfigError: not a positive finite number.
    """
    if not (math.isfinite(dt) and dt > 0):
        raise ConfigError(f"dt={dt}; give a positive time step in fs")
    return float(dt) * FEMTOSECOND


def kick(batch: Batch, time: float) -> None:
    """v ← v + time · f/m in place; ``time`` in Å·√(amu/eV)."""
    batch.velocities.addcmul_(batch.forces, batch.inverse_masses, value=time)
