"""The main job: train argon over MPI, hand the potential over, simulate it decomposed, write one result.

Called by ``tools/dev.py demo`` (``hatch run cross:demo``) in an environment that holds both packages. The work is done
by the packages' own examples, each in processes of its own: only the artefact on disk passes from one to the other.

    build/demo/
      training/     artefact, checkpoints, history, training.json, plots
      simulation/   trajectory.extxyz, simulation.json, plots
      handover/     the same configurations evaluated by either package
      result.json   everything that the README quotes
      demo.png      predictions against references
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import demo_figure

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "tools" / "data" / "argon_reference.csv"
TRAINING = ROOT / "packages" / "chemtrain-mpi" / "examples" / "argon_training.py"
SIMULATION = ROOT / "packages" / "nvalchemi-distributed" / "examples" / "distributed" / "argon_heldout.py"
EVALUATE = {
    "chemtrain_mpi": ROOT / "packages" / "chemtrain-mpi" / "examples" / "evaluate_artefact.py",
    "nvalchemi_distributed": ROOT / "packages" / "nvalchemi-distributed" / "examples" / "evaluate_artefact.py",
}
PHASE_LIMIT = 1800  # seconds; a phase takes minutes, so this only ends a run that hangs
MARK = ".distmd-demo"
HANDOVER_TOLERANCE = 1e-10  # relative, float64
STEP_0_TOLERANCE = 1e-12  # relative to the sum of absolute pair terms, float64


class DemoError(RuntimeError):
    """A phase failed; the message names the phase, its command and the remedy."""


def rank_environment() -> dict[str, str]:
    """One core a rank, and this environment's own mpirun and torchrun first on the PATH."""
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    # Ranks share this machine's cores: more threads than one a rank only make them wait for each other, and the
    # trainer's bitwise mode needs a fixed thread count.
    environment.update(OMP_NUM_THREADS="1", NPROC="1")
    environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    return environment


def run_phase(name: str, command: list[str]) -> float:
    """Run one phase with its output passed through; return its seconds."""
    print(f"\n== {name}\n   {' '.join(command)}", flush=True)
    start = time.perf_counter()
    try:
        code = subprocess.run(command, cwd=ROOT, env=rank_environment(), timeout=PHASE_LIMIT).returncode
    except subprocess.TimeoutExpired:
        raise DemoError(f"{name} did not end within {PHASE_LIMIT} s; its command was: {' '.join(command)}") from None
    except OSError as error:
        raise DemoError(f"{name} could not be started ({error}); run `python3 tools/dev.py test` to see why") from None
    if code != 0:
        raise DemoError(f"{name} ended with status {code}; its own message stands above. Command: {' '.join(command)}")
    return time.perf_counter() - start


def launcher(program: str, *flags: str) -> list[str]:
    """The environment's own launcher, or the system's when the environment was built against a system MPI."""
    found = shutil.which(program, path=rank_environment()["PATH"])
    if found is None:
        raise DemoError(f"{program} is neither beside {sys.executable} nor on the PATH; remove .envs and start again")
    return [found, *flags]


def configurations(seed: int = 0) -> list[dict[str, Any]]:
    """Five disordered argon configurations in Å: cubic, flat, tilted, tilted and smaller than the cutoff, dilute."""
    random = Random(seed)
    cells = [
        (5.4, (3, 3, 3), 0.0),
        (5.6, (4, 3, 2), 0.0),
        (5.4, (3, 3, 3), 0.3),
        (5.5, (1, 1, 1), 0.4),
        (7.0, (2, 3, 2), 0.1),
    ]
    basis = [(0, 0, 0), (0, 0.5, 0.5), (0.5, 0, 0.5), (0.5, 0.5, 0)]
    made = []
    for edge, counts, tilt in cells:
        x, y, z = (edge * n for n in counts)
        cell = [[x, 0, 0], [tilt * y, y, 0], [-tilt * z, tilt * z, z]]
        positions = []
        for corner in product(*(range(n) for n in counts)):
            for offset in basis:
                fraction = [(c + o) / n for c, o, n in zip(corner, offset, counts, strict=True)]
                site = [sum(f * row[axis] for f, row in zip(fraction, cell, strict=True)) for axis in range(3)]
                positions.append([x + random.gauss(0, 0.15) for x in site])
        made.append({"positions": positions, "cell": cell})
    return made


