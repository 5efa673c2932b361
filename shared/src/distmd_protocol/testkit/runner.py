"""Run a function on several ranks and get every rank's result."""

from __future__ import annotations

import atexit
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from distmd_protocol.errors import ProtocolError
from distmd_protocol.testkit.errors import Failure, RanksFailed, RanksTimedOut
from distmd_protocol.testkit.pool import Pool

MAX_IDLE_RANKS = 16
"""Workers that are kept; the pool that was idle longest goes first."""


@dataclass(frozen=True)
class RankOutcome:
    """How a rank of its own process ended (``run_ranks(…, fresh=True)``).

    Attributes
    ----------
    rank
        The rank.
    result
        What the function returned, if it did.
    failure
        The exception, if it raised one; of the type ``"died"`` if the process ended without an answer.
    exit_code
        Exit code of the process, negative for a signal; under ``mpirun`` that of ``mpirun``.
    seconds
        Time from the start of the function until the process was gone.
    """

    rank: int
    result: Any
    failure: Failure | None
    exit_code: int | None
    seconds: float


class Pools:
    """The pools of this process, by launcher and size."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], Pool] = {}

    def get(self, launcher: str, size: int) -> Pool:
        """Return an idle pool, started if need be."""
        key = (launcher, size)
        pool = self._pools.pop(key, None)
        if pool is None:
            while self._pools and size + sum(other.size for other in self._pools.values()) > MAX_IDLE_RANKS:
                self._pools.pop(next(iter(self._pools))).close()
            pool = Pool(launcher, size)
        # Re-inserted at the end: the order is that of use.
        self._pools[key] = pool
        return pool

    def drop(self, launcher: str, size: int) -> None:
        """Close a pool."""
        pool = self._pools.pop((launcher, size), None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        """Close all pools."""
        for launcher, size in list(self._pools):
            self.drop(launcher, size)


_pools = Pools()
atexit.register(_pools.close)


def close_pools() -> None:
    """End all workers. The pytest plugin calls this at the end of the run."""
    _pools.close()


def run_ranks(
    fn: Callable[..., Any] | str,
    size: int,
    *args: Any,
    launcher: str = "local",
    timeout: float = 60.0,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(comm, *args, **kwargs)`` on every rank.

    Workers are kept for later calls with the same launcher and size, and replaced after a failure.

    Parameters
    ----------
    fn
        A function at the top level of an importable module, or ``"module:function"``.
    size
        Number of ranks.
    *args, **kwargs
        JSON-able arguments.
    launcher
        ``"local"`` (plain processes), ``"mpi"`` or ``"gloo"``.
    timeout
        Limit in seconds.
    fresh
        Use processes of their own for this call. An exception on a rank goes uncaught there, as in a real program.
    env
        Additions to the environment; with ``fresh`` only.

    Returns
    -------
    list
        Every rank's result, by rank; with ``fresh`` every rank's ``RankOutcome``.

    Raises
    ------
    RanksFailed
        If a rank raised or died (not with ``fresh``), or the ranks could not be started.
    RanksTimedOut
        If the limit passed, with every rank's stack. All ranks have been ended.
    LauncherUnavailable
        If this machine lacks what the launcher needs.
    """
    job = _job(fn, args, kwargs, timeout, fresh)
    what = f"{job['module']}:{job['name']} on {size} ranks ({launcher})"
    if fresh:
        return _run_fresh(job, what, launcher, size, timeout, env)
    if env:
        raise ProtocolError("env needs fresh=True: the workers of a pool have their environment already")
    pool = _pools.get(launcher, size)
    try:
        pool.submit(job)
        answers = pool.collect(timeout)
        _raise_failures(what, pool, answers, timeout)
    except BaseException:
        # A Ctrl-C leaves workers in the middle of something too.
        pool.broken = True
        raise
    finally:
        if pool.broken:
            _pools.drop(launcher, size)
    return [(answers[rank] or {})["result"] for rank in range(size)]


def _raise_failures(what: str, pool: Pool, answers: Mapping[int, dict[str, Any] | None], timeout: float) -> None:
    missing = [rank for rank in range(pool.size) if rank not in answers]
    stacks = pool.stacks() if missing else ""
    failures = [failure for rank in answers if (failure := _failure(rank, answers[rank])) is not None]
    if failures:
        failures.extend(Failure(rank, "no answer", "still waiting when another rank had failed") for rank in missing)
        raise RanksFailed(what, failures, "\n".join(filter(None, [stacks, pool.output()])))
    if missing:
        raise RanksTimedOut(what, timeout, missing, stacks, pool.output())


def _run_fresh(
    job: dict[str, Any], what: str, launcher: str, size: int, timeout: float, env: Mapping[str, str] | None
) -> list[RankOutcome]:
    pool = Pool(launcher, size, env)
    try:
        begin = time.monotonic()
        pool.submit(job)
        answers = pool.collect(timeout)
        answered_after = time.monotonic() - begin
        gone = pool.wait_for_the_end(max(1.0, timeout - answered_after)) if not _waiting(pool, answers) else {}
        if len(gone) < size:
            missing = [rank for rank in range(size) if rank not in gone]
            raise RanksTimedOut(what, timeout, missing, pool.stacks(), pool.output())
        codes = pool.exit_codes()
        return [
            RankOutcome(
                rank,
                (answers[rank] or {}).get("result"),
                _failure(rank, answers[rank]),
                codes[rank],
                answered_after + gone[rank],
            )
            for rank in range(size)
        ]
    finally:
        pool.broken = True
        pool.close()


def _waiting(pool: Pool, answers: Mapping[int, Any]) -> bool:
    return len(answers) < pool.size


def _failure(rank: int, answer: dict[str, Any] | None) -> Failure | None:
    if answer is None:
        return Failure(rank, "died", "the process ended without an answer")
    return Failure(rank, **answer["error"]) if "error" in answer else None


def _job(
    fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float, fresh: bool
) -> dict[str, Any]:
    file: str | None = None
    if isinstance(fn, str):
        module, _, name = fn.partition(":")
    else:
        module, name, file = fn.__module__, fn.__qualname__, inspect.getsourcefile(fn)
    if not name or "<" in name:
        raise ProtocolError(f"{fn!r} cannot be found by another process; use a function at the top level of a module")
    return {
        "module": module,
        "name": name,
        "file": file,
        "args": args,
        "kwargs": dict(kwargs),
        "sys_path": [folder for folder in sys.path if folder],
        "timeout": timeout,
        "fresh": fresh,
    }
