"""Coarse-grained water: one bead a molecule, fitted to the measured O-O radial distribution and to 1 bar.

    NPROC=1 mpirun -np 2 -x NPROC python water_cg.py --rdf water_oo_rdf.csv --measure-in cg_water_901.gro --out build

The coarse-grained water of the method's paper (Thaler and Zavadlav, Nature Communications 12, 6884 (2021)) with a pair
potential instead of a neural one: a cubic spline over fixed knots on the paper's repulsive prior. The spline starts
from the Boltzmann inversion of the target, which fits neither target at the density of a liquid. Boltzmann inversion
knows no pressure; here structure and pressure are fitted together.

Both state points are the same liquid at 300 K, started from the same positions with momenta and noise of their own:
two independent trajectories, so that two ranks have one each, and twice the samples in every gradient. Training uses a
small box, just wide enough for g(r) up to 0.9 nm; what was trained can be measured in a larger one besides.

Lengths in nm, energies in kJ/mol, masses in amu, times in ps.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_md import partition, simulate, space
from matplotlib.figure import Figure
from tqdm import tqdm

import chemtrain_mpi
import distmd_protocol
from chemtrain_mpi import DifftreParallel, plot, process_printouts
from chemtrain_mpi.observables import average, block_standard_error, reduced_pressure
from chemtrain_mpi.potentials import PairTerms, check_box, export_potential, pair_energy_template
from chemtrain_mpi.quantities import density, pair_pressure, radial_distribution
from distmd_protocol import Units, constants

KT = constants.BOLTZMANN_KJ_PER_MOL_K * 300.0
BAR = constants.AVOGADRO_PER_MOL * 1e-25
"""One bar in kJ/mol/nm³."""
MASS = 18.0154
NUMBER_DENSITY = 33.31
"""Molecules a nm³ at 300 K and 1 bar: 996.5 kg/m³ (IAPWS-95)."""
CUTOFF = 0.9
PRIOR_EPSILON, PRIOR_SIGMA = 1.0, 0.3165
"""Of the repulsive prior ε(σ/r)^12, as in the paper."""
KNOTS = np.concatenate([np.linspace(0.23, 0.33, 11), np.linspace(0.34, 0.48, 8), np.linspace(0.5, 0.9, 11)])
"""Dense where the first neighbours are. The last knot is the cutoff, where the energy is zero."""
SHELLS = np.linspace(0.22, 0.9, 69)
"""Edges of the shells in which g(r) is counted."""
CENTRES = (SHELLS[1:] + SHELLS[:-1]) / 2
UNITS = Units("nm", "kJ/mol", "amu", "ps")


@dataclass(frozen=True)
class Plan:
    """How much is computed: times of a trajectory (total, equilibration, between snapshots), updates, final runs."""

    times: tuple[float, float, float]
    epochs: int
    rate: float
    final_runs: int
    pressure_weight: float = 0.02
    beads: int = 216
    dt: float = 0.01


FULL = Plan(times=(12.0, 2.0, 0.2), epochs=32, rate=0.15, final_runs=3)
SMALL = Plan(times=(6.0, 1.0, 0.2), epochs=32, rate=0.15, final_runs=2)


def read_rdf(path: Path) -> np.ndarray:
    """Two columns, distance (nm) and g: the mean of g over each shell, ``(B,)``."""
    r, g = np.loadtxt(path, comments="#", delimiter="," if "," in path.read_text(encoding="utf-8") else None).T
    fine = np.linspace(SHELLS[:-1], SHELLS[1:], 21)
    return np.average(np.interp(fine, r, g), weights=fine**2, axis=0)


def read_gro(path: Path) -> tuple[np.ndarray, float]:
    """Positions ``(N, 3)`` in fractions of the edge, and the edge of the cubic box, from a GROMACS file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    count = int(lines[1])
    position = np.array([[float(line[at : at + 8]) for at in (20, 28, 36)] for line in lines[2 : 2 + count]])
    edges = [float(word) for word in lines[2 + count].split()]
    if len(edges) != 3 or len(set(edges)) != 1:
        raise ValueError(f"the box of {path} is {edges}; this example takes cubic ones")
    return position / edges[0] % 1.0, edges[0]


