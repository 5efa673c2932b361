"""Fit a pair potential of liquid argon to its pressure and energy at eight state points.

    NPROC=1 mpirun -np 2 -x NPROC python argon_training.py --reference argon_reference.csv --out build

Lennard-Jones (ε, σ) or Mie (ε, σ and the repulsive exponent n) are fitted to the reference equation of state by
reweighted trajectories: 256 atoms a state, truncated at 8.5 Å with long-range corrections. Residuals are the pressure
over ρ k_B T and the residual energy over k_B T: near saturation 1 % in density moves the pressure by more than its
value, so relative pressure errors mean nothing.

Lengths in nm, energies in kJ/mol, masses in amu, times in ps.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import time
from collections.abc import Callable, Mapping
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
from tqdm import tqdm

import chemtrain_mpi
import distmd_protocol
from chemtrain_mpi import DifftreParallel, plot, process_printouts
from chemtrain_mpi.observables import average, block_standard_error, reduced_energy, reduced_pressure
from chemtrain_mpi.potentials import PairTerms, check_box, export_potential, pair_energy_template
from chemtrain_mpi.quantities import density, pair_energy_per_particle, pair_pressure
from distmd_protocol import Units, constants

KB = constants.BOLTZMANN_KJ_PER_MOL_K
MPA = constants.AVOGADRO_PER_MOL * 1e-24
"""One MPa in kJ/mol/nm³."""
PER_NM3 = constants.AVOGADRO_PER_MOL * 1e-24
"""One mol/L in particles a nm³."""
MASS = 39.948
CUTOFF = 0.85
UNITS = Units("nm", "kJ/mol", "amu", "ps")
START_EPSILON_K, START_SIGMA = 117.3 * 0.85, 0.3396 * 0.92
"""ε 15 % and σ 8 % too small. A σ too large would freeze the box."""


@dataclass(frozen=True)
class Plan:
    """How much is computed."""

    cells: int
    steps: tuple[float, float, float]
    final_runs: int
    epochs: int
    states: tuple[int, ...] | None
    dt: float = 0.008


FULL = Plan(cells=4, steps=(32.0, 3.2, 0.4), final_runs=3, epochs=30, states=None)
SMALL = Plan(cells=3, steps=(24.0, 1.6, 0.4), final_runs=2, epochs=16, states=(1, 4, 6, 7))


@dataclass(frozen=True)
class Reference:
    """State points of the reference table, ``K`` of them, in nm, kJ/mol and K."""

    names: tuple[str, ...]
    temperature: np.ndarray
    density: np.ndarray
    pressure: np.ndarray
    energy: np.ndarray

    @property
    def kT(self) -> np.ndarray:
        """Thermal energies."""
        return KB * self.temperature


def read_reference(path: Path, only: tuple[int, ...] | None) -> Reference:
    """Read the rows with the role ``fit``, or some of them."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = [row for row in csv.DictReader(lines) if row["role"] == "fit"]
    rows = rows if only is None else [rows[i] for i in only]
    column = {name: np.array([float(row[name]) for row in rows]) for name in rows[0] if name not in ("state", "role")}
    return Reference(
        tuple(row["state"] for row in rows),
        column["temperature_K"],
        column["density_mol_per_L"] * PER_NM3,
        column["pressure_MPa"] * MPA,
        column["residual_internal_energy_kJ_per_mol"],
    )


