"""What is kept of a state point: its chains, its snapshots, and what they were sampled under.

A state point has ``C`` chains, independent simulations of the same system. ``T`` snapshots of all chains together,
``N`` particles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chemtrain_mpi.capacity import Capacity
from chemtrain_mpi.chains import Chain
from chemtrain_mpi.free_energy import FreeEnergyRecord

SimState = Any
Params = Any
Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class Trajectory:
    """What is kept of one state point.

    Attributes
    ----------
    chains
        Where the next trajectory starts, by chain.
    capacity
        Of the neighbour lists of all chains.
    snapshots
        Simulator states with a leading axis ``T``, one chain after the other and each in the order of time; ``None``
        before the first trajectory.
    reference_energy
        ``U`` of the snapshots under the potential that sampled them, ``(T,)``.
    reference_kwargs
        The state keywords (``kT``, ``pressure``, ``box``, …) under which it was sampled.
    free_energy
        Free energy of that potential since training began; ``None`` where nobody asked for it.
    cache
        What can be made again from the rest, with the same bits: the chains' lists, and the slots of every snapshot's
        own list. Neither stored nor sent.
    """

    chains: tuple[Chain, ...]
    capacity: Capacity
    snapshots: SimState | None
    reference_energy: jax.Array | None
    reference_kwargs: dict[str, Any]
    free_energy: FreeEnergyRecord | None = None
    cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


def box_kwargs(state: SimState, kwargs: Kwargs) -> dict[str, Any]:
    """The ``box`` keyword of a snapshot: the state's own in NPT, else the state point's, else none."""
    box = getattr(state, "box", None)
    box = kwargs.get("box") if box is None else box
    return {} if box is None else {"box": box}


def energy_kwargs(state: SimState, kwargs: Kwargs) -> dict[str, Any]:
    """State keywords for the energy function, with the box of this snapshot."""
    return {**kwargs, **box_kwargs(state, kwargs)}


def arrays(trajectory: Trajectory) -> tuple[Any, ...]:
    """Everything of a trajectory that is computed, as a tree of arrays: what a rank sends to the others."""
    record = trajectory.free_energy
    values = None if record is None else record.values
    return trajectory.chains, trajectory.snapshots, trajectory.reference_energy, values


def to_host(trajectory: Trajectory) -> Trajectory:
    """The same with every array in host memory."""
    return _moved(trajectory, np.asarray)


def to_device(trajectory: Trajectory) -> Trajectory:
    """The same with every array on the device."""
    return _moved(trajectory, jnp.asarray)


def _moved(trajectory: Trajectory, place: Callable[[Any], Any]) -> Trajectory:
    chains, snapshots, energy, _ = arrays(trajectory)
    chains, snapshots, energy = jax.tree.map(place, (chains, snapshots, energy))
    record = trajectory.free_energy
    # The record's values stay as they are: a device may have no float64.
    record = None if record is None else replace(record, params=jax.tree.map(place, record.params))
    # Every snapshot has a list: together they take more than the states.
    cache = {name: place(part) if name == "slots" else part for name, part in trajectory.cache.items()}
    return replace(
        trajectory, chains=chains, snapshots=snapshots, reference_energy=energy, free_energy=record, cache=cache
    )