def handover_deviation(first: dict[str, Any], second: dict[str, Any]) -> dict[str, float]:
    """Largest deviation of energy, forces and virial over all configurations, relative to the largest value."""
    worst = {"energy": 0.0, "forces": 0.0, "virial": 0.0}
    for ours, theirs in zip(first["configurations"], second["configurations"], strict=True):
        for quantity in worst:
            a, b = flat(ours[quantity]), flat(theirs[quantity])
            largest = max(map(abs, a)) or 1.0
            # NaN must not slip through a comparison: max() keeps its first argument.
            deviations = [abs(x - y) / largest for x, y in zip(a, b, strict=True)]
            worst[quantity] = float("nan") if any(d != d for d in deviations) else max(worst[quantity], *deviations)
    return worst


def check_within(deviation: dict[str, float], limit: float, problem: str) -> None:
    """Stop unless every deviation is a number within the limit; NaN is not."""
    if not all(value <= limit for value in deviation.values()):
        raise DemoError(f"{problem}: {deviation}, limit {limit}")


def flat(value: Any) -> list[float]:
    """All numbers of a nested list, in order."""
    return [x for item in value for x in flat(item)] if isinstance(value, list) else [float(value)]


def merge(
    training: dict[str, Any], simulation: dict[str, Any], deviation: dict[str, float], seconds: dict[str, float]
) -> dict[str, Any]:
    """What result.json holds."""
    return {
        "fit": training["fit"],
        "start": training["start"],
        "states": training["states"],
        "held_out": held_out(simulation),
        "handover_deviation": deviation,
        "step_0_deviation": step_0_deviation(simulation),
        "atoms": simulation["atoms"],
        "owned_and_ghosts": simulation["owned_and_ghosts"],
        "seconds": {**seconds, "training_phases": training["seconds"], "simulation_phases": simulation["seconds"]},
        "versions": {**training["versions"], **simulation["versions"]},
    }


def held_out(simulation: dict[str, Any]) -> dict[str, Any]:
    """The simulated state as a row like those of the training."""
    state = simulation["state"]
    pressure, energy = simulation["pressure_MPa"], simulation["residual_internal_energy_kJ_per_mol"]
    return {
        "state": f"{state['temperature_K']:.0f}K held out",
        "temperature_K": state["temperature_K"],
        "density_mol_per_L": state["density_mol_per_L"],
        "pressure_MPa": pressure["mean"],
        "pressure_error_MPa": pressure["error"],
        "pressure_reference_MPa": pressure["reference"],
        "energy_kJ_per_mol": energy["mean"],
        "energy_error_kJ_per_mol": energy["error"],
        "energy_reference_kJ_per_mol": energy["reference"],
    }


def step_0_deviation(simulation: dict[str, Any]) -> dict[str, float]:
    """Decomposed against one process, relative to the sum of absolute pair terms."""
    measured = simulation["step_zero_relative_deviation"]
    return {name: measured[name] for name in ("energy", "forces", "stress")}