def lattice(beads: int) -> tuple[np.ndarray, float]:
    """A simple cubic crystal at the density of the liquid, in fractions of the edge, and the edge."""
    side = round(beads ** (1 / 3))
    grid = (np.arange(side) + 0.5) / side
    position = np.stack(np.meshgrid(grid, grid, grid, indexing="ij"), axis=-1).reshape(-1, 3)
    return position, float((len(position) / NUMBER_DENSITY) ** (1 / 3))


def prior(r: np.ndarray) -> np.ndarray:
    """The repulsion that keeps beads apart where no sample says anything."""
    return PRIOR_EPSILON * (PRIOR_SIGMA / r) ** 12


def boltzmann_inversion(g: np.ndarray) -> dict[str, jax.Array]:
    """Spline of −kT ln g less the prior, at all knots but the last; its first value goes on where g is near zero."""
    potential = -KT * np.log(np.maximum(g, 1e-3)) - prior(CENTRES)
    first = np.argmax(g > 0.1)
    return {"spline": jnp.asarray(np.interp(KNOTS[:-1], CENTRES[first:], potential[first:]), jnp.float32)}


def to_parameters(theta: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The tabulated potential: prior and trained spline, zero at the cutoff."""
    energy = jnp.asarray(prior(KNOTS), jnp.float32).at[-1].set(0.0)
    return {"r": KNOTS.astype(np.float32), "energy": energy.at[:-1].add(theta["spline"])}


TERMS = PairTerms("tabulated_pair", CUTOFF)
_tabulated = pair_energy_template(TERMS)


def energy_fn_template(theta: Mapping[str, jax.Array]) -> Callable[..., jax.Array]:
    """Energy function of the trained spline."""
    return _tabulated(to_parameters(theta))


def make_trainer(
    target: np.ndarray,
    box: tuple[np.ndarray, float],
    plan: Plan,
    seed: int,
    start: Mapping[str, jax.Array],
    **keywords: Any,
) -> DifftreParallel:
    """The trainer: two state points that differ in their keys alone."""
    position, edge = box
    check_box(edge, CUTOFF)
    displacement, shift = space.periodic_general(edge, fractional_coordinates=True)
    neighbor_fn = partition.neighbor_list(
        displacement,
        jnp.float32(edge),
        CUTOFF,
        dr_threshold=0.05,
        fractional_coordinates=True,
        # Three cells of cutoff and skin do not fit into the box.
        disable_cell_list=True,
    )
    both = np.ones(2, np.float32)
    targets = {
        "g": {"target": np.stack([target, target]).astype(np.float32), "gamma": both},
        "Z": {"target": both * BAR / (NUMBER_DENSITY * KT), "gamma": both * plan.pressure_weight},
    }
    quantities = {
        "g": radial_distribution(SHELLS),
        "pressure": pair_pressure(TERMS, to_parameters, tail=False),
        "density": density(),
    }
    observables = {
        "g": average("g"),
        "Z": reduced_pressure("pressure", "density"),
        "pressure": average("pressure"),
        "pressure error": block_standard_error("pressure", blocks=5),
    }
    states = {
        "position": jnp.asarray(np.stack([position, position]), jnp.float32),
        "mass": jnp.full(2, MASS, jnp.float32),
    }
    return DifftreParallel(
        jax.random.PRNGKey(seed),
        start,
        optax.adam(optax.cosine_decay_schedule(plan.rate, plan.epochs, alpha=0.05), b1=0.7, b2=0.95),
        energy_fn_template,
        partial(simulate.nvt_langevin, shift_fn=shift, dt=plan.dt, kT=1.0, gamma=2.0),
        neighbor_fn,
        process_printouts(plan.dt, *plan.times),
        {"kT": both * np.float32(KT), "box": both * np.float32(edge)},
        quantities,
        targets,
        observables,
        reference_states=states,
        reweight_ratio=0.8,
        overflow_capacity_multiplier=1.1,
        sim_batch_size=-1,
        # Far from the target the pressure is off by thousands of bar: its pull must not drown that of the structure.
        target_loss_fns={"Z": lambda prediction, wanted: optax.huber_loss(prediction, wanted, delta=1.0)},
        **keywords,
    )


@dataclass(frozen=True)
class Measured:
    """Means over all runs and both state points: ``g`` ``(B,)``, pressure and its standard error in bar."""

    g: np.ndarray
    pressure: float
    pressure_error: float

    def row(self, target: np.ndarray) -> dict[str, float]:
        """The figures that are quoted. The error of g is the mean absolute one over [0.25, 0.9] nm."""
        inner = SHELLS[:-1] > 0.2499
        return {
            "rdf_error": float(np.mean(np.abs(self.g - target)[inner])),
            "pressure_bar": self.pressure,
            "pressure_error_bar": self.pressure_error,
        }


def measure(trainer: DifftreParallel, runs: int) -> Measured:
    """Observables of the stored trajectories and of ``runs − 1`` more under the current parameters."""
    values = []
    for run in tqdm(range(runs), desc="measuring", disable=trainer.rank > 0):
        if run:
            trainer.refresh_trajstates()
        values.append(trainer.predict())
    errors = np.array([value["pressure error"] for value in values])
    return Measured(
        np.mean([value["g"] for value in values], axis=(0, 1)),
        float(np.mean([value["pressure"] for value in values]) / BAR),
        float(np.sqrt(np.sum(errors**2)) / errors.size / BAR),
    )


def train(trainer: DifftreParallel, plan: Plan) -> None:
    """Train epoch by epoch, showing what is left of the loss."""
    bar = tqdm(total=plan.epochs, desc="training", disable=trainer.rank > 0)
    for epoch in range(1, plan.epochs + 1):
        due = epoch % 10 == 0 or epoch == plan.epochs
        trainer.train(1, checkpoint_freq=1 if due else None)
        last = trainer.history[-1]
        bar.set_postfix_str(f"loss {last['loss']:.5f}, {len(last['recomputed'])} new")
        bar.update()
    bar.close()


def draw(path: Path, target: np.ndarray, curves: Mapping[str, Measured], theta: Mapping[str, jax.Array]) -> None:
    """Radial distributions on the left, potentials on the right."""
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, measured), color in zip(curves.items(), ("tab:orange", "tab:blue", "tab:green"), strict=False):
        label = f"{name}: {measured.pressure:.0f} ± {measured.pressure_error:.0f} bar"
        left.plot(CENTRES, measured.g, color=color, label=label)
    left.plot(CENTRES, target, "k.", markersize=4, label="experiment: 1 bar")
    left.set_xlabel("r (nm)")
    left.set_ylabel("g(r)")
    left.legend(frameon=False)
    r = np.linspace(KNOTS[0], CUTOFF, 400)
    for values, name, color in ((boltzmann_inversion(target), "initial", "tab:orange"), (theta, "trained", "tab:blue")):
        energy = TERMS.energy(jnp.asarray(r**2, jnp.float32), TERMS.prepare(to_parameters(values)), 0)
        right.plot(r, energy, color=color, label=name)
    right.plot(r, prior(r), color="0.6", label="prior")
    right.set_ylim(-4.0, 4.0)
    right.set_xlabel("r (nm)")
    right.set_ylabel("pair energy (kJ/mol)")
    right.legend(frameon=False)
    figure.savefig(path, dpi=130)


def versions() -> dict[str, str]:
    """What computed this."""
    ours = {"chemtrain-mpi": chemtrain_mpi.__version__, "distmd-protocol": distmd_protocol.__version__}
    # On one process the extra that brings mpi4py is not needed.
    used = [name for name in ("jax", "jax-md", "numpy", "mpi4py") if find_spec(name.replace("-", "_"))]
    return ours | {name: version(name) for name in used}


def write(
    folder: Path, trainer: DifftreParallel, target: np.ndarray, curves: Mapping[str, Measured], facts: dict[str, Any]
) -> None:
    """Write ``result.json``, ``rdf.csv`` and the pictures."""
    report = facts | {name: measured.row(target) for name, measured in curves.items()}
    report |= {
        "ranks": trainer.size,
        "updates": len(trainer.history),
        "recomputed_trajectories": sum(len(entry["recomputed"]) for entry in trainer.history),
        "losses": [entry["loss"] for entry in trainer.history],
        "versions": versions(),
    }
    (folder / "result.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    columns = np.stack([CENTRES, target, *(measured.g for measured in curves.values())], axis=1)
    header = ",".join(["r_nm", "experiment", *curves])
    np.savetxt(folder / "rdf.csv", columns, fmt="%.5f", delimiter=",", header=header)
    draw(folder / "water_rdf.png", target, curves, trainer.params)
    plot.loss_curve(trainer.history).savefig(folder / "training_loss.png", dpi=130)
    for name, measured in curves.items():
        row = measured.row(target)
        logging.info(
            "%s: RDF error %.4f, pressure %.0f ± %.0f bar",
            name,
            row["rdf_error"],
            row["pressure_bar"],
            row["pressure_error_bar"],
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the training and write everything into one folder. Collective."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rdf", type=Path, required=True, help="table of r (nm) and g(r)")
    arguments.add_argument("--out", type=Path, required=True, help="folder for results")
    arguments.add_argument("--start", type=Path, help="GROMACS file of the box to train in; default: a small crystal")
    arguments.add_argument("--measure-in", type=Path, help="GROMACS file of another box to measure the result in")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--small", action="store_true", help="a shortened run with a looser result")
    arguments.add_argument("--parallelism", choices=("mpi", "single", "auto"), default="mpi")
    options = arguments.parse_args(argv)
    plan = SMALL if options.small else FULL
    target = read_rdf(options.rdf)
    box = read_gro(options.start) if options.start else lattice(plan.beads)
    clock = [time.perf_counter()]
    trainer = make_trainer(
        target,
        box,
        plan,
        options.seed,
        boltzmann_inversion(target),
        parallelism=options.parallelism,
        checkpoint_path=options.out / "checkpoints",
        history_path=options.out / "history.jsonl",
        progress=False,
    )
    rank_zero = trainer.rank == 0
    if rank_zero:
        # The history is appended to; an earlier run's in the same folder is not this one's.
        (options.out / "history.jsonl").unlink(missing_ok=True)
    trainer.initialize_trajstates(num_runs=2)
    curves = {"initial": measure(trainer, 1)}
    clock.append(time.perf_counter())
    train(trainer, plan)
    clock.append(time.perf_counter())
    trainer.refresh_trajstates()
    curves["trained"] = measure(trainer, plan.final_runs)
    clock.append(time.perf_counter())
    export_potential(
        options.out / "potential",
        TERMS,
        # In float32 the last knot would fall short of the cutoff.
        {**to_parameters(trainer.params), "r": KNOTS},
        species=("W",),
        masses=(MASS,),
        units=UNITS,
        tail_correction=False,
        meta={"fitted_to": options.rdf.name, "temperature_K": 300.0, "pressure_bar": 1.0, "seed": options.seed},
        comm=trainer.comm,
    )
    facts = {"small": options.small, "beads": len(box[0]), "edge_nm": box[1]}
    facts["seconds"] = dict(zip(("start", "training", "measuring"), np.diff(clock).tolist(), strict=True))
    if rank_zero:
        write(options.out, trainer, target, curves, facts)
    if options.measure_in:
        box = read_gro(options.measure_in)
        other = make_trainer(
            target, box, plan, options.seed + 1, trainer.params, parallelism=options.parallelism, progress=False
        )
        other.initialize_trajstates(num_runs=2)
        curves[f"trained, {len(box[0])} beads"] = measure(other, 2)
        if rank_zero:
            write(options.out, trainer, target, curves, facts)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # Its line an update would break the progress bar.
    logging.getLogger("chemtrain_mpi").setLevel(logging.WARNING)
    main()
