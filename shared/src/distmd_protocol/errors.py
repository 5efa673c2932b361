"""Every error this package raises on purpose, and the one warning class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ProtocolError(Exception):
    """Base of all errors of the protocol. The message says what is wrong, with the figures, and the remedy."""


class CheckpointError(ProtocolError):
    """A checkpoint cannot be written, found, read or restored into the given template."""


class AgreementError(ProtocolError):
    """Ranks differ in something that they must share (versions, dtype settings, arguments)."""


class UnitsError(ProtocolError):
    """An unknown unit, or a conversion that has no meaning."""


class AliasClashError(ProtocolError):
    """A module name that was to stand for ours belongs to a package that is installed or imported."""


class PrecisionWarning(UserWarning):
    """Reduced arithmetic precision is in force, or differs from the one under which a state was written."""


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank.

    Parameters
    ----------
    rank
        Rank in the communicator of the operation.
    type
        Class name of the original exception.
    message
        Its text.
    """

    rank: int
    type: str
    message: str


class RankError(ProtocolError):
    """The same error on every rank, naming each rank that failed.

    Attributes
    ----------
    failures
        One entry a failed rank, by rank.
    what
        The operation that failed.
    """

    def __init__(self, what: str, failures: Sequence[RankFailure], size: int) -> None:
        self.what = what
        self.failures = tuple(sorted(failures, key=lambda failure: failure.rank))
        self.size = size
        listed = "; ".join(f"rank {f.rank}: {f.type}: {f.message}" for f in self.failures)
        super().__init__(f"{what} failed on {len(self.failures)} of {size} ranks: {listed}")


class RankCheckpointError(RankError, CheckpointError):
    """A ``RankError`` in which every rank's failure was a ``CheckpointError``."""


class RankAgreementError(RankError, AgreementError):
    """A ``RankError`` in which every rank's failure was an ``AgreementError``."""


class RankUnitsError(RankError, UnitsError):
    """A ``RankError`` in which every rank's failure was a ``UnitsError``."""


_SAME_TYPE = {
    "CheckpointError": RankCheckpointError,
    "RankCheckpointError": RankCheckpointError,
    "AgreementError": RankAgreementError,
    "RankAgreementError": RankAgreementError,
    "UnitsError": RankUnitsError,
    "RankUnitsError": RankUnitsError,
}


def rank_error(what: str, failures: Sequence[RankFailure], size: int) -> RankError:
    """Build the ``RankError`` whose class also tells the common type of the failures, where they have one."""
    types = {_SAME_TYPE.get(failure.type, RankError) for failure in failures}
    return (types.pop() if len(types) == 1 else RankError)(what, failures, size)
