"""CPU seconds of DiffTRe updates on a small Lennard-Jones fluid, and where they go.

    NPROC=1 python difftre_lj125.py [--json FILE]
    NPROC=1 mpirun -np 2 -x NPROC python difftre_lj125.py --parallelism mpi [--json FILE]

Four state points, all stale or none (``_lj125.py``). Each rank is held to one core. Medians over updates. The anchors
are the figures of the published single-process trainer chemtrain 0.2.0 on the same problem, measured elsewhere;
``compare_chemtrain.py`` measures it in the same run.

jax-md compiles the shapes of its rigid bodies while it is imported. As the guide advises under "Memory", those
programs are dropped before the trainer is made (``--keep-programs`` leaves them).
"""

from __future__ import annotations

from _one_core import hold_to_one_core

hold_to_one_core()

import argparse  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from importlib.metadata import version  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import _lj125  # noqa: E402
import jax  # noqa: E402

import chemtrain_mpi  # noqa: E402
from distmd_protocol.testkit.benchmark import Record, format_table, write_records  # noqa: E402

PEER = {"recompute": 5.48, "reuse": 0.73, "first-two": 18.0, "peak_rss": 839.0}
PEER_NAME = "chemtrain 0.2.0, one process, measured elsewhere"
PHASES = ("simulating", "reweighting", "communicating")


class Clock:
    """CPU and wall seconds since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def read(self) -> dict[str, float]:
        """Seconds by metric."""
        return {"cpu_s": time.process_time() - self._cpu, "wall_s": time.perf_counter() - self._wall}


def peak_rss() -> float:
    """Largest resident memory of this program so far, MB; ``getrusage`` would count the one that started it too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def measure(parallelism: str, updates: int, keep_programs: bool) -> tuple[dict[str, dict[str, float]], int, int]:
    """Figures of this rank by kind of update, the rank and the number of ranks."""
    figures: dict[str, dict[str, float]] = {}
    if not keep_programs:
        jax.clear_caches()
    before, clock = peak_rss(), Clock()
    trainer = _lj125.make(1.0, parallelism)
    trainer.initialize_trajstates()
    trainer.train(2)
    figures["first-two"] = clock.read()
    figures["recompute"] = median(trainer, updates, 4)
    figures["first-two"] |= {"peak_rss": peak_rss(), "rss_before": before}
    trainer = _lj125.make(0.0, parallelism)
    trainer.initialize_trajstates()
    trainer.train(2)
    figures["reuse"] = median(trainer, updates, 0)
    return figures, trainer.rank, trainer.size


def median(trainer: chemtrain_mpi.DifftreParallel, updates: int, recomputed: int) -> dict[str, float]:
    """Medians over updates of CPU and wall seconds, and of the wall seconds by phase."""
    samples = []
    for _ in range(updates):
        clock = Clock()
        trainer.train(1)
        entry = trainer.history[-1]
        assert len(entry["recomputed"]) == recomputed, entry["recomputed"]
        phases = {name: entry["seconds"].get(name, 0.0) for name in PHASES}
        figures = clock.read() | phases
        samples.append(figures | {"rest": figures["wall_s"] - sum(phases.values())})
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def records(figures: dict[str, dict[str, float]], size: int) -> list[Record]:
    """One rank's figures as records."""
    versions = {name: version(name) for name in ("jax", "jax-md")}
    common: dict[str, Any] = {"ranks": size, "dtype": "float32"}
    common["versions"] = {"chemtrain-mpi": chemtrain_mpi.__version__, **versions}
    result = []
    for kind, values in figures.items():
        for metric, value in values.items():
            anchor: dict[str, Any] = {}
            if metric == "cpu_s":
                anchor = {"anchor": PEER_NAME, "anchor_value": PEER[kind]}
            elif metric == "peak_rss":
                anchor = {"anchor": PEER_NAME, "anchor_value": PEER["peak_rss"]}
            unit = {"cpu_s": "s a rank", "peak_rss": "MB", "rss_before": "MB"}.get(metric, "s")
            result.append(
                Record(
                    "chemtrain-mpi", f"difftre-lj125-{kind}", metric=metric, value=value, unit=unit, **anchor, **common
                )
            )
    return result


def main() -> None:
    """Measure, print a table, and write the records."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", help="file for the records of rank zero")
    arguments.add_argument("--parallelism", choices=("single", "mpi"), default="single")
    arguments.add_argument("--updates", type=int, default=5)
    arguments.add_argument("--keep-programs", action="store_true", help="leave what jax-md compiled at its import")
    options = arguments.parse_args()
    figures, rank, size = measure(options.parallelism, options.updates, options.keep_programs)
    if rank:
        return
    rows = records(figures, size)
    print(format_table(rows))
    if options.json:
        write_records(options.json, rows)


if __name__ == "__main__":
    main()
