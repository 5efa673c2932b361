"""Fit diamond at 298 K to its elastic constants and to zero stress: first Stillinger–Weber, then with a learned part.

    NPROC=1 mpirun -np 2 -x NPROC python diamond_elastic.py --out build

Targets C11 = 1079, C12 = 124, C44 = 578 GPa (McSkimin and Andreatch, J. Appl. Phys. 43, 2944 (1972)) at the lattice
constant 3.567 Å, as Thaler and Zavadlav fitted them, Nature Communications 12, 6884 (2021). The state points are chains
of the same state; constants come from stress fluctuations at constant volume. At fixed lattice constant and zero stress
Stillinger–Weber has two numbers for three constants, its bond stiffness and its angle stiffness: what that limits is
worked out at zero temperature. A Behler–Parrinello network on top then removes the limit.

Lengths in Å, energies in eV, masses in amu; the time unit that follows is 10.18 fs.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_md import partition, simulate, space
from tqdm import tqdm

from chemtrain_mpi import DifftreParallel, plot, process_printouts
from chemtrain_mpi.observables import block_jackknife_error, cubic, cubic_means, elastic_constants, mean_stress
from chemtrain_mpi.observables import stress_fluctuation as fluctuation_term
from chemtrain_mpi.potentials import (
    SILICON,
    NeuralCorrection,
    check_box,
    stillinger_weber_template,
    sum_template,
    symmetry_functions,
)
from chemtrain_mpi.quantities import born_stiffness, born_stress
from chemtrain_mpi.quantities.strain import deformation

GPA = 1.0 / 160.2176634
"""One GPa in eV/Å³."""
PS = 1.0 / 0.010180506
"""One ps in the time unit √(amu Å²/eV)."""
KT = 8.617333262e-5 * 298.0
MASS = 12.011
LATTICE = 3.567
FIRST, SECOND = "Stillinger–Weber", "with a learned part"
NAMES = ("C11", "C12", "C44")
TARGET = np.array([1079.0, 124.0, 578.0])
SIGMA = LATTICE * np.sqrt(3.0) / 4.0 / 2.0 ** (1 / 6)
"""Puts the minimum of the pair term at the bond length."""
CUTOFF = 1.8 * SIGMA
SKIN = 0.3
DT = 0.1
FRICTION = 50.0 / PS
"""Strong: averages do not depend on it, and the optical modes forget their amplitude within some 20 fs."""


@dataclass(frozen=True)
class Plan:
    """How much is computed. Times in units of 20 steps, the distance of two snapshots."""

    equilibration: int
    snapshots: int
    updates: tuple[int, int]
    final_runs: int


FULL = Plan(equilibration=20, snapshots=300, updates=(28, 80), final_runs=4)
SMALL = Plan(equilibration=10, snapshots=40, updates=(3, 2), final_runs=1)
EVERY = 20 * DT


def lattice(cells: int) -> np.ndarray:
    """Diamond in fractional coordinates ``(8 cells³, 3)``; the second half of each eight is the other sublattice."""
    face_centred = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    basis = np.concatenate([face_centred, face_centred + 0.25]) + 0.1
    corners = np.stack(np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"), axis=-1).reshape(-1, 1, 3)
    return (corners + basis).reshape(-1, 3) / cells


def stillinger_weber(theta: Mapping[str, jax.Array]) -> Callable[..., jax.Array]:
    """Trained are the logarithms of ``ε``, ``σ`` and ``λ``; the shape parameters are those of silicon."""
    trained = {name: jnp.exp(value) for name, value in theta.items()}
    return stillinger_weber_template(CUTOFF)({**SILICON, **trained})


class Crystal:
    """The periodic crystal, and everything that is asked of a potential on it."""

    def __init__(self, cells: int) -> None:
        self.edge = cells * LATTICE
        self.position = jnp.asarray(lattice(cells), jnp.float32)
        self.particles = len(self.position)
        check_box(self.edge, CUTOFF + SKIN)
        displacement, self.shift_fn = space.periodic_general(self.edge, fractional_coordinates=True)
        self.neighbor_fn = partition.neighbor_list(
            displacement,
            jnp.float32(self.edge),
            CUTOFF,
            dr_threshold=SKIN,
            fractional_coordinates=True,
            disable_cell_list=True,
        )
        self.neighbor = self.neighbor_fn.allocate(self.position, box=jnp.float32(self.edge))

    def athermal(self, template: Callable[[Any], Callable[..., jax.Array]], params: Any) -> jax.Array:
        """C11, C12, C44 in GPa at zero temperature ``(3,)``: second derivatives, the sublattices relaxed."""
        other = jnp.asarray((np.arange(self.particles) % 8 >= 4)[:, None], jnp.float32)
        box = jnp.eye(3) * self.edge

        def energy(x: jax.Array) -> jax.Array:
            # jax-md takes the tangent of a fractional position for a Cartesian one: the shift is in Å.
            moved = self.position + other * x[6:]
            return template(params)(moved, neighbor=self.neighbor, box=deformation(x[:6]) @ box)

        hessian = jax.hessian(energy)(jnp.zeros(9))
        relaxed = hessian[:6, :6] - hessian[:6, 6:] @ jnp.linalg.solve(hessian[6:, 6:], hessian[6:, :6])
        return cubic_means(relaxed) / (self.edge**3 * GPA)

    def limit(self) -> dict[str, Any]:
        """What Stillinger–Weber can do at zero temperature and stress: its best fit, and C44 at C11 and C12 exact.

        Constants are proportional to ε, so that one scan over λ sees all there is.
        """
        ratios = jnp.linspace(np.log(30.0), np.log(90.0), 181)

        def at(log_lam: jax.Array) -> jax.Array:
            theta = {"epsilon": jnp.float32(0.0), "sigma": jnp.log(jnp.float32(SIGMA)), "lam": log_lam}
            return self.athermal(stillinger_weber, theta)

        unit = np.asarray(jax.jit(lambda r: jax.lax.map(at, r))(ratios), np.float64)
        relative = unit / TARGET
        scale = 2.0 / (relative.max(axis=1) + relative.min(axis=1))
        worst = np.abs(relative * scale[:, None] - 1.0).max(axis=1)
        best = int(worst.argmin())
        # C12/C11 falls with λ, through zero.
        falling = unit[::-1, 1] / unit[::-1, 0]
        c11, c44 = (np.interp(TARGET[1] / TARGET[0], falling, unit[::-1, i]) for i in (0, 2))
        return {
            "best_worst_error": float(worst[best]),
            "best_constants_GPa": dict(zip(NAMES, (unit[best] * scale[best]).tolist(), strict=True)),
            "best": {"epsilon": float(scale[best]), "lam": float(np.exp(ratios[best])), "sigma": float(SIGMA)},
            "C44_with_C11_and_C12_exact_GPa": float(c44 * TARGET[0] / c11),
        }

    def typical(self, key: jax.Array, count: int = 40) -> jax.Array:
        """Configurations with displacements of the size of thermal ones, fractional ``(count, N, 3)``."""
        return self.position + 0.05 / self.edge * jax.random.normal(key, (count, *self.position.shape))


def make_trainer(
    crystal: Crystal,
    template: Callable[[Any], Callable[..., jax.Array]],
    params: Any,
    optimizer: optax.GradientTransformation,
    power: int,
    tolerance: float,
    key: jax.Array,
    plan: Plan,
    chains: int,
    **keywords: Any,
) -> DifftreParallel:
    """A trainer whose state points are ``chains`` runs of the same state.

    The loss of the constants is the mean of (relative error / ``tolerance``) to a ``power``: 2 fits on average, a
    higher one the worst.
    """
    n = crystal.particles
    constants = cubic(elastic_constants("stress", "stiffness", n))
    fluctuation = cubic(fluctuation_term("stress"))

    def scaled(observable: Callable[..., jax.Array], unit: Any) -> Callable[..., jax.Array]:
        return lambda *args, **kwargs: observable(*args, **kwargs) / unit

    def tension(*args: Any, **kwargs: Any) -> jax.Array:
        return jnp.mean(mean_stress("stress", n)(*args, **kwargs)[:3]) / GPA

    relative = scaled(constants, jnp.asarray(TARGET * GPA, jnp.float32))
    observables = {
        "constants": relative,
        "stress": tension,
        "constants error": block_jackknife_error(relative, 10),
        "fluctuation": scaled(fluctuation, GPA),
    }
    targets = {
        "constants": {"target": np.ones((chains, 3), np.float32), "gamma": np.float32(1.0)},
        "stress": {"target": np.zeros(chains, np.float32), "gamma": np.float32(0.5)},
    }
    every = np.ones(chains, np.float32)
    return DifftreParallel(
        key,
        jax.tree.map(jnp.float32, params),
        optimizer,
        template,
        partial(simulate.nvt_langevin, shift_fn=crystal.shift_fn, dt=DT, kT=KT, gamma=FRICTION),
        crystal.neighbor_fn,
        process_printouts(DT, (plan.equilibration + plan.snapshots) * EVERY, plan.equilibration * EVERY, EVERY),
        {"kT": KT * every, "box": np.float32(crystal.edge) * every},
        {"stress": born_stress(template), "stiffness": born_stiffness(template)},
        targets,
        observables,
        reference_states={"position": jnp.stack([crystal.position] * chains), "mass": MASS * every},
        reweight_ratio=0.8,
        sim_batch_size=-1,
        vmap_batch=10,
        target_loss_fns={"constants": lambda found, target: jnp.mean(((found - target) / tolerance) ** power)},
        progress=False,
        **keywords,
    )


def fit(trainer: DifftreParallel, updates: int, label: str) -> None:
    """Train, with a bar on rank zero."""
    trainer.initialize_trajstates()
    bar = tqdm(total=updates, desc=label, disable=trainer.rank > 0)
    for _ in range(updates):
        trainer.train(1)
        bar.set_postfix_str(f"loss {trainer.history[-1]['loss']:.3g}")
        bar.update()
    bar.close()


def measure(trainer: DifftreParallel, plan: Plan) -> dict[str, Any]:
    """Constants and stress on fresh trajectories, with standard errors from the scatter over chains and runs."""
    found: list[dict[str, np.ndarray]] = []
    for _ in tqdm(range(plan.final_runs), desc="prediction", disable=trainer.rank > 0):
        trainer.refresh_trajstates()
        found.append(trainer.predict())
    values = {name: np.concatenate([run[name] for run in found]).astype(float) for name in found[0]}
    count = len(values["stress"])
    constants = values["constants"] * TARGET
    fluctuation = values["fluctuation"]
    length = plan.snapshots * EVERY / PS
    # One chain's relative error falls with the root of its length.
    spread = fluctuation.std(axis=0, ddof=1) / np.abs(fluctuation.mean(axis=0))
    mean = constants.mean(axis=0)

    def by_name(row: np.ndarray) -> dict[str, float]:
        return dict(zip(NAMES, row.tolist(), strict=True))

    return {
        "constants_GPa": by_name(mean),
        "standard_error_GPa": by_name(constants.std(axis=0, ddof=1) / np.sqrt(count)),
        "block_error_of_one_chain_GPa": by_name(np.sqrt(np.mean(values["constants error"] ** 2, axis=0)) * TARGET),
        "relative_error": by_name(mean / TARGET - 1.0),
        "worst_relative_error": float(np.abs(mean / TARGET - 1.0).max()),
        "stress_GPa": float(values["stress"].mean()),
        "stress_standard_error_GPa": float(values["stress"].std(ddof=1) / np.sqrt(count)),
        "fluctuation_term_GPa": by_name(fluctuation.mean(axis=0)),
        "sampled_ps": count * length,
        "ps_for_2_percent_of_fluctuation_term": by_name(length * (spread / 0.02) ** 2),
    }


def rates(updates: int, scales: Mapping[str, float]) -> optax.GradientTransformation:
    """Adam with a rate that falls to a tenth, and a factor for every leaf named in ``scales``."""
    schedule = optax.cosine_decay_schedule(1.0, updates, alpha=0.1)

    def scale(tree: Any) -> Any:
        def leaf(path: Any, value: jax.Array) -> jax.Array:
            keys = [key.key for key in path]
            return value * next(factor for name, factor in scales.items() if name in keys)

        return jax.tree_util.tree_map_with_path(leaf, tree)

    return optax.chain(optax.adam(schedule, b1=0.7, b2=0.95), optax.stateless(lambda updates, _: scale(updates)))


def show(title: str, entry: Mapping[str, Any]) -> str:
    """One line of results."""
    parts = [f"{name} {entry['constants_GPa'][name]:.0f} ± {entry['standard_error_GPa'][name]:.0f}" for name in NAMES]
    stress = f"stress {entry['stress_GPa']:.2f} ± {entry['stress_standard_error_GPa']:.2f} GPa"
    return f"{title}: {', '.join(parts)} GPa (worst {entry['worst_relative_error']:.1%}), {stress}"


def save(folder: Path, report: Mapping[str, Any], histories: Mapping[str, list]) -> None:
    """Write the figures, the constants by stage as a picture, and the loss of each stage."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2, ensure_ascii=False)
    (folder / "diamond.json").write_text(text + "\n", encoding="utf-8")
    panels = {
        f"{title} / GPa": (
            TARGET.tolist(),
            [entry["constants_GPa"][name] for name in NAMES],
            [entry["standard_error_GPa"][name] for name in NAMES],
        )
        for title, entry in report["stages"].items()
    }
    plot.targets_against_predictions(NAMES, panels).savefig(folder / "diamond_constants.png", dpi=130)
    for title, history in histories.items():
        plot.loss_curve(history).savefig(folder / f"diamond_loss_{title.replace(' ', '_')}.png", dpi=130)


