"""What a swap of 16 bytes between two ranks costs inside a step, with gloo's threads as they are and behind the ranks.

    python small_messages.py [--swaps 1000] [--json FILE]

Each round is half a millisecond of computing, then one swap; the time of a swap is that of the round less that of the
computing alone, the mean of many rounds, the least and the median of ten such. Two ranks, once wherever the kernel puts
them and once bound to a core each, as launchers of clusters do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from distmd_protocol.testkit.benchmark import Record, format_table, write_records
from nvalchemi_distributed.comm import world_comm
from nvalchemi_distributed.domain.gloo_threads import keep_behind_the_ranks

BLOCKS = 10


def times(act: Callable[[], object], rounds: int) -> list[float]:
    """Mean milliseconds of a round, for each of ten blocks."""
    blocks = []
    for _ in range(BLOCKS):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(rounds):
            act()
        blocks.append((time.perf_counter() - begin) / rounds * 1e3)
    return blocks


def worker(rounds: int, result: Path) -> None:
    """Measure on two ranks, before and after."""
    torch.set_num_threads(1)
    world_comm()
    rows = torch.rand(160, 160, dtype=torch.float64)
    mine, theirs = torch.rand(2, dtype=torch.float64), torch.empty(2, dtype=torch.float64)
    peer = 1 - dist.get_rank()

    def compute() -> None:
        rows @ rows
        rows @ rows

    def step() -> None:
        compute()
        for work in (dist.irecv(theirs, src=peer), dist.isend(mine, dst=peer)):
            work.wait()

    found = {}
    for name in ("default", "behind"):
        if name == "behind" and not keep_behind_the_ranks():
            raise SystemExit("no thread of gloo was changed: not Linux, forbidden, or named otherwise")
        alone, whole = times(compute, rounds), times(step, rounds)
        found[name] = [w - min(alone) for w in whole]
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=1000, help="in all, for each case")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        if args.worker == "bound":
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
        worker(args.swaps // BLOCKS, args.result)
        return
    records = []
    for where in ("free", "bound"):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "times.json"
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__,
                 "--worker", where, "--swaps", str(args.swaps), "--result", str(result)],
                check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            found = json.loads(result.read_text(encoding="utf-8"))
        for metric, of in (("ms_per_swap_min", min), ("ms_per_swap_median", statistics.median)):
            records.append(Record("nvalchemi-distributed", f"swap-16B-{where}", 2, "float64", metric,
                                  of(found["behind"]), "ms", "default scheduling", of(found["default"]),
                                  {"torch": torch.__version__}))  # fmt: skip
    print(format_table(records))
    if args.json:
        write_records(args.json, records)


if __name__ == "__main__":
    main()
