"""What the kill −9 test runs on its ranks."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np

from distmd_protocol import save_checkpoint

ROWS = 120_000
KEEP = 2


def arrays_of(rank: int, step: int) -> dict[str, np.ndarray]:
    """Return several MB that any process can compute again."""
    rng = np.random.default_rng(1000 * step + rank)
    return {"x": rng.normal(size=(ROWS, 3)), "id": np.arange(ROWS) + step, "step": np.array(step)}


def write_until_killed(comm, folder: str, first: int, victim: int, after: float, replicated: bool) -> str:
    """Write one checkpoint after the other; one rank kills itself from a thread, wherever the write is by then."""
    if comm.rank == victim:
        timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    for step in range(first, first + 1000):
        # Steps are written over an old name now and then, so that the exchange of names is interrupted too.
        name = f"step-{step}" if step % 3 else "rolling"
        save_checkpoint(
            f"{folder}/{name}",
            arrays_of(comm.rank, step),
            kind="dynamics",
            step=step,
            comm=comm,
            replicated=replicated,
            wait=step % 2 == 0,
            keep_last=KEEP,
        ).wait()
        if comm.rank == 0:
            # What the test may rely on: written after the save has returned.
            with open(f"{folder}/returned.txt", "a", encoding="utf-8") as file:
                file.write(f"{step}\n")
    return "never killed"
