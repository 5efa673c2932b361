"""Liquid argon at a state point that the potential was not fitted to, decomposed over ranks.

    torchrun --nproc_per_node=2 argon_heldout.py --potential DIR --reference argon_reference.csv --out DIR [--small]

Reads a potential artefact, runs Langevin dynamics of at least 4,000 atoms at 115 K and the density that the reference
equation of state gives for 10 MPa, and compares mean pressure and residual internal energy with it. Without
``--potential`` a Lennard-Jones potential from the literature is used, without ``--reference`` the held-out state is
known by its numbers but has nothing to be compared with. Runs on one process as well.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import math
import platform
import time
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import torch
import torch.distributed as dist

from distmd_protocol import LocalComm, rank_zero
from nvalchemi_distributed import DomainConfig, DomainParallel, HookScope, __version__, world_comm
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics import ExtxyzSink, HostMemory, NVTLangevin, maxwell_boltzmann
from nvalchemi_distributed.dynamics.base import DynamicsStage
from nvalchemi_distributed.dynamics.hooks import LoggingHook, SnapshotHook
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import PairPotentialWrapper
from nvalchemi_distributed.neighbors import build_neighbor_list
from nvalchemi_distributed.units import BOLTZMANN, KJ_PER_MOL

_log = logging.getLogger("argon_heldout")

STATE = {"temperature_K": 115.0, "density_mol_per_L": 31.437, "pressure_MPa": 10.0}
"""Used where no reference table is given."""

AVOGADRO = 6.02214076e23
STRESS_EVERY = 5


def main() -> None:
    """Command line to result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--potential", type=Path, help="potential artefact; literature Lennard-Jones when left out")
    parser.add_argument("--reference", type=Path, help="table with a held-out row")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--small", action="store_true", help="a shortened run, for tests")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    # torchrun sets RANK; on one process nothing is exchanged.
    comm = world_comm() if dist.is_torchelastic_launched() else LocalComm()
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        seconds[name] = round(time.perf_counter() - clock, 3)
        clock = time.perf_counter()

    state = read_state(args.reference)
    model = make_model(args.potential)
    n_side = 12 if args.small else 16
    equilibrate, produce = (700, 400) if args.small else (1200, 3000)
    rank_zero(comm, args.out.mkdir, parents=True, exist_ok=True)

    snapshots = HostMemory(capacity=100)
    trajectory = ExtxyzSink(args.out / "trajectory.extxyz", digits=9)
    log = LoggingHook(frequency=STRESS_EVERY)
    integrator = NVTLangevin(
        model=model,
        dt=4.0,  # fs
        temperature=state["temperature_K"],
        friction=0.002,  # 1/fs; a stronger one slows the melting of the lattice
        seed=args.seed,
        hooks=[NeighborListHook(model.neighbor_config, skin=1.0, stage=DynamicsStage.BEFORE_COMPUTE)],
    )
    config = DomainConfig(cutoff=model.cutoff, skin=1.0)
    every = produce // 20
    outer = [StressOnlyWhenNeeded(), ProgressHook(equilibrate + produce)]
    parallel = DomainParallel(dynamics=integrator, config=config, hooks=outer)

    full = simple_cubic_argon(n_side, state, args.seed) if comm.rank == 0 else None
    owned = parallel.partition(full)
    lap("setup")
    deviations = compare_with_one_process(parallel, owned, model, comm)
    lap("step_zero")
    parallel.run(owned, n_steps=equilibrate)
    lap("equilibration")
    # Recording starts with production.
    integrator.hooks += [SnapshotHook(sink=snapshots, frequency=every)]
    parallel.hooks += [log, SnapshotHook(sink=trajectory, frequency=every, scope=HookScope.GLOBAL)]
    parallel.run(owned, n_steps=produce)
    lap("production")
    save_snapshots(args.out / "snapshots", snapshots, comm.rank)
    counts = comm.allgather([owned.n_owned, owned.n_ghost])
    rebuilds, traffic = parallel.rebuilds, dict(parallel.traffic.by_name)
    rank_zero(
        comm,
        finish,
        args,
        state,
        model,
        log,
        deviations,
        counts,
        rebuilds,
        traffic,
        seconds,
        [equilibrate, produce, n_side],
    )
    parallel.close()
    if dist.is_initialized():
        dist.destroy_process_group()


class StressOnlyWhenNeeded:
    """The virial costs about a third of a pair evaluation; it is asked for only in steps that are logged."""

    stage = DynamicsStage.BEFORE_COMPUTE
    frequency = 1

    def __call__(self, ctx: Any, stage: Any) -> None:
        """Choose the outputs of the evaluation that follows."""
        # The step that is being taken will have the next number.
        logged = (ctx.step_count + 1) % STRESS_EVERY == 0 or ctx.step_count == 0
        ctx.model.restrict({"energy", "forces", "stress"} if logged else {"energy", "forces"})


