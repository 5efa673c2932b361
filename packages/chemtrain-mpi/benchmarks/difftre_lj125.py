"""CPU seconds of DiffTRe updates on a small Lennard-Jones fluid.

    NPROC=1 python difftre_lj125.py [--json FILE]
    NPROC=1 mpirun -np 2 -x NPROC python difftre_lj125.py --parallelism mpi [--json FILE]

N = 125, ρ = 0.7, kT = 0.9/1.2/1.6/2.2, cutoff 2.5, dt 0.005, Langevin γ = 1, 100 equilibration steps and 40 snapshots
every 20 steps, radial distribution function of 80 bins, float32, 4 state points. The anchors are the figures of the
published single-process trainer chemtrain 0.2.0 on the same problem, measured elsewhere.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_md import partition, simulate, space

import chemtrain_mpi
from chemtrain_mpi import DifftreParallel, process_printouts
from chemtrain_mpi.observables import average
from chemtrain_mpi.potentials import PairTerms, pair_energy_template
from chemtrain_mpi.quantities import radial_distribution
from distmd_protocol.testkit.benchmark import Record, format_table, write_records

N, CUTOFF = 125, 2.5
EDGE = (N / 0.7) ** (1 / 3)
KT = (0.9, 1.2, 1.6, 2.2)
PEER = {"recompute": 5.48, "reuse": 0.73, "first-two": 18.0}
UPDATES = 5


def make(reweight_ratio: float, parallelism: str) -> DifftreParallel:
    """The trainer; a ratio of 1 recomputes every state point at every update, 0 none."""
    terms = PairTerms("lennard_jones", CUTOFF, "shift")
    displacement, shift = space.periodic_general(EDGE, fractional_coordinates=True)
    lists = partition.neighbor_list(
        displacement, jnp.float32(EDGE), CUTOFF, 0.3, fractional_coordinates=True, disable_cell_list=True
    )
    grid = np.stack(np.meshgrid(*[np.arange(5)] * 3, indexing="ij"), -1).reshape(-1, 3)
    # Half a box at most: the radial distribution counts nearest images.
    edges = np.linspace(0.0, EDGE / 2, 81)
    return DifftreParallel(
        jax.random.PRNGKey(0),
        {"epsilon": jnp.float32(1.0), "sigma": jnp.float32(1.0)},
        optax.adam(0.005),
        pair_energy_template(terms),
        partial(simulate.nvt_langevin, shift_fn=shift, dt=0.005, kT=1.0, gamma=1.0),
        lists,
        process_printouts(0.005, 4.5, 0.5, 0.1),
        {"kT": jnp.float32(KT), "box": jnp.full(4, EDGE, jnp.float32)},
        {"rdf": radial_distribution(edges)},
        {"rdf": {"target": jnp.ones((4, 80), jnp.float32), "gamma": jnp.ones(4, jnp.float32)}},
        {"rdf": average("rdf")},
        reference_states={"position": jnp.broadcast_to(jnp.float32((grid + 0.5) / 5), (4, N, 3))},
        reweight_ratio=reweight_ratio,
        sim_batch_size=-1,
        overflow_capacity_multiplier=1.5,
        parallelism=parallelism,
        progress=False,
    )


def measure(parallelism: str) -> tuple[dict[str, float], dict[str, float], int, int]:
    """CPU and wall seconds by kind of update, this rank and the number of ranks."""
    cpu: dict[str, float] = {}
    wall: dict[str, float] = {}
    begin = time.process_time(), time.perf_counter()
    trainer = make(1.0, parallelism)
    trainer.initialize_trajstates()
    trainer.train(2)
    cpu["first-two"], wall["first-two"] = time.process_time() - begin[0], time.perf_counter() - begin[1]
    for kind in ("recompute", "reuse"):
        if kind == "reuse":
            trainer = make(0.0, parallelism)
            trainer.initialize_trajstates()
            trainer.train(2)
        samples = []
        for _ in range(UPDATES):
            begin = time.process_time(), time.perf_counter()
            trainer.train(1)
            samples.append((time.process_time() - begin[0], time.perf_counter() - begin[1]))
        recomputed = {len(entry["recomputed"]) for entry in trainer.history[-UPDATES:]}
        assert recomputed == {4 if kind == "recompute" else 0}, recomputed
        cpu[kind] = statistics.median(sample[0] for sample in samples)
        wall[kind] = statistics.median(sample[1] for sample in samples)
    return cpu, wall, trainer.rank, trainer.size


def main() -> None:
    """Measure, print a table, and write the records."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", help="file for the records")
    arguments.add_argument("--parallelism", choices=("single", "mpi"), default="single")
    options = arguments.parse_args()
    cpu, wall, rank, size = measure(options.parallelism)
    if rank:
        return
    common: dict[str, Any] = {"ranks": size, "dtype": "float32"}
    versions = {name: version(name) for name in ("jax", "jax-md")}
    common["versions"] = {"chemtrain-mpi": chemtrain_mpi.__version__, **versions}
    peer = "chemtrain 0.2.0, one process, as published for this problem"
    records = []
    for kind, value in cpu.items():
        work = f"difftre-lj125-{kind}"
        records.append(Record("chemtrain-mpi", work, metric="cpu_s", value=value, unit="s a rank", anchor=peer,
                              anchor_value=PEER[kind], **common))
        records.append(Record("chemtrain-mpi", work, metric="wall_s", value=wall[kind], unit="s", **common))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    records.append(Record("chemtrain-mpi", "difftre-lj125", metric="peak_rss", value=peak, unit="MB", anchor=peer,
                          anchor_value=839.0, **common))
    print(format_table(records))
    if options.json:
        write_records(options.json, records)


if __name__ == "__main__":
    main()
