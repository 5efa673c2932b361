"""Memory of a rank as the number of state points grows, with trajectories on the device and in host memory.

    python memory_lj125.py [--ranks 2] [--points 4 16 64] [--json FILE]

The problem of ``difftre_lj125.py``. Trajectories are on every rank, so a rank's memory grows with all state points, not
with its share. "device" is what JAX holds after an update; "host" what numpy holds; "estimate" what the trainer logs
before the first simulation (trajectories and neighbour lists); "rss" the resident memory of the process, programs
included.
"""

from __future__ import annotations

from _one_core import hold_to_one_core

hold_to_one_core()

import argparse  # noqa: E402
import gc  # noqa: E402
import logging  # noqa: E402
import re  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import _lj125  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from ranks_lj125 import run_on  # noqa: E402

from chemtrain_mpi.trainers.checkpoints import trajectory_arrays  # noqa: E402
from distmd_protocol.testkit.benchmark import Record, format_table, write_records  # noqa: E402

PAGE = 4096
MB = 1e6


class Estimate(logging.Handler):
    """Keeps the megabytes of the trainer's estimate."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.megabytes = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Add up the figures of the memory line."""
        message = record.getMessage()
        if message.startswith("memory"):
            self.megabytes = sum(float(number) for number in re.findall(r"([\d.]+) MB", message))


def measure(points: int, on_host: bool, parallelism: str) -> tuple[dict[str, float], int, int]:
    """Megabytes on this rank after two updates that recompute everything, the rank and the number of ranks."""
    estimate = Estimate()
    logger = logging.getLogger("chemtrain_mpi")
    logger.addHandler(estimate)
    logger.setLevel(logging.INFO)
    trainer = _lj125.make(1.0, parallelism, points, traj_states_on_host=on_host)
    trainer.initialize_trajstates()
    trainer.train(2)
    gc.collect()
    logger.removeHandler(estimate)
    assert trainer.trajectories is not None
    stored = jax.tree.leaves(trajectory_arrays(trainer.trajectories))
    stored += [trajectory.cache.get("slots") for trajectory in trainer.trajectories]
    on_numpy = sum(leaf.nbytes for leaf in stored if isinstance(leaf, np.ndarray))
    figures = {
        "device": sum(array.nbytes for array in jax.live_arrays()) / MB,
        "host": on_numpy / MB,
        "estimate": estimate.megabytes,
        "rss": int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * PAGE / MB,
    }
    return figures, trainer.rank, trainer.size


def one(options: argparse.Namespace) -> None:
    """One case, on each rank of an MPI run; rank zero writes."""
    (points,) = options.points
    figures, rank, size = measure(points, options.on_host, "mpi")
    place = "host" if options.on_host else "device"
    common: dict[str, Any] = {"ranks": size, "dtype": "float32", "unit": "MB"}
    work = f"difftre-lj125-{points}-state-points-on-{place}"
    rows = [Record("chemtrain-mpi", work, metric=name, value=value, **common) for name, value in figures.items()]
    if rank == 0:
        write_records(options.json, rows)


def main() -> None:
    """Measure every case in processes of its own, print a table, and write the records."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", help="file for the records")
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--points", type=int, nargs="+", default=[4, 16, 64])
    arguments.add_argument("--on-host", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        one(options)
        return
    records: list[Record] = []
    for points in options.points:
        for place in ((), ("--on-host",)):
            records += run_on(options.ranks, "memory_lj125.py", "--one", "--points", str(points), *place)
    print(format_table(records))
    if options.json:
        write_records(options.json, records)


if __name__ == "__main__":
    main()