def lattice(cells: int) -> np.ndarray:
    """A face-centred cubic crystal in fractional coordinates, ``(4 cells³, 3)``."""
    basis = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    corners = np.stack(np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"), axis=-1).reshape(-1, 1, 3)
    return ((corners + basis + 0.25).reshape(-1, 3)) / cells


def to_parameters(theta: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Trained parameters are logarithms, so that one step is a relative change and none can turn negative."""
    params = {name: jnp.exp(value) for name, value in theta.items()}
    if "n" in params:
        params["m"] = jnp.full_like(params["n"], 6.0)
    return params


class Model:
    """The potential, and everything the trainer wants to know about it."""

    def __init__(self, family: str) -> None:
        # The truncated forces sample the shifted energy; the energy that is reported is the unshifted one and a tail.
        self.sampled = PairTerms(family, CUTOFF, "shift")
        self.reported = PairTerms(family, CUTOFF, "none")
        self._sampled = pair_energy_template(self.sampled)
        self.start = {"epsilon": np.log(KB * START_EPSILON_K), "sigma": np.log(START_SIGMA)}
        if family == "mie":
            self.start["n"] = np.log(12.0)
        self.quantities = {
            "pressure": pair_pressure(self.reported, to_parameters),
            "energy": pair_energy_per_particle(self.reported, pair_energy_template(self.reported), to_parameters),
            "density": density(),
        }

    def energy_fn_template(self, theta: Mapping[str, jax.Array]) -> Callable[..., jax.Array]:
        """Energy function of trained parameters."""
        return self._sampled(to_parameters(theta))


def make_optimizer(epochs: int) -> optax.GradientTransformation:
    """Adam with a short memory: few updates, and the narrow valley between ε and σ asks for quick turns."""
    rate = optax.cosine_decay_schedule(0.03, epochs, alpha=0.02)
    # The exponent and the depth make up for each other: at equal rates the noise of the gradients carries both away.
    relative = {"epsilon": 1.0, "sigma": 0.4, "n": 0.3}
    scale = optax.stateless(lambda updates, _: {name: relative[name] * value for name, value in updates.items()})
    return optax.chain(optax.adam(rate, b1=0.5, b2=0.9), scale)


def make_trainer(
    model: Model, reference: Reference, plan: Plan, seed: int, states: Any, **keywords: Any
) -> DifftreParallel:
    """The trainer."""
    particles = 4 * plan.cells**3
    edges = (particles / reference.density) ** (1 / 3)
    for edge in edges:
        check_box(edge, CUTOFF)
    displacement, shift = space.periodic_general(float(edges[0]), fractional_coordinates=True)
    neighbor_fn = partition.neighbor_list(
        displacement,
        jnp.float32(edges[0]),
        CUTOFF,
        dr_threshold=0.12,
        fractional_coordinates=True,
        # Boxes this small have no use for cells, and cell sizes of their own would be programs of their own.
        disable_cell_list=True,
    )
    ones = np.ones(len(reference.names))
    targets = {
        "Z": {"target": reference.pressure / (reference.density * reference.kT), "gamma": ones},
        "u/kT": {"target": reference.energy / reference.kT, "gamma": ones},
    }
    observables = {
        "Z": reduced_pressure("pressure", "density"),
        "u/kT": reduced_energy("energy"),
        "pressure": average("pressure"),
        "energy": average("energy"),
        "pressure error": block_standard_error("pressure"),
        "energy error": block_standard_error("energy"),
    }
    to_f32 = partial(jax.tree.map, jnp.float32)
    return DifftreParallel(
        jax.random.PRNGKey(seed),
        to_f32(model.start),
        make_optimizer(plan.epochs),
        model.energy_fn_template,
        partial(simulate.nvt_langevin, shift_fn=shift, dt=plan.dt, kT=1.0, gamma=1.0),
        neighbor_fn,
        process_printouts(plan.dt, *plan.steps),
        to_f32({"kT": reference.kT, "box": edges}),
        model.quantities,
        to_f32(targets),
        observables,
        reference_states=states,
        reweight_ratio=0.6,
        overflow_capacity_multiplier=1.5,
        sim_batch_size=-1,
        **keywords,
    )


def table(reference: Reference, values: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """One row a state point: references, predictions and their standard errors in MPa and kJ/mol."""
    rows = []
    for k, name in enumerate(reference.names):
        rows.append(
            {
                "state": name,
                "temperature_K": float(reference.temperature[k]),
                "density_mol_per_L": float(reference.density[k] / PER_NM3),
                "pressure_MPa": float(values["pressure"][k] / MPA),
                "pressure_error_MPa": float(values["pressure error"][k] / MPA),
                "pressure_reference_MPa": float(reference.pressure[k] / MPA),
                "energy_kJ_per_mol": float(values["energy"][k]),
                "energy_error_kJ_per_mol": float(values["energy error"][k]),
                "energy_reference_kJ_per_mol": float(reference.energy[k]),
                "n_eff": float(values["n_eff"][k]),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    """The table as text."""
    lines = [f"{'state':>12} {'P / MPa':>16} {'reference':>10} {'u / (kJ/mol)':>18} {'reference':>10}"]
    for row in rows:
        lines.append(
            f"{row['state']:>12} {row['pressure_MPa']:8.2f} ± {row['pressure_error_MPa']:5.2f} "
            f"{row['pressure_reference_MPa']:10.2f} {row['energy_kJ_per_mol']:9.4f} ± "
            f"{row['energy_error_kJ_per_mol']:6.4f} {row['energy_reference_kJ_per_mol']:10.4f}"
        )
    return "\n".join(lines)


def fitted(theta: Mapping[str, jax.Array]) -> dict[str, float]:
    """Parameters as people quote them: ε/k_B in K, σ in Å."""
    params = {name: float(value) for name, value in to_parameters(theta).items()}
    result = {"epsilon_over_kB": params["epsilon"] / KB, "sigma": params["sigma"] * 10.0}
    return result | {name: params[name] for name in ("n", "m") if name in params}


def versions() -> dict[str, str]:
    """What computed this."""
    ours = {"chemtrain-mpi": chemtrain_mpi.__version__, "distmd-protocol": distmd_protocol.__version__}
    # On one process the extra that brings mpi4py is not needed.
    used = [name for name in ("jax", "jax-md", "numpy", "mpi4py") if find_spec(name.replace("-", "_"))]
    return ours | {name: version(name) for name in used}


def draw(folder: Path, history: list, trace: list[dict[str, float]], rows: list[dict[str, Any]]) -> None:
    """Write the three pictures."""
    plot.loss_curve(history).savefig(folder / "training_loss.png", dpi=130)
    panels = {
        "pressure / MPa": tuple(
            [row[name] for row in rows] for name in ("pressure_reference_MPa", "pressure_MPa", "pressure_error_MPa")
        ),
        "residual energy / (kJ/mol)": tuple(
            [row[name] for row in rows]
            for name in ("energy_reference_kJ_per_mol", "energy_kJ_per_mol", "energy_error_kJ_per_mol")
        ),
    }
    figure = plot.targets_against_predictions([row["state"] for row in rows], panels)
    figure.savefig(folder / "training_predictions.png", dpi=130)
    labels = {"epsilon_over_kB": "ε/k_B (K)", "sigma": "σ (Å)", "n": "n"}
    columns = {labels[name]: [entry[name] for entry in trace] for name in labels if name in trace[0]}
    plot.traces(columns).savefig(folder / "training_parameters.png", dpi=130)


def train(trainer: DifftreParallel, plan: Plan) -> list[dict[str, float]]:
    """Train epoch by epoch and return the parameters after each."""
    trace = [fitted(trainer.params)]
    bar = tqdm(total=plan.epochs, desc="training", disable=trainer.rank > 0)
    for epoch in range(1, plan.epochs + 1):
        due = epoch % 5 == 0 or epoch == plan.epochs
        trainer.train(1, checkpoint_freq=1 if due else None)
        trace.append(fitted(trainer.params))
        last, now = trainer.history[-1], trace[-1]
        bar.set_postfix_str(
            f"loss {last['loss']:.3f}, ε/k_B {now['epsilon_over_kB']:.1f} K, σ {now['sigma']:.3f} Å, "
            f"{len(last['recomputed'])} new"
        )
        bar.update()
    bar.close()
    return trace


def final_values(trainer: DifftreParallel, plan: Plan) -> dict[str, np.ndarray]:
    """Predictions of fresh trajectories at the fitted parameters: the mean of several runs, with its error."""
    runs = []
    for _ in tqdm(range(plan.final_runs), desc="prediction", disable=trainer.rank > 0):
        trainer.refresh_trajstates()
        runs.append(trainer.predict())
    values = {name: np.mean([run[name] for run in runs], axis=0) for name in runs[0]}
    for name in ("pressure error", "energy error"):
        values[name] = np.sqrt(np.sum([run[name] ** 2 for run in runs], axis=0)) / len(runs)
    return values


def main() -> None:
    """Run the training and write everything into one folder."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--reference", type=Path, required=True, help="table of the reference equation of state")
    arguments.add_argument("--out", type=Path, required=True, help="folder for results")
    arguments.add_argument("--family", choices=("lennard_jones", "mie"), default="lennard_jones")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--small", action="store_true", help="a shortened run with a looser result")
    arguments.add_argument("--parallelism", choices=("mpi", "single", "auto"), default="mpi")
    options = arguments.parse_args()
    plan = SMALL if options.small else FULL
    clock = [time.perf_counter()]
    reference = read_reference(options.reference, plan.states)
    model = Model(options.family)
    count = len(reference.names)
    crystal = np.broadcast_to(lattice(plan.cells), (count, 4 * plan.cells**3, 3))
    states = {"position": jnp.asarray(crystal, jnp.float32), "mass": jnp.full(count, MASS, jnp.float32)}
    trainer = make_trainer(
        model,
        reference,
        plan,
        options.seed,
        states,
        parallelism=options.parallelism,
        checkpoint_path=options.out / "checkpoints",
        history_path=options.out / "history.jsonl",
        progress=False,
    )
    rank_zero = trainer.rank == 0
    if rank_zero:
        # The history is appended to; an earlier run's in the same folder is not this one's.
        (options.out / "history.jsonl").unlink(missing_ok=True)
    logging.basicConfig(level=logging.INFO if rank_zero else logging.WARNING, format="%(message)s")
    logging.getLogger("chemtrain_mpi").setLevel(logging.WARNING)
    trainer.initialize_trajstates(num_runs=2)
    clock.append(time.perf_counter())
    trace = train(trainer, plan)
    clock.append(time.perf_counter())
    rows = table(reference, final_values(trainer, plan))
    clock.append(time.perf_counter())
    result = fitted(trainer.params)
    export_potential(
        options.out / "potential",
        model.reported,
        to_parameters(trainer.params),
        species=("Ar",),
        masses=(MASS,),
        units=UNITS,
        tail_correction=True,
        meta={"fitted_to": options.reference.name, "state_points": list(reference.names), "seed": options.seed},
        comm=trainer.comm,
    )
    if not rank_zero:
        return
    seconds = {name: clock[i + 1] - clock[i] for i, name in enumerate(("equilibration", "training", "prediction"))}
    phases = [entry["seconds"] for entry in trainer.history]
    seconds["by_phase"] = {name: sum(entry[name] for entry in phases) for name in phases[0]}
    report = {
        "family": options.family,
        "small": options.small,
        "ranks": trainer.size,
        "fit": result,
        "start": trace[0],
        "states": rows,
        "updates": len(trainer.history),
        "recomputed_trajectories": sum(len(entry["recomputed"]) for entry in trainer.history),
        "final_loss": trainer.history[-1]["loss"],
        "seconds": seconds,
        "versions": versions(),
    }
    (options.out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    draw(options.out, trainer.history, trace, rows)
    logging.info("%s\nfitted: %s", show(rows), ", ".join(f"{name} {value:.4f}" for name, value in result.items()))


if __name__ == "__main__":
    main()
