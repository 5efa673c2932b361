"""Failures reach every rank: no rank is left waiting in a collective that another never enters."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from distmd_protocol.comm import Comm, decode, encode
from distmd_protocol.errors import RankFailure, rank_error

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

# One byte before an encoded control object tells the other ranks what became of rank zero's work.
_VALUE = b"V"
_PATH = b"P"
_FAILED = b"F"

_ABORT_GRACE_S = 5.0


def describe(error: BaseException, rank: int) -> RankFailure:
    """Describe an exception so that it can travel."""
    return RankFailure(rank, type(error).__name__, str(error))


def rank_zero(comm: Comm, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``fn`` on rank zero alone and return its result on every rank. Collective.

    ``fn`` must not use ``comm``: the other ranks are already waiting for the outcome.

    Parameters
    ----------
    comm
        The communicator.
    fn
        Called as ``fn(*args, **kwargs)`` on rank zero. Its result is JSON-able, ``bytes``, ``None`` or a ``Path``;
        every rank, rank zero included, gets it as it arrives (tuples as lists).

    Raises
    ------
    RankError
        On every rank if ``fn`` raised or its result cannot travel. On rank zero the original is the cause. If the
        original was a ``CheckpointError``, ``AgreementError`` or ``UnitsError``, the error is one of these too.
    """
    what = f"rank zero's {getattr(fn, '__name__', type(fn).__name__)}"
    return on_rank_zero(comm, what, fn, *args, **kwargs)


def on_rank_zero(comm: Comm, what: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do what ``rank_zero`` does, with the work named in a user's words at the start of the message."""
    original: BaseException | None = None
    message = b""
    if comm.rank == 0:
        try:
            message = _pack(fn(*args, **kwargs))
        # Whatever it is, KeyboardInterrupt included, the others must hear of it before it goes on its way.
        except BaseException as error:  # noqa: BLE001
            original = error
            message = _FAILED + encode([type(error).__name__, str(error)])
    message = comm.broadcast(message)
    if message[:1] == _FAILED:
        if original is not None and not isinstance(original, Exception):
            raise original
        name, text = decode(message[1:])
        raise rank_error(what, [RankFailure(0, name, text)], comm.size) from original
    value = decode(message[1:])
    return Path(value) if message[:1] == _PATH else value  # type: ignore[return-value]


def _pack(value: Any) -> bytes:
    return _PATH + encode(os.fspath(value)) if isinstance(value, Path) else _VALUE + encode(value)


@contextmanager
def agree(comm: Comm, what: str = "the operation") -> Iterator[None]:
    """Leave a block on all ranks together: well, or with the same ``RankError`` that lists every failed rank.

    The block must not use ``comm``: a rank that fails goes straight to the exit of the block, where the ranks meet.

    Parameters
    ----------
    comm
        The communicator.
    what
        The work in a user's words; it starts the message.

    Raises
    ------
    RankError
        On every rank if any rank raised. On a failed rank its own exception is the cause.
    """
    original: BaseException | None = None
    try:
        yield
    # Raised again below, once the others know.
    except BaseException as error:  # noqa: BLE001
        original = error
    report = None if original is None else [type(original).__name__, str(original)]
    reports = comm.allgather(report)
    if original is not None and not isinstance(original, Exception):
        raise original
    failures = [RankFailure(rank, *report) for rank, report in enumerate(reports) if report is not None]
    if failures:
        raise rank_error(what, failures, comm.size) from original


def abort_on_uncaught(abort: Callable[[int], None]) -> None:
    """Install an exception hook that prints the traceback and then ends all ranks.

    Without it a rank that dies of an uncaught error leaves the others waiting in their next collective. Covers the
    main thread and others; a normal exit and ``sys.exit`` are left alone.

    Parameters
    ----------
    abort
        Called with the exit code 1. It ends the other ranks (``MPI_Abort``, aborting a process group). If it raises,
        returns, or takes longer than 5 s, this process ends by itself.
    """
    previous = sys.excepthook

    def leave() -> None:
        # A watchdog, because an abort that itself hangs would leave every rank where it is.
        watchdog = threading.Timer(_ABORT_GRACE_S, os._exit, args=(1,))
        watchdog.daemon = True
        watchdog.start()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        try:
            abort(1)
        finally:
            os._exit(1)

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            previous(kind, error, traceback)
        finally:
            leave()

    def thread_hook(info: threading.ExceptHookArgs) -> None:
        if info.exc_type is SystemExit:
            return
        try:
            threading.__excepthook__(info)
        finally:
            leave()

    sys.excepthook = hook
    threading.excepthook = thread_hook
    _log.debug("an uncaught error will end all ranks")
