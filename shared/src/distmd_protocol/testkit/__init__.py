"""Test kit for code that runs on several ranks: real processes, kept between tests, with a time limit on everything."""

from distmd_protocol.testkit.errors import Failure, LauncherUnavailable, RanksFailed, RanksTimedOut
from distmd_protocol.testkit.launchers import why_unavailable
from distmd_protocol.testkit.runner import RankOutcome, close_pools, run_ranks
from distmd_protocol.testkit.tolerances import TOL

__all__ = [
    "TOL",
    "Failure",
    "LauncherUnavailable",
    "RankOutcome",
    "RanksFailed",
    "RanksTimedOut",
    "close_pools",
    "run_ranks",
    "why_unavailable",
]
