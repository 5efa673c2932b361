"""Small training problems that several tests share. Reduced Lennard-Jones units."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_md import partition, simulate, space

from chemtrain_mpi import DifftreParallel, process_printouts
from chemtrain_mpi.constant_pressure import npt_nose_hoover
from chemtrain_mpi.observables import average
from chemtrain_mpi.potentials import PairTerms, pair_energy_template
from chemtrain_mpi.quantities import pair_pressure, potential_energy

CUTOFF = 1.7
TERMS = PairTerms("lennard_jones", CUTOFF, "shift")
EDGES = (3.9, 4.0, 4.1, 4.2, 3.95, 4.05, 4.15, 4.25)


def lattice(cells: int = 3, jitter: float = 0.0, seed: int = 0) -> np.ndarray:
    """A simple cubic crystal in fractional coordinates ``(cells³, 3)``."""
    grid = np.stack(np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    return (grid + 0.5 + jitter * np.random.default_rng(seed).uniform(-1, 1, grid.shape)) / cells


def neighbor_fn(edge: float = 4.0, skin: float = 0.3, **keywords: Any) -> partition.NeighborListFns:
    displacement, _ = space.periodic_general(edge, fractional_coordinates=True)
    keywords = {"disable_cell_list": True, "fractional_coordinates": True, **keywords}
    return partition.neighbor_list(displacement, jnp.asarray(edge), CUTOFF, dr_threshold=skin, **keywords)


def simulator(dt: float = 0.005, **keywords: Any) -> partial:
    _, shift = space.periodic_general(4.0, fractional_coordinates=True)
    return partial(simulate.nvt_langevin, shift_fn=shift, dt=dt, kT=1.0, gamma=1.0, **keywords)


def arguments(points: int = 4, **overrides: Any) -> dict[str, Any]:
    """Constructor arguments by name: Lennard-Jones ε and σ against made-up energies and pressures."""
    template = pair_energy_template(TERMS)
    edges = jnp.asarray(EDGES[:points])
    base = {
        "key": jax.random.PRNGKey(3),
        "init_params": {"epsilon": jnp.asarray(0.9), "sigma": jnp.asarray(0.95)},
        "optimizer": optax.adam(0.02),
        "energy_fn_template": template,
        "simulator_template": simulator(),
        "neighbor_fn": neighbor_fn(),
        "timings": process_printouts(0.005, 0.5, 0.1, 0.05),
        "state_kwargs": {"kT": jnp.linspace(1.0, 1.6, points), "box": edges},
        "quantities": {"energy": potential_energy(template), "pressure": pair_pressure(TERMS)},
        "targets": {
            "energy": {"target": jnp.linspace(-60.0, -40.0, points), "gamma": jnp.full(points, 1e-3)},
            "pressure": {"target": jnp.linspace(0.2, 0.6, points), "gamma": jnp.ones(points)},
        },
        "observables": {"energy": average("energy"), "pressure": average("pressure")},
        "reference_states": {"position": jnp.asarray(np.stack([lattice(jitter=0.1, seed=k) for k in range(points)]))},
        "reweight_ratio": 0.9,
        "sim_batch_size": -1,
        "parallelism": "auto",
        "progress": False,
    }
    return {**base, **overrides}


def constant_pressure(points: int = 2, box: Any = 4.0, **overrides: Any) -> dict[str, Any]:
    """The same under a barostat; ``box`` is an edge, three edges or a matrix, the same at every state point."""
    _, shift = space.periodic_general(4.0, fractional_coordinates=True)
    box = jnp.asarray(box)
    base = {
        # One capacity does for all, so that nothing is compiled again.
        "overflow_capacity_multiplier": 3.0,
        "simulator_template": partial(npt_nose_hoover, shift_fn=shift, dt=0.002, pressure=1.0, kT=1.0),
        "timings": process_printouts(0.002, 0.12, 0.04, 0.04),
        "state_kwargs": {
            "kT": jnp.linspace(1.0, 1.6, points),
            "pressure": jnp.linspace(0.5, 1.0, points),
            "box": jnp.broadcast_to(box, (points, *box.shape)),
        },
    }
    return arguments(points, **{**base, **overrides})


def trainer(points: int = 4, **overrides: Any) -> DifftreParallel:
    return DifftreParallel(**arguments(points, **overrides))


def bits(tree: Any) -> list[str]:
    """Every leaf's bytes in hexadecimal, to compare bit for bit over a JSON wire."""
    return [np.ascontiguousarray(np.asarray(leaf)).tobytes().hex() for leaf in jax.tree.leaves(tree)]
