"""How long a validation of a small model takes, and what row tensors cost.

    python validate_small.py --json validate.json

Rows: wall seconds of `trace_and_validate` on 2 ranks, the start of the ranks included (aim: below 30), and again with
the ranks at hand; microseconds of dispatch an operation; a forward with row tensors beside one with plain tensors, on
one rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from distmd_protocol.testkit.benchmark import Record, format_table, write_records
from nvalchemi_distributed import ShardTensor
from nvalchemi_distributed.context import DistributedContext, activate
from nvalchemi_distributed.domain.plan import HaloPlan
from nvalchemi_distributed.domain.transport import Transport
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.ops import RowInfo, RowKind
from nvalchemi_distributed.strategies.scope import as_row_tensors
from nvalchemi_distributed.validate import trace_and_validate

EXAMPLE = Path(__file__).parents[1] / "examples" / "distributed" / "04_byo_pytorch_mpnn.py"


def example():
    """The descriptor network of the example."""
    spec = importlib.util.spec_from_file_location("byo_mpnn", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def best(act: Callable[[], object], repeat: int, times: int = 5) -> float:
    """Seconds of one call, the least of several rounds."""
    act()
    rounds = []
    for _ in range(times):
        begin = time.perf_counter()
        for _ in range(repeat):
            act()
        rounds.append((time.perf_counter() - begin) / repeat)
    return min(rounds)


def alone(n: int) -> tuple[DistributedContext, Transport]:
    """A mesh of one rank."""
    none = torch.zeros(0, dtype=torch.int64)
    transport = Transport(None)
    return DistributedContext(HaloPlan(n, 0, none, none, none, none), transport), transport


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    module, records = example(), []

    def record(
        work: str, metric: str, value: float, unit: str, anchor: str | None = None, at: float | None = None
    ) -> None:
        records.append(Record("nvalchemi-distributed", work, 2 if "validate" in work else 1, "float64", metric, value,
                              unit, anchor, at, {"torch": torch.__version__}))  # fmt: skip

    for metric in ("wall_first", "wall_again"):
        begin = time.perf_counter()
        report = trace_and_validate(module.make_model, module.make_batch(), rtol=1e-8)
        record("validate-mpnn-288", metric, time.perf_counter() - begin, "s")
        assert report.ok, report.log_summary

    plain = torch.rand(64, 8, dtype=torch.float64)
    context, _transport = alone(64)
    rows = ShardTensor.wrap(plain, RowInfo(RowKind.NODE), context)
    bare, sharded = best(lambda: plain * 2.0, 2000), best(lambda: rows * 2.0, 2000)
    record("dispatch-mul-64x8", "time_per_op", sharded * 1e6, "us", "plain tensor", bare * 1e6)

    batch, model = module.make_batch(24), module.make_model()
    NeighborListHook(model.neighbor_config).update(batch)
    context, _transport = alone(batch.num_nodes)

    def decomposed() -> None:
        with activate(context), torch.no_grad():
            model(as_row_tensors(batch, context))

    def single() -> None:
        with torch.no_grad():
            model(batch)

    a, b = best(single, 5), best(decomposed, 5)
    record(f"forward-mpnn-{batch.num_nodes}", "time_per_forward", b * 1e3, "ms", "plain tensors", a * 1e3)
    print(format_table(records))
    if args.json:
        write_records(args.json, records)


if __name__ == "__main__":
    main()
