"""What a validation found, in words and as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from nvalchemi_distributed.spec import MLIPSpec


class FaultKind(StrEnum):
    """What is wrong. ``DIVERGES``: values differ, first at the place named. ``STALE_INPUT``: a module reads ghost rows
    that are out of date. ``MISSING_EDGES``: the ghost region is too thin for what the model reads. ``SUMMED_TWICE``: an
    output is the number of ranks too large. ``NOT_SUMMED``: an output is one rank's part. ``HELPER``: a function that
    the model calls needs an adapter. ``UNSUPPORTED_OP``: an operation without a declared meaning. ``BAD_SPEC``: the
    declaration does not fit what the model gives. ``HANG``: ranks did not answer in time. ``ERROR``: any other."""

    DIVERGES = "diverges"
    STALE_INPUT = "stale_input"
    MISSING_EDGES = "missing_edges"
    SUMMED_TWICE = "summed_twice"
    NOT_SUMMED = "not_summed"
    HELPER = "helper"
    UNSUPPORTED_OP = "unsupported_op"
    BAD_SPEC = "bad_spec"
    HANG = "hang"
    ERROR = "error"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        kind: see :class:`FaultKind`.
        where: the output, module, operation or function.
        message: what was seen, with numbers.
        remedy: what to do.
    """

    kind: FaultKind
    where: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Attempt:
    """One spec that was tried.

    Attributes:
        spec: the declaration.
        rule: what was changed in it; "as declared" for the first.
        ok: whether every output agrees.
        deviations: of each output, relative to its largest value.
        edges: directed edges within the model's cutoff on one process, and summed over ranks.
        rows: owned atoms and ghosts of each rank.
        faults: what was found.
        seconds: it took.
    """

    spec: MLIPSpec
    rule: str
    ok: bool
    deviations: Mapping[str, float] = field(default_factory=dict)
    edges: tuple[int, int] = (0, 0)
    rows: tuple[tuple[int, int], ...] = ()
    faults: tuple[Fault, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class TraceReport:
    """Whether a model runs decomposed as it does on one process.

    Attributes:
        ok: every output agrees within the tolerances, with ``spec``.
        spec: the declaration that works; the first one when none does.
        attempts: what was tried, in order.
        fix_applied: what was changed in the declared spec, or ``None``.
        next_action: one sentence.
        world_size: ranks.
    """

    ok: bool
    spec: MLIPSpec
    attempts: tuple[Attempt, ...]
    fix_applied: str | None
    next_action: str
    world_size: int

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Those of the spec as it was declared."""
        return self.attempts[0].faults

    @property
    def log_summary(self) -> str:
        """A few lines for a log."""
        lines = [f"{'PASS' if self.ok else 'FAIL'} on {self.world_size} ranks, {len(self.attempts)} attempts"]
        for a in self.attempts:
            gaps = ", ".join(f"{k} {v:.1e}" for k, v in a.deviations.items())
            lines.append(f"  {a.rule}: {'ok' if a.ok else 'not ok'} ({gaps or 'no outputs'}; {a.seconds:.1f} s)")
            lines += [f"    {f.kind.value} in {f.where}: {f.message}" for f in a.faults]
        return "\n".join([*lines, f"  next: {self.next_action}"])

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; specs as in :meth:`MLIPSpec.to_json`."""
        return {
            "ok": self.ok,
            "world_size": self.world_size,
            "fix_applied": self.fix_applied,
            "next_action": self.next_action,
            "log_summary": self.log_summary,
            "spec": json.loads(self.spec.to_json()),
            "attempts": [
                {
                    "rule": a.rule,
                    "ok": a.ok,
                    "deviations": dict(a.deviations),
                    "edges": list(a.edges),
                    "rows": [list(r) for r in a.rows],
                    "faults": [asdict(f) for f in a.faults],
                    "seconds": a.seconds,
                    "spec": json.loads(a.spec.to_json()),
                }
                for a in self.attempts
            ],
        }

    def save(self, path: str | Path) -> Path:
        """Write the report as JSON. Returns the path."""
        path = Path(path)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return path
