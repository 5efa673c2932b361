"""Where particles are and how fast, for what is read off the order of the snapshots."""

from __future__ import annotations

from typing import Any

import jax

from chemtrain_mpi.quantities.box import Quantity


def position() -> Quantity:
    """Positions ``(N, 3)`` as the simulator has them: fractional, and folded into the box."""

    def positions(state: Any, **_: Any) -> jax.Array:
        return state.position

    return positions


def velocity() -> Quantity:
    """Velocities ``(N, 3)``, Cartesian, length unit over time unit."""

    def velocities(state: Any, **_: Any) -> jax.Array:
        return state.momentum / state.mass

    return velocities
