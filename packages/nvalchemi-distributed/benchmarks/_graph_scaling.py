"""What the scaling benchmarks of graph networks share: NVE on one and more ranks beside the bare network.

Each benchmark describes its system and network as a :class:`Problem` and calls :func:`main`; the ranks are started by
``torchrun`` on the benchmark's own file.
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
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from distmd_protocol.testkit.benchmark import Record, format_table, write_records

BLOCKS = 5


@dataclass(frozen=True)
class Problem:
    """One network on one system.

    Attributes:
        work: name of the records, without the number of atoms.
        model: the wrapper for a dtype.
        batch: the system with velocities, in a dtype.
        alone: one forward with forces of the bare network, on the graph within its cutoff, for a wrapper and a batch.
        cutoff, skin: Å.
        dt: fs.
        packages: whose versions the records name.
    """

    work: str
    model: Callable[[torch.dtype], Any]
    batch: Callable[[torch.dtype], Any]
    alone: Callable[[Any, Any], Callable[[], object]]
    cutoff: float
    skin: float
    dt: float
    packages: tuple[str, ...]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that every such benchmark has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    made.add_argument("--dtypes", nargs="+", default=["float64", "float32"])
    made.add_argument("--steps", type=int, default=4, help="steps in a block")
    made.add_argument("--json", type=Path)
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--dtype", help=argparse.SUPPRESS)
    made.add_argument("--result", help=argparse.SUPPRESS)
    return made


def timed(act: Callable[[], object], steps: int) -> tuple[list[float], float]:
    """Milliseconds of a call, a block's mean each; and processor milliseconds of one. One block more goes before."""
    times, busy = [], 0.0
    for block in range(BLOCKS + 1):
        busy = time.process_time() if block == 1 else busy
        start = time.perf_counter()
        for _ in range(steps):
            act()
        if block:
            times.append((time.perf_counter() - start) / steps * 1e3)
    return times, (time.process_time() - busy) / (BLOCKS * steps) * 1e3


def peak_memory() -> float:
    """Largest resident memory of this program so far, MB; ``getrusage`` would count the one that started it too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def worker(problem: Problem, args: argparse.Namespace) -> None:
    """One rank: run, and leave the times as JSON on rank zero."""
    import torch.distributed as dist

    from nvalchemi_distributed import DomainConfig, DomainParallel, world_comm
    from nvalchemi_distributed.dynamics import NVE
    from nvalchemi_distributed.hooks import NeighborListHook

    torch.set_num_threads(1)
    comm = world_comm()
    dtype = getattr(torch, args.dtype)
    model = problem.model(dtype)
    # As the model alone: energy and forces.
    model.restrict({"energy", "forces"})
    batch = problem.batch(dtype)
    integrator = NVE(model, problem.dt, hooks=[NeighborListHook(model.neighbor_config, skin=problem.skin)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=problem.cutoff, skin=problem.skin))
    owned = parallel.partition(batch if comm.rank == 0 else None)
    parallel.run(owned, args.steps)
    traffic, first = dict(parallel.traffic.by_name), parallel.rebuilds
    times = []
    busy = time.process_time()
    for _ in range(BLOCKS):
        comm.barrier()
        start = time.perf_counter()
        parallel.run(owned, args.steps)
        comm.barrier()
        times.append((time.perf_counter() - start) / args.steps * 1e3)
    busy = time.process_time() - busy
    steps = BLOCKS * args.steps
    made = {k: (v - traffic.get(k, 0)) / steps for k, v in parallel.traffic.by_name.items()}
    counts = comm.allgather([owned.n_owned, owned.n_ghost])
    # The busiest rank: what a machine with a core for each would wait for.
    busy = max(comm.allgather(busy))
    peak = max(comm.allgather(peak_memory()))
    rebuilds = parallel.rebuilds - first
    parallel.close()
    # After the run, so that its memory is not the run's.
    alone, alone_cpu = timed(problem.alone(model, batch), args.steps) if comm.size == 1 else ([], None)
    if comm.rank == 0:
        result = {
            "times": times,
            "alone": alone,
            "alone_cpu": alone_cpu,
            "cpu_ms_per_step": busy / steps * 1e3,
            "peak_MB": peak,
            "atoms": batch.num_nodes,
            "rebuilds": rebuilds,
            "operations_per_step": made,
            "owned_and_ghosts": counts,
        }
        Path(args.result).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def measure(script: str, args: argparse.Namespace, ranks: int, dtype: str, extra: list[str]) -> dict[str, Any]:
    """Start the ranks and read what rank zero left."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [script, "--worker", "--dtype", dtype, "--steps", str(args.steps), "--result", str(result), *extra]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1800)
        return json.loads(result.read_text(encoding="utf-8"))


def main(script: str, problem: Problem, args: argparse.Namespace, extra: list[str]) -> None:
    """Be a rank, or measure, print a table and write records.

    Args:
        script: the benchmark's own file.
        problem: what it measures.
        args: of :func:`parser`.
        extra: options of the benchmark's own, for the ranks.
    """
    if args.worker:
        worker(problem, args)
        return
    from nvalchemi_distributed import __version__

    versions = {"nvalchemi-distributed": __version__, "python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", *problem.packages)}
    records = []
    for dtype in args.dtypes:
        plain: dict[str, float] = {}
        for ranks in args.ranks:
            result = measure(script, args, ranks, dtype, extra)
            times, alone = result["times"], result["alone"]
            common = {
                "name": "nvalchemi-distributed",
                "work": f"{problem.work}-{result['atoms']}",
                "ranks": ranks,
                "dtype": dtype,
                "versions": versions,
            }
            values = {
                "ms_per_step_min": (min(times), "ms", min(alone) if alone else None),
                "ms_per_step_median": (statistics.median(times), "ms", min(alone) if alone else None),
                "cpu_ms_per_step": (result["cpu_ms_per_step"], "ms", result["alone_cpu"]),
                "peak_memory": (result["peak_MB"], "MB", None),
            }
            plain = {k: v[0] for k, v in values.items()} if ranks == 1 else plain
            for metric, (value, unit, bare) in values.items():
                name, anchor = ("model alone", bare) if bare else ("1 rank", plain.get(metric))
                if ranks == 1 and not bare:
                    name, anchor = None, None
                records.append(
                    Record(metric=metric, value=value, unit=unit, anchor=name, anchor_value=anchor, **common)
                )
            if plain and ranks > 1:
                records.append(
                    Record(
                        metric="speed-up",
                        value=plain["ms_per_step_min"] / min(times),
                        unit="1",
                        anchor="ranks",
                        anchor_value=float(ranks),
                        **common,
                    )
                )
            print(dtype, ranks, {k: result[k] for k in ("owned_and_ghosts", "rebuilds", "operations_per_step")})
    print(format_table(records))
    if args.json:
        write_records(args.json, records)