class ProgressHook:
    """A bar on rank zero where tqdm is installed."""

    stage = DynamicsStage.AFTER_STEP
    frequency = 50

    def __init__(self, total: int) -> None:
        self._total = total
        self._bar: Any = None

    def __call__(self, ctx: Any, stage: Any) -> None:
        """Move the bar."""
        if ctx.global_rank != 0:
            return
        if self._bar is None:
            try:
                from tqdm import tqdm
            except ImportError:
                self.frequency = self._total + 1
                return
            self._bar = tqdm(total=self._total, desc="simulation", unit="step")
        self._bar.update(ctx.step_count - self._bar.n)
        if ctx.step_count >= self._total:
            self._bar.close()


def make_model(path: Path | None) -> PairPotentialWrapper:
    """The artefact's potential, or Lennard-Jones argon (White, J. Chem. Phys. 111, 9352 (1999), rounded)."""
    if path is not None:
        return PairPotentialWrapper.from_artefact(path)
    parameters = {"epsilon": np.array([[117.3 * BOLTZMANN]]), "sigma": np.array([[3.396]])}
    return PairPotentialWrapper("lennard_jones", parameters, 8.5, species=("Ar",), tail_correction=True)


def read_state(path: Path | None) -> dict[str, float]:
    """The held-out row of the reference table, or the built-in state."""
    if path is None:
        return dict(STATE)
    with open(path, encoding="utf-8") as stream:
        rows = list(csv.DictReader(line for line in stream if not line.startswith("#")))
    chosen = [row for row in rows if row["role"].strip() == "held-out"]
    if len(chosen) != 1:
        raise ValueError(f"{path} has {len(chosen)} held-out rows; expected one")
    return {k: float(v) for k, v in chosen[0].items() if k not in ("state", "role")}


