"""Whether a model runs decomposed as it does on one process, and if not, where it begins to differ."""

from __future__ import annotations

from nvalchemi_distributed.validate.report import Attempt, Fault, FaultKind, TraceReport
from nvalchemi_distributed.validate.run import trace_and_validate

__all__ = ["Attempt", "Fault", "FaultKind", "TraceReport", "trace_and_validate"]
