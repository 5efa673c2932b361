"""What a run of ranks can end in, beside a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distmd_protocol.errors import ProtocolError


@dataclass(frozen=True)
class Failure:
    """An exception on one rank: class name, text, formatted traceback. A rank that died has the type ``"died"``."""

    rank: int
    type: str
    message: str
    traceback: str = ""


class LauncherUnavailable(ProtocolError):
    """This machine cannot start ranks in the wanted way; the message says what is missing."""


class RanksFailed(ProtocolError):
    """An exception on one rank or more, or a rank that died.

    Attributes
    ----------
    failures
        One entry a failed rank.
    """

    def __init__(self, what: str, failures: Sequence[Failure], log: str = "") -> None:
        self.failures = tuple(sorted(failures, key=lambda failure: failure.rank))
        parts = [f"{what}: {len(self.failures)} ranks failed"]
        parts.extend(f"rank {f.rank}: {f.type}: {f.message}\n{f.traceback}".rstrip() for f in self.failures)
        super().__init__("\n".join([*parts, *([f"output:\n{log}"] if log else [])]))


class RanksTimedOut(ProtocolError):
    """The time limit passed before every rank had answered; the message holds each rank's stack.

    Attributes
    ----------
    missing
        Ranks that had not answered.
    """

    def __init__(self, what: str, timeout: float, missing: Sequence[int], stacks: str, log: str = "") -> None:
        self.missing = tuple(missing)
        text = f"{what}: no answer from ranks {list(missing)} within {timeout:g} s; all ranks were ended.\n{stacks}"
        super().__init__(text + (f"\noutput:\n{log}" if log else ""))
