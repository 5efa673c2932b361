"""An Einstein crystal in a box of Gaussian volume, sampled exactly: every average and free energy is known.

``N`` particles on springs to sites that move with the box, and a spring on the volume,

    U = k/2 Σ |r − r_0|² + c/2 (V − v)²,

with parameters ``k`` and ``v``. In NVT (box fixed) ``F = 3N kT/2 ln k + c/2 (V − v)²`` and a constant. In NPT
``G = 3N kT/2 ln k + P v`` and a constant, ``⟨V⟩ = v − P/c``, and the mean of ``U`` is ``3N kT/2 + kT/2 + P²/(2c)``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
from jax_md import dataclasses

from chemtrain_mpi import DifftreParallel, process_printouts
from chemtrain_mpi.observables import average
from chemtrain_mpi.quantities import potential_energy

SITES = jnp.asarray(problems.lattice(2))
DOF = 3 * SITES.shape[0]
C = 0.5
START = {"k": 40.0, "v": 64.0}


def energy_fn_template(params: Any) -> Any:
    def energy(position: jax.Array, neighbor: Any = None, *, box: jax.Array, **_: Any) -> jax.Array:
        shift = position - SITES.astype(position.dtype)
        shift = (shift - jnp.round(shift)) * box
        return 0.5 * params["k"] * jnp.sum(shift**2) + 0.5 * C * (box**3 - params["v"]) ** 2

    return energy


@dataclasses.dataclass
class FixedBox:
    """State of the sampler in NVT."""

    position: jax.Array
    rng: jax.Array


@dataclasses.dataclass
class MovingBox:
    """State of the sampler in NPT; ``box`` is the edge."""

    position: jax.Array
    box: jax.Array
    rng: jax.Array


def simulator(moving: bool) -> Any:
    """Independent exact samples, one a step. The springs are found from the energy function's derivatives."""

    def template(energy_fn: Any) -> tuple[Any, Any]:
        def init(key: jax.Array, position: jax.Array, box: jax.Array, **_: Any) -> Any:
            return MovingBox(position, box, key) if moving else FixedBox(position, key)

        def apply(state: Any, kT: jax.Array, pressure: jax.Array = 0.0, **kwargs: Any) -> Any:
            key, one, two = jax.random.split(state.rng, 3)
            edge = state.box if moving else kwargs["box"]
            sites = SITES.astype(state.position.dtype)
            stretched = sites.at[0, 0].add(0.1 / edge)
            k = 2.0 * (energy_fn(stretched, box=edge) - energy_fn(sites, box=edge)) / 0.1**2
            if moving:
                # The volume at which the spring on it is at rest.
                rest = edge**3 - jax.grad(lambda e: energy_fn(sites, box=e))(edge) / (3 * edge**2) / C
                volume = rest - pressure / C + jnp.sqrt(kT / C) * jax.random.normal(two)
                edge = jnp.cbrt(volume)
            noise = jax.random.normal(one, sites.shape, sites.dtype)
            position = jnp.mod(sites + jnp.sqrt(kT / k) * noise / edge, 1.0)
            state = state.set(position=position, rng=key)
            return state.set(box=edge) if moving else state

        return init, apply

    return template


def volume(state: Any, **_: Any) -> jax.Array:
    return state.box**3


def trainer(points: int = 2, moving: bool = False, snapshots: int = 60, **overrides: Any) -> DifftreParallel:
    """``kT`` of 1 and 1.5, ``P`` of 0.3 and 0.5 at the first two state points."""
    kwargs = {"kT": 1.0 + 0.5 * jnp.arange(points), "box": jnp.full(points, 4.0)}
    if moving:
        kwargs["pressure"] = 0.3 + 0.2 * jnp.arange(points)
    quantities = {"energy": potential_energy(energy_fn_template), **({"volume": volume} if moving else {})}
    base = {
        "key": jax.random.PRNGKey(1),
        "init_params": {name: jnp.asarray(value) for name, value in START.items()},
        "optimizer": optax.sgd(0.0),
        "energy_fn_template": energy_fn_template,
        "simulator_template": simulator(moving),
        "neighbor_fn": problems.neighbor_fn(),
        "timings": process_printouts(1.0, float(snapshots), 0.0, 1.0),
        "state_kwargs": kwargs,
        "quantities": quantities,
        "targets": {"energy": {"target": jnp.zeros(points), "gamma": jnp.zeros(points)}},
        "observables": {name: average(name) for name in quantities},
        "reference_states": {"position": jnp.broadcast_to(SITES, (points, *SITES.shape))},
        "reweight_ratio": 0.9,
        "sim_batch_size": -1,
        "parallelism": "auto",
        "progress": False,
    }
    return DifftreParallel(**{**base, **overrides})


def free_energy(params: Any, kT: Any, pressure: Any = None) -> np.ndarray:
    """Free energy relative to ``START``: NVT in a box of edge 4, or NPT at this pressure."""
    springs = 0.5 * DOF * np.asarray(kT) * np.log(float(params["k"]) / START["k"])
    if pressure is not None:
        return springs + np.asarray(pressure) * (float(params["v"]) - START["v"])
    return springs + 0.5 * C * ((64.0 - float(params["v"])) ** 2 - (64.0 - START["v"]) ** 2)
