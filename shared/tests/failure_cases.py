"""Bodies of the failure tests. Each takes a communicator first, so that they run over any launcher.

The functions named ``uncaught_…`` and ``killed`` are for ``run_ranks(…, fresh=True)``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from distmd_protocol import AgreementError, CheckpointError, RankError, agree, rank_zero

LIMIT_S = 10.0


def _report(comm, begin, error):
    """Return what a test compares between ranks."""
    return {
        "rank": comm.rank,
        "class": type(error).__name__,
        "text": str(error),
        "failures": [[failure.rank, failure.type, failure.message] for failure in error.failures],
        "cause": type(error.__cause__).__name__,
        "seconds": time.monotonic() - begin,
        # The communicator must be usable afterwards.
        "after": comm.allgather(comm.rank),
    }


def agree_raises_on(comm, failing):
    """Raise on the given ranks inside ``agree``."""
    begin = time.monotonic()
    try:
        with agree(comm, "the list build"):
            if comm.rank in failing:
                raise ValueError(f"no luck on {comm.rank}")
    except RankError as error:
        return _report(comm, begin, error)
    return "no error"


def agree_is_quiet(comm):
    """Leave ``agree`` well."""
    with agree(comm, "nothing"):
        value = comm.rank
    return [value, comm.allgather(value)]


def rank_zero_raises(comm, kind):
    """Raise on rank zero inside ``rank_zero``."""
    kinds = {"OSError": OSError, "CheckpointError": CheckpointError, "AgreementError": AgreementError}

    def write():
        raise kinds[kind]("the disk is full")

    begin = time.monotonic()
    try:
        rank_zero(comm, write)
    except RankError as error:
        report = _report(comm, begin, error)
        report["is_checkpoint_error"] = isinstance(error, CheckpointError)
        return report
    return "no error"


def rank_zero_returns(comm):
    """Return each kind of result from rank zero."""
    ran = []

    def work(value):
        ran.append(comm.rank)
        return value

    results = [rank_zero(comm, work, value) for value in (None, 3, "x", {"a": [1, 2]}, (1, 2), 0.1)]
    path = rank_zero(comm, work, Path("a") / "b")
    data = rank_zero(comm, work, value=b"\x00\xff")
    return {
        "results": results,
        "path": [type(path).__name__ in ("PosixPath", "WindowsPath"), str(path)],
        "bytes": [isinstance(data, bytes), list(data)],
        "ran": sorted(set(ran)),
    }


def rank_zero_returns_nonsense(comm):
    """Return what cannot travel."""
    begin = time.monotonic()
    try:
        rank_zero(comm, object)
    except RankError as error:
        return _report(comm, begin, error)
    return "no error"


def uncaught_on(comm, failing):
    """Raise on one rank while the others wait in a collective."""
    comm.barrier()
    if comm.rank == failing:
        raise ValueError(f"uncaught on rank {failing}")
    comm.barrier()
    comm.barrier()
    return "not reached"


def killed(comm, failing):
    """Kill one rank with −9 while the others wait in a collective."""
    comm.barrier()
    if comm.rank == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
    return "not reached"


def interrupted_in_agree(comm):
    """Let rank zero get a Ctrl-C inside ``agree``: it keeps its own exception, the others hear of it."""
    begin = time.monotonic()
    try:
        with agree(comm, "a long step"):
            if comm.rank == 0:
                raise KeyboardInterrupt
    except RankError as error:
        return _report(comm, begin, error)
    except KeyboardInterrupt:
        comm.allgather(comm.rank)
        return "KeyboardInterrupt"
    return "no error"
