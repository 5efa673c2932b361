"""The problem of ``_lj125.py`` on the published trainer chemtrain 0.2.0, run by the interpreter of its own environment.

    python _peer_chemtrain.py --json FILE [--updates 5]

Writes figures by kind of update as JSON. Called by ``compare_chemtrain.py``; imports nothing of this repository but
``_one_core.py``.
"""

from __future__ import annotations

from _one_core import hold_to_one_core

hold_to_one_core()

import argparse  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from importlib.metadata import version  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from chemtrain import trainers  # noqa: E402
from chemtrain.ensemble import sampling  # noqa: E402
from chemtrain.quantity import observables  # noqa: E402
from jax_md import partition, simulate, smap, space  # noqa: E402
from jax_md_mod import custom_quantity  # noqa: E402

N, CUTOFF, BINS = 125, 2.5, 80
EDGE = (N / 0.7) ** (1 / 3)
KT = (0.9, 1.2, 1.6, 2.2)

displacement, shift = space.periodic_general(EDGE, fractional_coordinates=True)


def pair_energy(dr, epsilon=1.0, sigma=1.0, **_):
    """Lennard-Jones, truncated and shifted."""

    def form(r):
        s6 = (sigma / r) ** 6
        return 4.0 * epsilon * (s6 * s6 - s6)

    inside = (dr > 0) & (dr < CUTOFF)
    return jnp.where(inside, form(jnp.where(inside, dr, CUTOFF)) - form(jnp.float32(CUTOFF)), 0.0)


def energy_fn_template(params):
    total = smap.pair_neighbor_list(
        pair_energy,
        space.canonicalize_displacement_or_metric(displacement),
        ignore_unused_parameters=True,
        epsilon=params["epsilon"],
        sigma=params["sigma"],
    )
    return lambda position, neighbor, **_: total(position, neighbor)


def make(reweight_ratio, folder):
    """The trainer; a ratio above 1 recomputes every state point at every update, 0 none."""
    params = {"epsilon": jnp.float32(1.0), "sigma": jnp.float32(1.0)}
    trainer = trainers.Difftre(
        params, optax.adam(0.005), reweight_ratio=reweight_ratio, sim_batch_size=-1, checkpoint_path=folder
    )
    lists = partition.neighbor_list(
        displacement,
        jnp.float32(EDGE),
        CUTOFF,
        0.3,
        fractional_coordinates=True,
        disable_cell_list=True,
        capacity_multiplier=1.5,
    )
    grid = np.stack(np.meshgrid(*[np.arange(5)] * 3, indexing="ij"), -1).reshape(-1, 3)
    start = jnp.float32((grid + 0.5) / 5)
    centers, boundaries, width = custom_quantity.rdf_discretization(EDGE / 2, nbins=BINS)
    target = jnp.ones(BINS, jnp.float32)
    rdf = custom_quantity.init_rdf(
        displacement, custom_quantity.RDFParams(target, centers, boundaries, width), reference_box=jnp.float32(EDGE)
    )
    timings = sampling.process_printouts(0.005, 4.5, 0.5, 0.1)
    assert timings.t_production_start.size == 40, timings.t_production_start.size
    assert timings.timesteps_per_printout == 20, timings.timesteps_per_printout
    for k, kT in enumerate(KT):
        neighbors = lists.allocate(start, extra_capacity=0)
        init_state, template = sampling.initialize_simulator_template(
            simulate.nvt_langevin,
            shift_fn=shift,
            nbrs=neighbors,
            extra_simulator_kwargs={"kT": kT, "gamma": 1.0, "dt": 0.005},
        )
        reference = init_state(
            jax.random.PRNGKey(k), start, energy_fn_template(params), {"mass": 1.0, "neighbor": neighbors}
        )
        trainer.add_statepoint(
            energy_fn_template,
            template,
            lists,
            timings,
            {"kT": kT},
            {"rdf": rdf},
            reference,
            targets={"rdf": {"gamma": 1.0, "target": target}},
            observables={"rdf": observables.init_traj_mean_fn("rdf")},
        )
    return trainer


def clock():
    return time.process_time(), time.perf_counter()


def since(start):
    return {"cpu_s": time.process_time() - start[0], "wall_s": time.perf_counter() - start[1]}


def peak_rss():
    """As in ``difftre_lj125.py``."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def median(trainer, updates):
    samples = []
    for _ in range(updates):
        start = clock()
        trainer.train(1)
        jax.block_until_ready(trainer.params)
        samples.append(since(start))
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def measure(updates, keep):
    """Figures by kind of update, as ``difftre_lj125.measure``; ``keep`` gets what is there after each kind."""
    figures = {}
    before, start = peak_rss(), clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(1.1, folder)
        trainer.train(2)
        jax.block_until_ready(trainer.params)
        figures["first-two"] = since(start)
        figures["recompute"] = median(trainer, updates)
        figures["first-two"].update(peak_rss=peak_rss(), rss_before=before)
        keep(figures)
        trainer = make(0.0, folder)
        trainer.train(2)
        figures["reuse"] = median(trainer, updates)
        keep(figures)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", required=True)
    arguments.add_argument("--updates", type=int, default=5)
    options = arguments.parse_args()
    versions = {name: version(name) for name in ("chemtrain", "jax", "jaxlib", "jax-md")}

    def keep(figures):
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"figures": figures, "versions": versions}, file)

    # The peer reports every step on standard output.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        measure(options.updates, keep)


if __name__ == "__main__":
    main()
