"""The problem of ``difftre_lj125.py`` on one and on two MPI ranks: CPU seconds a rank, wall seconds, speed-up.

    python ranks_lj125.py [--ranks 1 2] [--json FILE]

Starts ``mpirun`` itself, each rank held to one core. The speed-up is the ratio of wall seconds of an update; "rest" is
what lies between the phases that the trainer times itself; "communicating" includes waiting for the other rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

from distmd_protocol.testkit.benchmark import Record, format_table, write_records

HERE = Path(__file__).resolve().parent
LIMIT = 600.0
# Containers run as root; and waiting ranks must not take the core of one that works.
ENVIRONMENT = {
    "NPROC": "1",
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # The benchmark binds each rank itself.
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def run_on(ranks: int, script: str, *arguments: str) -> list[Record]:
    """Rank zero's records of a benchmark script under ``mpirun``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        raise SystemExit("there is no mpirun beside this Python or on the PATH; install an MPI")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        # A caller that holds itself to one core would hand that core to all ranks.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        command = [mpirun, "-np", str(ranks), sys.executable, str(HERE / script), "--json", str(file), *arguments]
        subprocess.run(command, check=True, timeout=LIMIT, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL)
        rows = json.loads(file.read_text(encoding="utf-8"))
    names = {field.name for field in fields(Record)}
    return [Record(**{name: value for name, value in row.items() if name in names}) for row in rows]


def speed_ups(records: list[Record]) -> list[Record]:
    """Wall seconds of one rank over those of several, of every kind of update."""
    walls = {(record.work, record.ranks): record for record in records if record.metric == "wall_s"}
    result = []
    for (work, ranks), record in walls.items():
        one = walls.get((work, 1))
        if ranks > 1 and one is not None and not work.endswith("first-two"):
            value = one.value / record.value
            common = {"ranks": ranks, "dtype": record.dtype, "versions": record.versions}
            result.append(
                Record(
                    "chemtrain-mpi",
                    work,
                    metric="speed_up",
                    value=value,
                    unit="",
                    anchor="ideal",
                    anchor_value=float(ranks),
                    **common,
                )
            )
    return result


def main() -> None:
    """Measure, print a table, and write the records."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", help="file for the records")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--updates", type=int, default=5)
    options = arguments.parse_args()
    records: list[Record] = []
    for ranks in options.ranks:
        records += run_on(ranks, "difftre_lj125.py", "--parallelism", "mpi", "--updates", str(options.updates))
    records += speed_ups(records)
    print(format_table(records))
    if options.json:
        write_records(options.json, records)


if __name__ == "__main__":
    main()
