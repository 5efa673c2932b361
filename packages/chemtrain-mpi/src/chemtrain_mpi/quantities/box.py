"""The box of a snapshot, and what follows from it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from chemtrain_mpi.boxes import box_volume
from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.trajectories import energy_kwargs

Quantity = Callable[..., jax.Array]
"""``quantity(state, neighbor=…, energy_params=…, **state_kwargs)`` of one snapshot."""


def snapshot_box(state: Any, kwargs: dict[str, Any]) -> jax.Array:
    """The box of a snapshot: the state's own in NPT, else the state point's.

    Raises
    ------
    ArgumentError
        If there is none.
    """
    box = energy_kwargs(state, kwargs).get("box")
    if box is None:
        raise ArgumentError("this quantity needs the box: give state_kwargs a 'box', or use an NPT simulator")
    return box


def density() -> Quantity:
    """Number density ``N / V``."""

    def number_density(state: Any, **kwargs: Any) -> jax.Array:
        return state.position.shape[0] / box_volume(snapshot_box(state, kwargs))

    return number_density


def volume() -> Quantity:
    """Volume ``V``."""

    def box_size(state: Any, **kwargs: Any) -> jax.Array:
        return box_volume(snapshot_box(state, kwargs))

    return box_size