def learned_potential(crystal: Crystal, seed: int) -> tuple[Callable[..., Any], dict[str, jax.Array]]:
    """Stillinger–Weber plus a network that starts at zero: the template, and the network's first weights."""
    features = symmetry_functions(CUTOFF, (0.2, 1.0))
    evaluate = jax.jit(partial(features, neighbor=crystal.neighbor, box=jnp.float32(crystal.edge)))
    samples = jnp.concatenate([evaluate(r) for r in crystal.typical(jax.random.PRNGKey(1))])
    correction = NeuralCorrection.create(features, samples, key=jax.random.key(seed), energy_scale=0.02)
    return sum_template(prior=stillinger_weber, correction=correction.template), correction.init_params


def command_line() -> argparse.Namespace:
    """Options."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, required=True, help="folder for results")
    arguments.add_argument("--cells", type=int, default=2, help="cubic cells along an edge; 2 and 3 are 64, 216 atoms")
    arguments.add_argument("--chains", type=int, default=4, help="state points: chains of the same state")
    arguments.add_argument("--updates", type=int, nargs=2, help="updates of the two stages, instead of the plan's")
    arguments.add_argument("--runs", type=int, help="trajectories of every chain for the result, instead of the plan's")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--small", action="store_true", help="a few short updates, to see that all works")
    arguments.add_argument("--parallelism", choices=("mpi", "single", "auto"), default="mpi")
    arguments.add_argument(
        "--stages", choices=("first", "both"), default="both", help="without or with the learned part"
    )
    arguments.add_argument("--fitted", type=Path, help="diamond.json of an earlier run: take its first stage")
    return arguments.parse_args()


def main() -> None:
    """Run the stages and write everything into one folder."""
    options = command_line()
    plan = SMALL if options.small else FULL
    plan = replace(plan, updates=options.updates or plan.updates, final_runs=options.runs or plan.final_runs)
    crystal = Crystal(options.cells)
    common = {"plan": plan, "chains": options.chains, "parallelism": options.parallelism}
    report: dict[str, Any] = {"atoms": crystal.particles, "chains": options.chains, "small": options.small}
    report |= {"target_GPa": dict(zip(NAMES, TARGET.tolist(), strict=True)), "stages": {}, "seconds": {}}
    if options.fitted is not None:
        report |= json.loads(options.fitted.read_text(encoding="utf-8"))
    histories = {}

    def stage(title: str, updates: int, begin: float, *arguments: Any) -> DifftreParallel:
        trainer = make_trainer(crystal, *arguments, **common)
        rank_zero = trainer.rank == 0
        logging.basicConfig(level=logging.INFO if rank_zero else logging.WARNING, format="%(message)s")
        logging.getLogger("chemtrain_mpi").setLevel(logging.WARNING)
        fit(trainer, updates, title)
        report["stages"][title] = measure(trainer, plan)
        report["stages"][title]["loss"] = [entry["loss"] for entry in trainer.history]
        report["seconds"][title] = time.perf_counter() - begin
        report["ranks"] = trainer.size
        histories[title] = trainer.history
        if rank_zero:
            logging.info(show(title, report["stages"][title]))
            save(options.out, report, histories)
        return trainer

    if options.fitted is None:
        begin = time.perf_counter()
        report["limit_at_zero_temperature"] = crystal.limit()
        best = report["limit_at_zero_temperature"]["best"]
        # Off the best fit at zero temperature: softer by a tenth, angles by another tenth, bonds 0.2 % too long.
        report["start"] = {name: best[name] * by for name, by in {"epsilon": 0.9, "lam": 0.9, "sigma": 1.002}.items()}
        theta = {name: np.log(value) for name, value in report["start"].items()}
        optimizer = rates(plan.updates[0], {"epsilon": 0.03, "lam": 0.03, "sigma": 0.0006})
        # A fourth power: what the form leaves is to be spread evenly.
        seed = jax.random.PRNGKey(options.seed)
        trainer = stage(FIRST, plan.updates[0], begin, stillinger_weber, theta, optimizer, 4, 0.1, seed)
        report["fitted"] = {name: float(jnp.exp(value)) for name, value in trainer.params.items()}
        if trainer.rank == 0:
            save(options.out, report, histories)
    if options.stages == "both":
        begin = time.perf_counter()
        template, weights = learned_potential(crystal, options.seed)
        prior = {name: np.log(value) for name, value in report["fitted"].items()}
        optimizer = rates(plan.updates[1], {"epsilon": 0.01, "lam": 0.01, "sigma": 0.0003, "correction": 0.01})
        theta = {"prior": prior, "correction": weights}
        seed = jax.random.PRNGKey(options.seed + 1)
        stage(SECOND, plan.updates[1], begin, template, theta, optimizer, 2, 0.05, seed)


if __name__ == "__main__":
    main()
