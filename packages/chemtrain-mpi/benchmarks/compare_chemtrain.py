"""Both trainers in turn on the same problem: this one, and the published single-process trainer chemtrain 0.2.0.

    python compare_chemtrain.py [--json FILE] [--rounds 2] [--environment FOLDER] [--default-runtime]

The peer is installed from the package index into an environment of its own, which is kept (``build/peer-chemtrain``
of the repository): it needs an older jax than ours. It runs on the older of that jaxlib's two CPU runtimes, on which
its trajectories are three times as fast as on the default (``--default-runtime`` takes that). Each process is held to
one core; medians over updates, then over rounds. Where the peer cannot be installed the reason is printed, and its
anchor figures stand in for it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from difftre_lj125 import PEER, PEER_NAME

from distmd_protocol.testkit.benchmark import Record, format_table, write_records

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[2] / "build" / "peer-chemtrain"
# chemtrain 0.2.0 asks for jax and jaxlib of at most 0.4.37; these are the newest of each that exist and fit together.
REQUIREMENTS = ("chemtrain==0.2.0", "jax==0.4.37", "jaxlib==0.4.36", "jax-md==0.2.8", "setuptools<81")
PEER_RUNTIME = {"XLA_FLAGS": "--xla_cpu_use_thunk_runtime=false"}
LIMIT = 3600.0
KINDS = {
    "first-two": ("cpu_s", "wall_s", "peak_rss", "rss_before"),
    "recompute": ("cpu_s", "wall_s"),
    "reuse": ("cpu_s", "wall_s"),
}

Figures = dict[str, dict[str, float]]


class PeerUnavailable(Exception):
    """The peer's environment could not be made; the message is pip's."""


def peer_python(folder: Path) -> Path:
    """The interpreter of the peer's environment, which is made where it is not ready yet.

    Raises
    ------
    PeerUnavailable
        With what pip said last.
    """
    python, stamp = folder / "bin" / "python", folder / "ready.json"
    if stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8")) == list(REQUIREMENTS):
        return python
    print(f"installing {REQUIREMENTS[0]} into {folder}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *REQUIREMENTS],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env=clean(),
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    if done.returncode:
        raise PeerUnavailable(" ".join(errors) or done.stderr[-500:])
    stamp.write_text(json.dumps(list(REQUIREMENTS)), encoding="utf-8")
    return python


def clean() -> dict[str, str]:
    """The environment with one thread, and without paths to the packages of this repository."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return variables | {"NPROC": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}


def run(command: Sequence[str | Path], environment: dict[str, str]) -> Any:
    """What a script writes to its ``--json`` file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        subprocess.run(
            [*command, "--json", file], check=True, timeout=LIMIT, env=environment, stdout=subprocess.DEVNULL
        )
        return json.loads(file.read_text(encoding="utf-8"))


def ours(updates: int) -> tuple[Figures, dict[str, str]]:
    """Figures of this package, and versions."""
    script = [sys.executable, HERE / "difftre_lj125.py", "--updates", str(updates)]
    rows = run(script, os.environ | {"NPROC": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"})
    figures: Figures = {}
    for row in rows:
        figures.setdefault(row["work"].removeprefix("difftre-lj125-"), {})[row["metric"]] = row["value"]
    return figures, rows[0]["versions"]


def theirs(python: Path, updates: int, runtime: dict[str, str]) -> tuple[Figures, dict[str, str]]:
    """Figures of the peer, and versions."""
    answer = run([python, HERE / "_peer_chemtrain.py", "--updates", str(updates)], clean() | runtime)
    return answer["figures"], answer["versions"]


def medians(rounds: Sequence[Figures]) -> Figures:
    """Medians over rounds."""
    return {
        kind: {metric: statistics.median(figures[kind][metric] for figures in rounds) for metric in metrics}
        for kind, metrics in KINDS.items()
    }


def records(
    mine: Figures, versions: dict[str, str], peer: Figures | None, peer_versions: dict[str, str]
) -> list[Record]:
    """Our figures beside the peer's of the same run, or beside its anchor figures."""
    name = "chemtrain " + peer_versions["chemtrain"] + ", this run" if peer else PEER_NAME
    anchors = peer or {kind: {"cpu_s": PEER[kind]} for kind in KINDS} | {
        "first-two": {"cpu_s": PEER["first-two"], "peak_rss": PEER["peak_rss"]}
    }
    both = versions | {f"peer {key}": value for key, value in peer_versions.items()}
    result = []
    for kind, metrics in KINDS.items():
        for metric in metrics:
            anchor = anchors.get(kind, {}).get(metric)
            result.append(
                Record(
                    "chemtrain-mpi",
                    f"difftre-lj125-{kind}",
                    ranks=1,
                    dtype="float32",
                    metric=metric,
                    value=mine[kind][metric],
                    unit="MB" if "rss" in metric else "s",
                    anchor=None if anchor is None else name,
                    anchor_value=anchor,
                    versions=both,
                )
            )
    return result


def main() -> None:
    """Measure, print a table, and write the records."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", help="file for the records")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--updates", type=int, default=5)
    arguments.add_argument("--environment", type=Path, default=BUILD, help="folder of the peer's environment")
    arguments.add_argument("--default-runtime", action="store_true", help="the peer on its default CPU runtime")
    options = arguments.parse_args()
    try:
        python: Path | None = peer_python(options.environment)
    except PeerUnavailable as reason:
        python = None
        print(f"the peer cannot be installed, its anchor figures stand in: {reason}", flush=True)
    mine, peer = [], []
    versions: dict[str, str] = {}
    peer_versions: dict[str, str] = {}
    for _ in range(options.rounds):
        figures, versions = ours(options.updates)
        print(f"chemtrain-mpi: {figures}", flush=True)
        mine.append(figures)
        if python is not None:
            figures, peer_versions = theirs(python, options.updates, {} if options.default_runtime else PEER_RUNTIME)
            print(f"chemtrain: {figures}", flush=True)
            peer.append(figures)
    rows = records(medians(mine), versions, medians(peer) if peer else None, peer_versions)
    print(format_table(rows))
    if options.json:
        write_records(options.json, rows)


if __name__ == "__main__":
    main()
