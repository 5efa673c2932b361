"""Mean of gradient trees over ranks: latency by size, path and mode.

    python communication.py [--ranks 2] [--json FILE]

Four state points, dealt to the ranks, each with a gradient of 10 kB, 1 MB or 50 MB in ten float32 leaves. What is timed
begins and ends with trees of numpy arrays, as in the trainer:

- ``deterministic, mpi4py``: every gradient to every rank, leaf by leaf through buffers, added up in state-point order
  (the default mode);
- ``deterministic, mpi4jax``: the same with one all-gather of flat buffers inside jit;
- ``all-reduce, mpi4py`` and ``all-reduce, mpi4jax``: one sum of flat buffers, of numpy or inside jit
  (``deterministic=False``).

Medians over repeats that start together. A kernel's first call, which compiles, is not among them.
"""

from __future__ import annotations

from _one_core import hold_to_one_core

hold_to_one_core()

import argparse  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402
from importlib.metadata import version  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from ranks_lj125 import run_on  # noqa: E402

from chemtrain_mpi.collectives import Collectives  # noqa: E402
from chemtrain_mpi.reduction import flat_mean, ordered_mean  # noqa: E402
from chemtrain_mpi.trainers.batching import deal  # noqa: E402
from distmd_protocol.testkit.benchmark import Record, format_table, write_records  # noqa: E402

SIZES = {"10kB": 10_000, "1MB": 1_000_000, "50MB": 50_000_000}
POINTS, LEAVES = 4, 10
Tree = dict[str, np.ndarray]


def gradient(point: int, nbytes: int) -> Tree:
    """Made-up gradient of a state point, the same wherever it is made."""
    generator = np.random.default_rng(point)
    count = nbytes // 4 // LEAVES
    return {f"leaf{i}": generator.standard_normal(count, dtype=np.float32) for i in range(LEAVES)}


def flat(tree: Tree) -> np.ndarray:
    """All leaves in one buffer."""
    return np.concatenate([leaf.reshape(-1) for leaf in tree.values()])


def split(buffer: np.ndarray, like: Tree) -> Tree:
    """The buffer as a tree."""
    parts = np.split(buffer, np.cumsum([leaf.size for leaf in like.values()])[:-1])
    return {name: part.reshape(leaf.shape) for (name, leaf), part in zip(like.items(), parts, strict=True)}


@partial(jax.jit, static_argnums=0)
def gather_and_add(handle: int, mine: jax.Array) -> jax.Array:
    """Sum of all ranks' rows ``(own state points, entries)`` in state-point order: they were dealt in turn."""
    import mpi4jax
    from mpi4py import MPI

    rows = mpi4jax.allgather(mine, comm=MPI.Comm.fromhandle(handle))
    ordered = jnp.swapaxes(rows, 0, 1).reshape(-1, mine.shape[-1])
    total = ordered[0]
    for row in ordered[1:]:
        total = total + row
    return total


def methods(comm: Collectives, mine: dict[int, Tree]) -> dict[str, Callable[[], Tree]]:
    """What is compared; each gives the mean gradient."""
    from chemtrain_mpi.jit_collectives import jit_sum

    template = next(iter(mine.values()))
    owners = deal(range(POINTS), comm.size)

    def share() -> Tree:
        shared = comm.share({k: list(tree.values()) for k, tree in mine.items()}, owners)
        return ordered_mean([dict(zip(template, shared[k], strict=True)) for k in range(POINTS)])

    def share_in_jit() -> Tree:
        rows = np.stack([flat(tree) for tree in mine.values()])
        total = jax.block_until_ready(gather_and_add(comm.mpi.handle, rows))
        return split(np.asarray(total) / np.float32(POINTS), template)

    def sum_by_buffers() -> Tree:
        return flat_mean(comm, list(mine.values()), template, POINTS)

    def sum_in_jit() -> Tree:
        local = np.sum([flat(tree) for tree in mine.values()], axis=0, dtype=np.float32)
        return split(np.asarray(jit_sum(comm.mpi, local)) / np.float32(POINTS), template)

    return {
        "deterministic, mpi4py": share,
        "deterministic, mpi4jax": share_in_jit,
        "all-reduce, mpi4py": sum_by_buffers,
        "all-reduce, mpi4jax": sum_in_jit,
    }


def measure(comm: Collectives) -> dict[tuple[str, str], float]:
    """Median milliseconds by size and method; the slowest rank's."""
    result = {}
    for size, nbytes in SIZES.items():
        mine = {k: gradient(k, nbytes) for k, owner in deal(range(POINTS), comm.size).items() if owner == comm.rank}
        expected = ordered_mean([gradient(k, nbytes) for k in range(POINTS)])
        for name, method in methods(comm, mine).items():
            answer = method()
            for leaf, value in expected.items():
                if name.startswith("deterministic"):
                    np.testing.assert_array_equal(answer[leaf], value)
                else:
                    np.testing.assert_allclose(answer[leaf], value, rtol=1e-5, atol=1e-6)
            samples = []
            for _ in range(3 if nbytes > 1e7 else 30):
                comm.barrier()
                start = time.perf_counter()
                method()
                samples.append(1e3 * (time.perf_counter() - start))
            result[size, name] = max(float(value) for value in comm.allgather(statistics.median(samples)))
    return result


def one(options: argparse.Namespace) -> None:
    """The measurement, on each rank of an MPI run; rank zero writes."""
    from chemtrain_mpi.comm import world_comm

    comm = Collectives(world_comm())
    figures = measure(comm)
    versions = {name: version(name) for name in ("mpi4py", "mpi4jax", "jax")}
    rows = []
    for (size, name), value in figures.items():
        common: dict[str, Any] = {"ranks": comm.size, "dtype": "float32", "versions": versions}
        anchor = figures[size, "deterministic, mpi4py"]
        rows.append(
            Record(
                name,
                f"gradient-mean-{size}",
                metric="latency",
                value=value,
                unit="ms",
                anchor="deterministic, mpi4py",
                anchor_value=anchor,
                **common,
            )
        )
    if comm.rank == 0:
        write_records(options.json, rows)


def main() -> None:
    """Start the ranks, print a table, and write the records."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", help="file for the records")
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        one(options)
        return
    records = run_on(options.ranks, "communication.py", "--one")
    print(format_table(records))
    if options.json:
        write_records(options.json, records)


if __name__ == "__main__":
    main()
