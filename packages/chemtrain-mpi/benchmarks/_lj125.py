"""The problem of the benchmarks: DiffTRe on a small Lennard-Jones fluid, in reduced units.

N = 125, ρ = 0.7, kT = 0.9/1.2/1.6/2.2, cutoff 2.5, dt 0.005, Langevin γ = 1, 100 equilibration steps and 40 snapshots
every 20 steps, radial distribution function of 80 bins, float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_md import partition, simulate, space

from chemtrain_mpi import DifftreParallel, process_printouts
from chemtrain_mpi.observables import average
from chemtrain_mpi.potentials import PairTerms, pair_energy_template
from chemtrain_mpi.quantities import radial_distribution

N, CUTOFF, BINS = 125, 2.5, 80
EDGE = (N / 0.7) ** (1 / 3)
KT = (0.9, 1.2, 1.6, 2.2)


def make(reweight_ratio: float, parallelism: str, points: int = len(KT), **keywords: Any) -> DifftreParallel:
    """The trainer; a ratio of 1 recomputes every state point at every update, 0 none."""
    terms = PairTerms("lennard_jones", CUTOFF, "shift")
    displacement, shift = space.periodic_general(EDGE, fractional_coordinates=True)
    lists = partition.neighbor_list(
        displacement, jnp.float32(EDGE), CUTOFF, 0.3, fractional_coordinates=True, disable_cell_list=True
    )
    grid = np.stack(np.meshgrid(*[np.arange(5)] * 3, indexing="ij"), -1).reshape(-1, 3)
    # Half a box at most: the radial distribution counts nearest images.
    edges = np.linspace(0.0, EDGE / 2, BINS + 1)
    return DifftreParallel(
        jax.random.PRNGKey(0),
        {"epsilon": jnp.float32(1.0), "sigma": jnp.float32(1.0)},
        optax.adam(0.005),
        pair_energy_template(terms),
        partial(simulate.nvt_langevin, shift_fn=shift, dt=0.005, kT=1.0, gamma=1.0),
        lists,
        process_printouts(0.005, 4.5, 0.5, 0.1),
        {"kT": jnp.float32(np.resize(KT, points)), "box": jnp.full(points, EDGE, jnp.float32)},
        {"rdf": radial_distribution(edges)},
        {"rdf": {"target": jnp.ones((points, BINS), jnp.float32), "gamma": jnp.ones(points, jnp.float32)}},
        {"rdf": average("rdf")},
        reference_states={"position": jnp.broadcast_to(jnp.float32((grid + 0.5) / 5), (points, N, 3))},
        reweight_ratio=reweight_ratio,
        sim_batch_size=-1,
        overflow_capacity_multiplier=1.5,
        parallelism=parallelism,
        progress=False,
        **keywords,
    )
