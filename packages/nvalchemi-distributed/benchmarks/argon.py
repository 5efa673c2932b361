"""The system of the argon benchmark, and what one process or rank does with it. Times leave as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nvalchemi_distributed import DomainConfig, DomainParallel, world_comm
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.domain.scaling import step_traffic
from nvalchemi_distributed.dynamics import NVE, maxwell_boltzmann
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import LennardJonesModelWrapper

LATTICE, JITTER, CUTOFF, DT, KELVIN = 5.74, 0.05, 8.5, 2.0, 94.4
EPSILON, SIGMA = 0.010323, 3.405


def argon(cells: int, dtype: torch.dtype) -> Batch:
    """4 cells³ atoms of a jittered fcc crystal with velocities."""
    axis = torch.arange(cells, dtype=torch.float64)
    base = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=torch.float64)
    x = (torch.cartesian_prod(axis, axis, axis)[:, None] + base).reshape(-1, 3) * LATTICE
    x += JITTER * torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cell = cells * LATTICE * torch.eye(3, dtype=torch.float64)
    batch = Batch.from_data_list([AtomicData(x, torch.full((len(x),), 18), cell=cell, pbc=True)])
    maxwell_boltzmann(batch, KELVIN, seed=1)
    return batch.to(dtype=dtype)


def integrator(args: argparse.Namespace) -> NVE:
    """Velocity Verlet with the model's list."""
    model = LennardJonesModelWrapper(EPSILON, SIGMA, CUTOFF, compile=args.compile)
    model.restrict({"forces"} if args.forces_only else {"energy", "forces"})
    return NVE(model, DT, hooks=[NeighborListHook(model.neighbor_config, skin=args.skin)])


class Clock:
    """Seconds by phase, nested calls counted once: a phase inside another is taken off the outer one.

    ``now`` is what is read: the wall clock, or the processor time, which leaves out waiting and other programs.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.now = now
        self._open: list[tuple[str, float]] = []

    def enter(self, name: str) -> None:
        """Start a phase; the one around it pauses."""
        now = self.now()
        if self._open:
            outer, since = self._open[-1]
            self.seconds[outer] += now - since
        self._open.append((name, now))

    def leave(self) -> None:
        """End the innermost phase."""
        now = self.now()
        name, since = self._open.pop()
        self.seconds[name] += now - since
        if self._open:
            self._open[-1] = (self._open[-1][0], now)

    def around(self, owner: Any, method: str, name: str) -> None:
        """Time one method of one object."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kw: Any) -> Any:
            self.enter(name)
            try:
                return inner(*args, **kw)
            finally:
                self.leave()

        setattr(owner, method, timed)


def phases(parallel: DomainParallel, owned: Any, steps: int) -> dict[str, tuple[float, float]]:
    """Milliseconds a step by phase, wall clock and processor time, over steps without a rebuild; and one rebuild's."""
    clocks = (Clock(time.perf_counter), Clock(time.process_time))
    dynamics = parallel.dynamics
    for clock in clocks:
        clock.around(dynamics, "pre_update", "integrator")
        clock.around(dynamics, "post_update", "integrator")
        clock.around(dynamics.model, "forward", "model: rows and kernel")
        clock.around(parallel._transport, "exchange", "exchange of ghosts")
        clock.around(parallel.reduce, "max", "vote: reduction")
        clock.around(parallel.reduce, "sum", "outputs: reduction")
        clock.around(parallel.model._strategy, "run_forward", "ghosts and outputs: local work")
    quiet: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    rebuild = [0.0, 0.0]
    n_quiet = n_rebuild = 0
    for _ in range(steps):
        before = parallel.rebuilds
        for clock in clocks:
            clock.seconds.clear()
            clock.enter("vote: local work, hooks, python")
        parallel.step(owned)
        for clock in reversed(clocks):
            clock.leave()
        here = parallel.rebuilds == before
        n_quiet, n_rebuild = n_quiet + here, n_rebuild + (not here)
        for k, clock in enumerate(clocks):
            if here:
                for name, value in clock.seconds.items():
                    quiet[name][k] += value
            else:
                rebuild[k] += sum(clock.seconds.values())
    out = {name: (v[0] / n_quiet * 1e3, v[1] / n_quiet * 1e3) for name, v in quiet.items()}
    if n_rebuild:
        whole = [rebuild[k] / n_rebuild * 1e3 - sum(v[k] for v in out.values()) for k in (0, 1)]
        out["one rebuild, without its step"] = (whole[0], whole[1])
    return out


