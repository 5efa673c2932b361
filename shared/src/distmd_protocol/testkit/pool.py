"""A set of worker processes, one a rank, and the test process's side of talking to them."""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmd_protocol.testkit import launchers, wire
from distmd_protocol.testkit.errors import Failure, LauncherUnavailable, RanksFailed

_log = logging.getLogger(__name__)

START_WITHIN_S = 120.0
"""Limit for starting the workers of a pool: interpreter, imports, communicator."""
AFTER_FAILURE_S = 10.0
"""How long the other ranks may take to answer once one has failed."""
_LOG_CHARACTERS = 3000


@dataclass
class Rank:
    """The test process's view of a worker."""

    connection: socket.socket
    pid: int
    open: bool = True


class Pool:
    """Workers of one launcher and size. After a failure it is broken and must be closed."""

    def __init__(self, launcher: str, size: int, env: Mapping[str, str] | None = None) -> None:
        reason = launchers.why_unavailable(launcher)
        if reason is not None:
            raise LauncherUnavailable(reason)
        self.size = size
        self.broken = False
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=_short_temporary_folder()))
        self._address = str(self._folder / "control")
        self._ranks: dict[int, Rank] = {}
        self._unnamed: list[Rank] = []
        self._started = launchers.Started([], True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._address)
            listener.listen(size)
            command = ["-m", "distmd_protocol.testkit.worker", "--address", self._address]
            command += ["--factory", launchers.FACTORIES[launcher]]
            self._started = launchers.start(launcher, size, command, self._folder, env or {})
            self._meet(listener, time.monotonic() + START_WITHIN_S)
        except BaseException:
            self.kill()
            raise
        finally:
            listener.close()

    def submit(self, job: Mapping[str, Any]) -> None:
        """Hand a job to every rank."""
        for rank in self._ranks.values():
            with suppress(OSError):
                wire.send(rank.connection, job)

    def collect(self, timeout: float) -> dict[int, dict[str, Any] | None]:
        """Wait for the answers.

        Parameters
        ----------
        timeout
            Limit in seconds. Once a rank has failed, the others have ``AFTER_FAILURE_S`` left.

        Returns
        -------
        dict
            By rank: the answer, or ``None`` for a rank that died. A rank that has done neither is absent.
        """
        deadline = time.monotonic() + timeout
        answers: dict[int, dict[str, Any] | None] = {}
        with selectors.DefaultSelector() as selector:
            for number, rank in self._ranks.items():
                selector.register(rank.connection, selectors.EVENT_READ, number)
            while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    number = key.data
                    selector.unregister(key.fileobj)
                    answers[number] = self._answer(number)
                    if answers[number] is None or "error" in (answers[number] or {}):
                        self.broken = True
                        deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        self.broken = self.broken or len(answers) < self.size
        return answers

    def wait_for_the_end(self, timeout: float) -> dict[int, float]:
        """Wait until the workers have left by themselves; return when each left, in seconds from now, by rank."""
        begin = time.monotonic()
        left_at: dict[int, float] = {}
        with selectors.DefaultSelector() as selector:
            for number, rank in self._ranks.items():
                if rank.open:
                    selector.register(rank.connection, selectors.EVENT_READ, number)
                else:
                    left_at[number] = 0.0
            while selector.get_map() and (left := begin + timeout - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if self._answer(key.data) is None:
                        left_at[key.data] = time.monotonic() - begin
                        selector.unregister(key.fileobj)
        for process in self._started.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, begin + timeout - time.monotonic()))
        return left_at

    def exit_codes(self) -> list[int | None]:
        """Return the exit code by rank, negative for a signal; under ``mpirun`` that of ``mpirun`` for each."""
        codes = [process.poll() for process in self._started.processes]
        return codes if self._started.one_each else codes * self.size

    def stacks(self) -> str:
        """Return the stack of every thread of every rank that is still there."""
        for rank in self._everyone():
            if rank.open:
                with suppress(OSError):
                    os.kill(rank.pid, wire.STACK_SIGNAL)
        time.sleep(1.0)
        parts = []
        for number, rank in self._ranks.items():
            parts.append(f"--- stack of rank {number}, process {rank.pid}:")
            parts.append(_text(self._stack_file(rank)) if rank.open else "it has died")
        for rank in self._unnamed:
            parts.append(f"--- stack of process {rank.pid}, whose communicator was not ready:")
            parts.append(_text(self._stack_file(rank)))
        return "\n".join(parts)

    def output(self) -> str:
        """Return the end of what the workers wrote to stdout and stderr."""
        logs = sorted(self._folder.glob("output*.log"))
        return "\n".join(f"--- {log.stem}:\n{text}" for log in logs if (text := _text(log)[-_LOG_CHARACTERS:].strip()))

    def _stack_file(self, rank: Rank) -> Path:
        return Path(f"{self._address}.stack-{rank.pid}")

    def close(self) -> None:
        """Tell idle workers to leave; end those that do not."""
        if not self.broken:
            self.submit_stop()
            self.wait_for_the_end(10.0)
        self.kill()

    def submit_stop(self) -> None:
        """Tell the workers to leave."""
        for rank in self._ranks.values():
            with suppress(OSError):
                wire.send(rank.connection, None)

    def kill(self) -> None:
        """End every process of this pool, and what they started."""
        for rank in self._everyone():
            if rank.open:
                with suppress(OSError):
                    os.killpg(rank.pid, signal.SIGKILL)
            rank.connection.close()
            rank.open = False
        for process in self._started.processes:
            if not self._started.one_each:
                # mpirun removes its session files, and ranks that have not reported yet, when asked politely.
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(3.0)
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _everyone(self) -> list[Rank]:
        return [*self._ranks.values(), *self._unnamed]

    def _answer(self, number: int) -> dict[str, Any] | None:
        rank = self._ranks[number]
        try:
            answer: dict[str, Any] = wire.receive(rank.connection)
            return answer
        except EOFError:
            rank.open = False
            return None

    def _meet(self, listener: socket.socket, deadline: float) -> None:
        listener.settimeout(0.2)
        while len(self._unnamed) < self.size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                self._check_start(deadline)
                continue
            connection.settimeout(None)
            self._unnamed.append(Rank(connection, wire.receive(connection)["pid"]))
        while self._unnamed:
            rank = self._unnamed[0]
            rank.connection.settimeout(0.2)
            try:
                rank.connection.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                self._check_start(deadline)
                continue
            rank.connection.settimeout(None)
            hello = self._hello(rank)
            self._ranks[hello["rank"]] = self._unnamed.pop(0)
        self._ranks = dict(sorted(self._ranks.items()))
        if list(self._ranks) != list(range(self.size)):
            raise RanksFailed(f"starting {self.size} ranks gave ranks {list(self._ranks)}", [], self.output())

    def _hello(self, rank: Rank) -> dict[str, Any]:
        try:
            hello: dict[str, Any] = wire.receive(rank.connection)
        except EOFError:
            hello = {"failed": "it died"}
        if "failed" in hello:
            failure = Failure(-1, "died", "the communicator could not be made", hello["failed"])
            raise RanksFailed(f"starting {self.size} ranks", [failure], self.output())
        return hello

    def _check_start(self, deadline: float) -> None:
        gone = [process.pid for process in self._started.processes if process.poll() is not None]
        if gone:
            raise RanksFailed(f"starting {self.size} ranks: processes {gone} have ended", [], self.output())
        if time.monotonic() > deadline:
            text = f"starting {self.size} ranks took longer than {START_WITHIN_S:g} s\n{self.stacks()}"
            raise RanksFailed(text, [], self.output())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _short_temporary_folder() -> str | None:
    # The path of a Unix socket is limited to some 100 bytes.
    return "/tmp" if len(tempfile.gettempdir()) > 60 and os.path.isdir("/tmp") else None
