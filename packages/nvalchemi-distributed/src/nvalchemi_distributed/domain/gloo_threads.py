"""Scheduling of the threads through which gloo receives, on Linux."""

from __future__ import annotations

import logging
import os
from pathlib import Path

_LOG = logging.getLogger(__name__)


def keep_behind_the_ranks() -> int:
    """Let the threads through which gloo receives wait until the thread that computes does.

    A message that arrives while a rank still holds the lock of that connection, at the end of its own send, wakes the
    receiving thread, which takes the core and tries the lock again and again until its time slice ends: milliseconds
    for a few bytes, wherever both have one core, as ranks bound to cores do. A thread of the class ``SCHED_BATCH`` is
    woken like any other but takes no core from one that runs. No privilege is needed. Threads of any other class than
    the default are left alone.

    Returns:
        How many threads were changed; 0 on other systems than Linux and where that is forbidden.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    changed = 0
    for thread in _threads():
        try:
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
                changed += 1
        except ProcessLookupError:
            continue  # It ended meanwhile.
        except PermissionError as error:
            _LOG.info("gloo's threads keep their scheduling class: %s; small messages may take milliseconds", error)
            break
    return changed


def _threads() -> list[int]:
    """This process's threads that gloo named so."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text(encoding="utf-8", errors="replace").strip() == "gloo_tcp_loop":
                found.append(int(task.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # It ended meanwhile.
    return found