def operations(parallel: DomainParallel, owned: Any, steps: int) -> dict[str, float]:
    """Torch operators, allocations and host reads a step, by the profiler."""
    before = parallel.rebuilds
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        parallel.run(owned, steps)
    counts: dict[str, int] = {e.key: e.count for e in trace.key_averages()}
    made = [k for k in counts if k.startswith("aten::empty")]
    return {
        "operators": sum(n for k, n in counts.items() if k.startswith("aten::")) / steps,
        "allocations": sum(counts[k] for k in made) / steps,
        "host_reads": counts.get("aten::_local_scalar_dense", 0) / steps,
        "rebuilds_inside": parallel.rebuilds - before,
    }


def peak_memory() -> float:
    """Largest resident memory of this program so far, MB; ``getrusage`` would count the one that started it too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def decomposed(args: argparse.Namespace) -> None:
    """One rank."""
    import torch.distributed as dist

    comm = world_comm()
    parallel = DomainParallel(integrator(args), DomainConfig(cutoff=CUTOFF, skin=args.skin))
    batch = argon(args.cells, getattr(torch, args.dtype)) if comm.rank == 0 else None
    n_atoms = 4 * args.cells**3
    owned = parallel.partition(batch)
    batch = None
    parallel.run(owned, 5)
    t = parallel.traffic
    first, before = parallel.rebuilds, (dict(t.by_name), t.bytes_sent, t.messages)
    times = []
    busy = time.process_time()
    for _ in range(args.blocks):
        comm.barrier()
        start = time.perf_counter()
        parallel.run(owned, args.steps)
        comm.barrier()
        times.append((time.perf_counter() - start) / args.steps * 1e3)
    busy = time.process_time() - busy
    steps = args.blocks * args.steps
    made = {k: (v - before[0].get(k, 0)) / steps for k, v in t.by_name.items()}
    sent, messages = (t.bytes_sent - before[1]) / steps, (t.messages - before[2]) / steps
    rebuilds = parallel.rebuilds - first
    peaks = comm.allgather(peak_memory())
    busy_all = comm.allgather(busy / steps * 1e3)
    grid = parallel._boxes.grid
    edge = args.cells * LATTICE
    itemsize = owned.positions.element_size()
    on_paper = step_traffic(n_atoms, (edge,) * 3, grid, CUTOFF + args.skin, itemsize=itemsize)
    result = {
        "times": times,
        "cpu_ms_per_step": max(busy_all),
        "atoms": n_atoms,
        "steps_per_rebuild": steps / max(1, rebuilds),
        "rebuilds": rebuilds,
        "operations_per_step": made,
        "bytes_per_step": sent,
        "messages_per_step": messages,
        "model_bytes": on_paper.bytes_sent,
        "model_ghosts": on_paper.ghosts,
        "peak_MB": max(peaks),
        "owned_and_ghosts": [owned.n_owned, owned.n_ghost],
    }
    if args.profile:
        result["operations"] = operations(parallel, owned, 5)
        result["phases"] = phases(parallel, owned, 60)
    if comm.rank == 0:
        Path(args.result).write_text(json.dumps(result), encoding="utf-8")
    parallel.close()
    dist.destroy_process_group()


def plain(args: argparse.Namespace) -> None:
    """The same integrator without DomainParallel."""
    batch = argon(args.cells, getattr(torch, args.dtype))
    dynamics = integrator(args)
    dynamics.run(batch, 5)
    times = []
    for _ in range(args.blocks):
        start = time.perf_counter()
        dynamics.run(batch, args.steps)
        times.append((time.perf_counter() - start) / args.steps * 1e3)
    Path(args.result).write_text(json.dumps({"times": times}), encoding="utf-8")


def main() -> None:
    """Entry of one process; started by lj_argon.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["decomposed", "plain"])
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--cells", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--skin", type=float, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--forces-only", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--bind", action="store_true")
    parser.add_argument("--result", required=True)
    args = parser.parse_args()
    if args.bind:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})
    torch.set_num_threads(1)
    decomposed(args) if args.mode == "decomposed" else plain(args)


if __name__ == "__main__":
    main()
