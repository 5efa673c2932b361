"""Speed and memory of checkpoints beside safetensors alone and ``numpy.savez``.

    python checkpoint_io.py [--gigabytes 1] [--arrays 16] [--repeats 3] [--folder DIR] [--json FILE]

Every measurement runs in a process of its own, so that the peak memory is its own. All writers flush to the disk
(``fsync``), since a checkpoint must. Reading is from the page cache; "cold" caches need rights that a benchmark should
not have. Throughput is the best of the repeats: the machine's noise only ever slows down.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from distmd_protocol import load_checkpoint, save_checkpoint
from distmd_protocol.checkpoint import shard
from distmd_protocol.testkit.benchmark import Record, format_table, write_records

WRITERS = ("protocol", "protocol without hashing", "safetensors", "numpy.savez", "sha256")


def make_arrays(gigabytes: float, count: int) -> dict[str, np.ndarray]:
    """Return random float64 arrays of that size together."""
    rng = np.random.default_rng(0)
    length = int(gigabytes * 1e9 / 8 / count)
    return {f"array/{number}": rng.random(length) for number in range(count)}


def sync(path: Path) -> None:
    """Flush a file to the disk, as the protocol does."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_protocol(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a checkpoint."""
    save_checkpoint(folder / "checkpoint", arrays, kind="test", step=0)


def read_protocol(folder: Path) -> Any:
    """Read a checkpoint, verified."""
    return load_checkpoint(folder / "checkpoint").arrays


class NoDigest:
    """Stands in for ``hashlib.sha256`` and for the hashing thread, to show what hashing costs."""

    def __enter__(self) -> NoDigest:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, data: memoryview) -> list[str]:
        """Hash nothing."""
        return [self.hexdigest()]

    def update(self, data: memoryview) -> None:
        """Hash nothing."""

    def hexdigest(self) -> str:
        """Return the same for all."""
        return "0" * 64


def without_hashing(action: Callable[..., Any]) -> Callable[..., Any]:
    """Return the action with hashing switched off, for this process and for good."""

    def run(*arguments: Any) -> Any:
        shard.Hasher = NoDigest  # type: ignore[assignment,misc]
        shard.hashlib = type("NoHashlib", (), {"sha256": NoDigest})  # type: ignore[assignment]
        return action(*arguments)

    return run


def write_safetensors(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write with the library alone: no digests, no manifest."""
    from safetensors.numpy import save_file

    save_file(dict(arrays), folder / "plain.safetensors")
    sync(folder / "plain.safetensors")


def read_safetensors(folder: Path) -> Any:
    """Read with the library alone: nothing is verified."""
    from safetensors.numpy import load_file

    return load_file(folder / "plain.safetensors")


def write_savez(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an uncompressed npz (with CRC-32)."""
    np.savez(folder / "plain.npz", **{key.replace("/", "_"): value for key, value in arrays.items()})
    sync(folder / "plain.npz")


def read_savez(folder: Path) -> Any:
    """Read an npz."""
    with np.load(folder / "plain.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def hash_all(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Only hash: what SHA-256 alone costs on one core."""
    for array in arrays.values():
        hashlib.sha256(array.view(np.uint8).data).digest()


ACTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "protocol": (write_protocol, read_protocol),
    "protocol without hashing": (without_hashing(write_protocol), without_hashing(read_protocol)),
    "safetensors": (write_safetensors, read_safetensors),
    "numpy.savez": (write_savez, read_savez),
    "sha256": (hash_all, None),
}


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_seconds() -> float:
    """Return the processor time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(name: str, action: str, gigabytes: float, count: int, folder: Path) -> dict[str, float]:
    """Run one action once, in this process; the memory above what the arrays themselves take is reported."""
    write, read = ACTIONS[name]
    arrays = make_arrays(gigabytes, count) if action == "write" else {}
    size = int(gigabytes * 1e9 / 8 / count) * 8 * count
    before, cpu, begin = peak_bytes(), cpu_seconds(), time.perf_counter()
    if action == "write":
        write(folder, arrays)
    else:
        assert read is not None
        result = read(folder)
        assert sum(array.nbytes for array in result.values()) == size
    seconds = time.perf_counter() - begin
    # A reader's own arrays are counted in: what matters is how much more than them it needs.
    return {
        "gb_per_s": size / 1e9 / seconds,
        "cpu_s_per_gb": (cpu_seconds() - cpu) / (size / 1e9),
        "extra_memory": max(0.0, (peak_bytes() - before - (size if action == "read" else 0)) / size),
    }


def in_a_process(*arguments: str) -> dict[str, float]:
    """Run ``measure`` in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--one", *arguments], capture_output=True, check=True, timeout=600)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def run(gigabytes: float, count: int, repeats: int, folder: Path) -> list[Record]:
    """Measure everything in turn, round by round, so that a slow minute of the machine meets all."""
    best: dict[tuple[str, str], dict[str, float]] = {}
    for _ in range(repeats):
        for name in WRITERS:
            for action in ("write", "read"):
                if ACTIONS[name][action == "read"] is None:
                    continue
                found = in_a_process(name, action, str(gigabytes), str(count), str(folder))
                known = best.setdefault((name, action), found)
                for metric, choose in (("gb_per_s", max), ("cpu_s_per_gb", min), ("extra_memory", min)):
                    known[metric] = choose(known[metric], found[metric])
            # After each writer: replacing an earlier checkpoint would also be timed as its removal.
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return records(best, gigabytes)


def records(best: Mapping[tuple[str, str], Mapping[str, float]], gigabytes: float) -> list[Record]:
    """Return one record a number, each beside that of safetensors alone."""
    versions = {name: version(name) for name in ("numpy", "safetensors")}
    metrics = (("gb_per_s", "GB/s"), ("cpu_s_per_gb", "s/GB"), ("extra_memory", "of data"))
    result = []
    for (name, action), found in sorted(best.items(), key=lambda item: (item[0][1], WRITERS.index(item[0][0]))):
        for metric, unit in metrics:
            alone = name in ("safetensors", "sha256") or metric == "extra_memory"
            anchor = None if alone else best[("safetensors", action)][metric]
            result.append(
                Record(
                    name=name,
                    work="hash-only" if name == "sha256" else f"checkpoint-{action}-{gigabytes:g}GB",
                    ranks=1,
                    dtype="float64",
                    metric=metric,
                    value=found[metric],
                    unit=unit,
                    anchor=None if anchor is None else "safetensors",
                    anchor_value=anchor,
                    versions=versions,
                )
            )
    return result


def main() -> None:
    """Parse the command line, measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--arrays", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, action, gigabytes, count, folder = options.one
        print(json.dumps(measure(name, action, float(gigabytes), int(count), Path(folder))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = run(options.gigabytes, options.arrays, options.repeats, Path(folder))
    print(format_table(found))
    if options.json is not None:
        write_records(options.json, found)


if __name__ == "__main__":
    main()
