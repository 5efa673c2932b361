"""``agree`` and ``rank_zero`` for the checkpoint functions; a process alone gets its exception, not a list of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

from distmd_protocol import failures
from distmd_protocol.comm import Comm

P = ParamSpec("P")
T = TypeVar("T")


def together(comm: Comm, what: str) -> AbstractContextManager[None]:
    """Return ``agree(comm, what)`` for several ranks, and nothing for one."""
    return failures.agree(comm, what) if comm.size > 1 else nullcontext()


def on_rank_zero(comm: Comm, what: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``fn``'s result from rank zero for several ranks, and the plain call for one."""
    return failures.on_rank_zero(comm, what, fn, *args, **kwargs) if comm.size > 1 else fn(*args, **kwargs)
