"""Several independent simulations of one state point: their keys, and starts that do not coincide.

``N`` particles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax_md import quantity, simulate


@dataclass(frozen=True)
class Chain:
    """Where a simulation stands.

    Attributes
    ----------
    state
        Simulator state after the last step.
    reference_position
        Positions ``(N, 3)`` at which the neighbour list was last valid and built; in NPT the list belongs to them and
        to the box of ``state``.
    """

    state: Any
    reference_position: jax.Array


jax.tree_util.register_dataclass(Chain, ["state", "reference_position"], [])


def chain_keys(key: jax.Array, chains: int) -> list[jax.Array]:
    """Keys of the chains of a state point that has the key ``key``."""
    # A fold of the same key for all but the first would collide with the first one's own splits.
    return [key] if chains == 1 else [jax.random.fold_in(key, chain) for chain in range(chains)]


def with_fresh_momenta(state: Any, key: jax.Array, kT: jax.Array) -> Any:
    """The state with momenta drawn anew, if its simulator has no noise of its own; else as it is.

    Without noise, two chains that start alike stay alike. Momenta are independent of positions in the ensembles, so
    a draw leaves the sampling right.
    """
    if hasattr(state, "rng"):
        return state
    state = simulate.initialize_momenta(state, key, kT)
    energy = quantity.kinetic_energy(momentum=state.momentum, mass=state.mass)
    # Nosé–Hoover thermostats keep the kinetic energy that they act on: in NVT under one name, in NPT under another.
    for name in ("chain", "thermostat"):
        if hasattr(state, name):
            state = state.set(**{name: getattr(state, name).set(kinetic_energy=energy)})
    return state
