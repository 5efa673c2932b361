"""SHA-256 in a thread of its own, beside the thread that moves the bytes."""

from __future__ import annotations

import hashlib
import queue
import threading
from types import TracebackType

INLINE_BYTES = 256 * 1024
"""Below this size handing over costs more than hashing."""


class Hasher:
    """Hashes what it is given, in order, while the caller goes on. ``hashlib`` releases the interpreter lock.

    Not a ``ThreadPoolExecutor``: that refuses work once the interpreter is shutting down, which is just when the last
    checkpoint of a program may still be on its way to the disk.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[memoryview, list[str]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._inline = False

    def submit(self, data: memoryview) -> list[str]:
        """Return a list that holds the digest once the ``with`` block is left."""
        result: list[str] = []
        if len(data) < INLINE_BYTES or not self._started():
            result.append(digest(data))
        else:
            self._work.put((data, result))
        return result

    def _started(self) -> bool:
        if self._thread is None and not self._inline:
            thread = threading.Thread(target=self._run, name="checkpoint-sha256")
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:
                # The interpreter is shutting down and starts no more threads.
                self._inline = True
        return self._thread is not None

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            data, result = item
            result.append(digest(data))

    def __enter__(self) -> Hasher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()


def digest(data: memoryview | bytes) -> str:
    """Return the SHA-256 of some bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