def table(result: dict[str, Any]) -> str:
    """The result in a user's words."""
    fit, start = result["fit"], result["start"]
    lines = [
        "",
        f"epsilon/k_B   {start['epsilon_over_kB']:8.2f} K  ->  {fit['epsilon_over_kB']:8.2f} K",
        f"sigma         {start['sigma']:8.4f} Å  ->  {fit['sigma']:8.4f} Å",
        "",
        f"{'state':>14} {'P / MPa':>17} {'reference':>10} {'u / (kJ/mol)':>19} {'reference':>10}",
    ]
    for row in [*result["states"], result["held_out"]]:
        lines.append(
            f"{row['state']:>14} {row['pressure_MPa']:9.2f} ± {row['pressure_error_MPa']:5.2f} "
            f"{row['pressure_reference_MPa']:10.2f} {row['energy_kJ_per_mol']:10.4f} ± "
            f"{row['energy_error_kJ_per_mol']:6.4f} {row['energy_reference_kJ_per_mol']:10.4f}"
        )
    lines += [
        "",
        f"The last state was never shown to the training: {result['atoms']} atoms over two ranks.",
        f"Artefact, JAX against torch:     {format_deviation(result['handover_deviation'])}",
        f"Step 0, decomposed against one:  {format_deviation(result['step_0_deviation'])}",
    ]
    return "\n".join(lines)


def format_deviation(deviation: dict[str, float]) -> str:
    """Largest relative deviations, by quantity."""
    return ", ".join(f"{name} {value:.1e}" for name, value in deviation.items())


def main() -> int:
    """Run the phases and write result.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo", help="emptied first")
    parser.add_argument("--small", action="store_true", help="the same job, shortened to about a minute")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    try:
        result = run_job(out, ["--small"] if arguments.small else [])
    except DemoError as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    print(table(result))
    print(f"\nEverything lies in {out} ({result['seconds']['total']:.0f} s); result.json has the figures.")
    return 0


def run_job(out: Path, small: list[str]) -> dict[str, Any]:
    """Train, hand over, simulate; return what result.json holds."""
    clear(out)
    training, handover, simulation = out / "training", out / "handover", out / "simulation"
    handover.mkdir()
    artefact, python = ["--potential", str(training / "potential")], sys.executable
    start = time.perf_counter()
    shared = ["--reference", str(REFERENCE), *small]
    two_gloo_ranks = launcher("torchrun", "--standalone", "--nproc_per_node=2")
    seconds = {}
    seconds["training"] = run_phase(
        "training: DiffTRe on two MPI ranks, liquid argon",
        [*launcher("mpirun", "-np", "2"), python, str(TRAINING), *shared, "--out", str(training)],
    )
    seconds["handover"] = 0.0
    asked = handover / "configurations.json"
    asked.write_text(json.dumps({"configurations": configurations()}), encoding="utf-8")
    answers = {package: handover / f"{package}.json" for package in EVALUATE}
    for package, script in EVALUATE.items():
        seconds["handover"] += run_phase(
            f"hand-over: the artefact evaluated by {package}",
            [python, str(script), *artefact, "--configurations", str(asked), "--out", str(answers[package])],
        )
    deviation = handover_deviation(*map(read, answers.values()))
    check_within(deviation, HANDOVER_TOLERANCE, "the two packages disagree about the artefact")
    seconds["simulation"] = run_phase(
        "simulation: the held-out state, decomposed over two gloo ranks",
        [*two_gloo_ranks, str(SIMULATION), *shared, *artefact, "--out", str(simulation)],
    )
    seconds["total"] = time.perf_counter() - start
    simulated = read(simulation / "simulation.json")
    check_within(step_0_deviation(simulated), STEP_0_TOLERANCE, "the decomposed run differs from one process at step 0")
    result = merge(read(training / "training.json"), simulated, deviation, seconds)
    result["small"] = bool(small)
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    demo_figure.draw(result, out / "demo.png")
    return result


def clear(out: Path) -> None:
    """Empty the output folder, but never one that this job did not make."""
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise DemoError(f"{out} holds files of something else; give --out an empty or a new folder")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).write_text("Made by tools/demo.py, which empties this folder when it runs again.\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """One phase's result."""
    try:
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DemoError(f"{path} cannot be read ({error}), although its phase ended well") from None
    return loaded


if __name__ == "__main__":
    sys.exit(main())