def simple_cubic_argon(n_side: int, state: dict[str, float], seed: int) -> Batch:
    """n_side³ atoms on a lattice that melts at once, at the state's density and temperature."""
    spacing = (1.0e27 / (state["density_mol_per_L"] * AVOGADRO)) ** (1 / 3)
    axis = torch.arange(n_side, dtype=torch.float64)
    sites = torch.cartesian_prod(axis, axis, axis)
    jitter = torch.rand(sites.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 0.5
    data = AtomicData(
        positions=(sites + 0.2 * jitter) * spacing,
        atomic_numbers=torch.full((n_side**3,), 18),
        cell=torch.eye(3, dtype=torch.float64) * n_side * spacing,
        pbc=True,
    )
    batch = Batch.from_data_list([data])
    maxwell_boltzmann(batch, state["temperature_K"], seed=seed)
    return batch


def compare_with_one_process(
    parallel: DomainParallel, owned: Any, model: PairPotentialWrapper, comm: Any
) -> dict[str, float]:
    """Decomposed energy, forces and stress at step 0 against one process, relative to the sum of absolute pair
    terms."""
    parallel.evaluate(owned)
    whole = parallel.gather(owned)
    return rank_zero(comm, _deviations, whole, model)


def _deviations(whole: Batch, model: PairPotentialWrapper) -> dict[str, float]:
    alone = whole.clone()
    NeighborListHook(model.neighbor_config, skin=1.0).update(alone)
    model.restrict({"energy", "forces", "stress"})
    reference = model(alone)
    # r of every pair, out of reach for padding.
    x, y, z = alone.neighbors.rows(alone.positions, alone.cell)
    rows = torch.stack([x, y, z], dim=-1)
    r = (rows[: whole.num_nodes].unsqueeze(1) - rows[alone.neighbors.matrix]).norm(dim=-1)
    inside = r < model.cutoff
    step = 1.0e-4
    phi, up = model.pair_energy(r), model.pair_energy(r + step)
    force = torch.where(inside, ((up - phi) / step).abs(), 0.0)
    phi = torch.where(inside, phi.abs(), 0.0)
    virial = 0.5 * (force * torch.where(inside, r, 0.0)).sum() / whole.cell[0].det()
    difference = (whole.forces - reference["forces"]).norm(dim=-1)
    return {
        "energy": float((whole.energy - reference["energy"]).abs().max() / (0.5 * phi.sum())),
        "forces": float((difference / force.sum(1)).max()),
        "stress": float((whole.stress - reference["stress"]).abs().max() / virial),
        "atoms": whole.num_nodes,
    }


def save_snapshots(folder: Path, snapshots: HostMemory, rank: int) -> None:
    """Each rank's owned atoms: ids and positions of every snapshot, one npz a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    for step, frame in zip(snapshots.steps, snapshots, strict=True):
        arrays[f"{step}/atom_id"] = frame.atom_id.numpy()
        arrays[f"{step}/positions"] = frame.positions.numpy()
    np.savez(folder / f"rank-{rank:05d}.npz", **arrays)


def block_average(values: np.ndarray, blocks: int = 10) -> tuple[float, float]:
    """Mean, and its standard error from the scatter of block means."""
    usable = len(values) // blocks * blocks
    means = values[:usable].reshape(blocks, -1).mean(1)
    return float(values.mean()), float(means.std(ddof=1) / math.sqrt(blocks))


def finish(
    args: argparse.Namespace,
    state: dict[str, float],
    model: PairPotentialWrapper,
    log: LoggingHook,
    deviations: dict[str, float],
    counts: list[list[int]],
    rebuilds: int,
    traffic: dict[str, int],
    seconds: dict[str, float],
    sizes: list[int],
) -> None:
    """Averages, plot, result file. Runs on rank zero."""
    equilibrate, produce, n_side = sizes
    n_atoms = n_side**3
    table = np.array(log.records)
    pressure, pressure_error = block_average(table[:, 5])
    energy, energy_error = block_average(table[:, 2] / n_atoms / KJ_PER_MOL)
    kelvin, kelvin_error = block_average(table[:, 4])
    radii, g = radial_distribution(args.out / "trajectory.extxyz")
    np.savetxt(args.out / "rdf.csv", np.column_stack([radii, g]), delimiter=",", header="r_angstrom,g", comments="")
    plot(args.out, radii, g, table)
    result: dict[str, Any] = {
        "state": state,
        "atoms": n_atoms,
        "ranks": len(counts),
        "owned_and_ghosts": counts,
        "steps": {"equilibration": equilibrate, "production": produce, "dt_fs": 4.0},
        "potential": {
            "family": model.family,
            "cutoff_angstrom": model.cutoff,
            "tail_correction": model.tail_correction,
        },
        "pressure_MPa": {"mean": pressure, "error": pressure_error, "reference": state.get("pressure_MPa")},
        "residual_internal_energy_kJ_per_mol": {
            "mean": energy,
            "error": energy_error,
            "reference": state.get("residual_internal_energy_kJ_per_mol"),
        },
        "temperature_K": {"mean": kelvin, "error": kelvin_error, "reference": state["temperature_K"]},
        "rdf_first_peak": {"r_angstrom": float(radii[g.argmax()]), "g": float(g.max())},
        "step_zero_relative_deviation": deviations,
        "rebuilds": rebuilds,
        "operations": traffic,
        "seconds": seconds,
        "versions": {
            "nvalchemi-distributed": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    (args.out / "simulation.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name, unit in (
        ("pressure_MPa", "MPa"),
        ("residual_internal_energy_kJ_per_mol", "kJ/mol"),
        ("temperature_K", "K"),
    ):
        entry = result[name]
        _log.info("%-36s %10.4f ± %.4f  reference %s %s", name, entry["mean"], entry["error"], entry["reference"], unit)


def radial_distribution(trajectory: Path, *, r_max: float = 12.0, bins: int = 240) -> tuple[np.ndarray, np.ndarray]:
    """g(r) over the frames of an extxyz file, read with ASE."""
    histogram = np.zeros(bins)
    norm = 0.0
    for atoms in ase.io.iread(trajectory, index=":"):
        x = torch.from_numpy(atoms.get_positions())
        cell = torch.from_numpy(atoms.cell.array.copy()).unsqueeze(0)
        pbc = torch.from_numpy(atoms.get_pbc()).unsqueeze(0)
        edges = build_neighbor_list(x, cell, pbc, torch.zeros(len(x), dtype=torch.int64), r_max)
        r = (x[edges.senders] + edges.images.double() @ cell[0] - x[edges.receivers]).norm(dim=-1)
        histogram += torch.histc(r, bins=bins, min=0.0, max=r_max).numpy()
        norm += len(x) ** 2 / atoms.get_volume()
    edge = np.linspace(0.0, r_max, bins + 1)
    shell = 4.0 / 3.0 * math.pi * np.diff(edge**3)
    return 0.5 * (edge[1:] + edge[:-1]), histogram / (shell * norm)


def plot(out: Path, radii: np.ndarray, g: np.ndarray, table: np.ndarray) -> None:
    """g(r) and the pressure record as PNG, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        _log.info("matplotlib is not installed; no plots")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    left.plot(radii, g)
    left.axhline(1.0, color="0.7", lw=0.8)
    left.set(xlabel="r / Å", ylabel="g(r)", title="liquid argon")
    right.plot(table[:, 0], table[:, 5], lw=0.6)
    right.set(xlabel="step", ylabel="pressure / MPa")
    figure.tight_layout()
    figure.savefig(out / "rdf.png", dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
