"""``trace_and_validate``: one process against several ranks, what differs, and what to do about it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distmd_protocol.testkit import RanksFailed, RanksTimedOut, run_ranks
from nvalchemi_distributed.adapters import MethodAdapter
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.hooks.neighbor_list import make_neighbors
from nvalchemi_distributed.models.base import BaseModelMixin
from nvalchemi_distributed.models.gradient import evaluate
from nvalchemi_distributed.neighbors.neighbor_list import NeighborList
from nvalchemi_distributed.presets import SPEC_MPNN_HALO
from nvalchemi_distributed.spec import MLIPSpec, OutputKind, OutputSpec, Reduce
from nvalchemi_distributed.transforms import GatherInputs
from nvalchemi_distributed.validate.compare import Difference, Run, first_difference, read_run, relative
from nvalchemi_distributed.validate.report import Attempt, Fault, FaultKind, TraceReport
from nvalchemi_distributed.validate.trace import recording
from nvalchemi_distributed.validate.worker import count_edges, save_batch, save_events

_WORKER = "nvalchemi_distributed.validate.worker:run"
_MOST_ATTEMPTS = 6
_MOST_CALLS = 40


def trace_and_validate(
    model_factory: Callable[[], BaseModelMixin],
    sample_batch: Batch,
    *,
    world_size: int = 2,
    spec: MLIPSpec | None = None,
    atol: float = 0.0,
    rtol: float = 1e-6,
    skin: float = 0.0,
    seed: int = 0,
    timeout: float = 120.0,
    fix: bool = True,
) -> TraceReport:
    """Run a model on one process and on ``world_size`` gloo ranks of this machine, and compare every active output.

    Where they differ the report names the first operation and module that does, the edges that are missing, outputs
    that are summed twice or not at all, helpers and operations that need an adapter; and a few changes of the spec are
    tried.

    Args:
        model_factory: makes the wrapper, equal weights every time (``seed`` is set before it is called); a function at
            the top level of a module or script, since each rank imports it.
        sample_batch: a small system, long enough that a rank does not see all of it.
        world_size: ranks.
        spec: the declaration to try; the wrapper's own, or :data:`SPEC_MPNN_HALO`, when left out.
        atol: allowed absolute deviation.
        rtol: allowed deviation relative to an output's largest value.
        skin: Å, of the neighbour list.
        seed: for ``torch.manual_seed`` before the factory.
        timeout: seconds for an attempt, after which all ranks are ended.
        fix: try changes of the spec.

    Raises:
        ModelError: a factory that ranks cannot import, or a model without an active output.
    """
    torch.manual_seed(seed)
    model = model_factory()
    declared = spec or model.distribution_spec or SPEC_MPNN_HALO
    job = _Job(model, _located(model_factory), sample_batch, world_size, atol, rtol, skin, seed, timeout)
    attempts: list[Attempt] = []
    with tempfile.TemporaryDirectory(prefix="validate-") as name:
        job.prepare(Path(name))
        attempts.append(job.attempt(declared, "as declared", 0.0))
        tried = {(declared.to_json(), 0.0)}
        while fix and not attempts[-1].ok and len(attempts) < _MOST_ATTEMPTS:
            change = next((c for c in _changes(attempts, job) if (c[0].to_json(), c[2]) not in tried), None)
            if change is None:
                break
            tried.add((change[0].to_json(), change[2]))
            attempts.append(job.attempt(*change))
    return _report(attempts, world_size)


class _Job:
    """The reference, and how one spec is tried."""

    def __init__(
        self,
        model: BaseModelMixin,
        factory: list[Any],
        batch: Batch,
        size: int,
        atol: float,
        rtol: float,
        skin: float,
        seed: int,
        timeout: float,
    ) -> None:
        self.model, self.factory, self.size, self.timeout = model, factory, size, timeout
        self.atol, self.rtol, self.skin, self.seed = atol, rtol, skin, seed
        self.batch = batch.clone()
        if self.batch.atom_id is None:
            self.batch.atom_id = torch.arange(self.batch.num_nodes)
        for name in model.model_config.outputs:
            if name != "forces":
                self.batch.discard(name)
        self.edges = 0
        self.folder = Path()

    def prepare(self, folder: Path) -> None:
        """Run one process and write down what it computed."""
        self.folder = folder
        save_batch(folder / "batch.npz", self.batch)
        single = self.batch.clone()
        for name, value in self.model.system_fields(single).items():
            single.add_key(name, value, level="system", overwrite=True)
        config = self.model.neighbor_config
        if config is not None:
            b = single
            b.neighbors = make_neighbors(config, b.positions, b.cell, b.pbc, b.batch_idx, config.cutoff + self.skin)
            if isinstance(b.neighbors, NeighborList):
                self.edges = count_edges(b.neighbors, b.positions, b.cell, b.batch_idx, config.cutoff)
        with recording(self.model) as recorder:  # type: ignore[arg-type]
            outputs = evaluate(self.model, single)
        if not outputs:
            raise ModelError(f"{type(self.model).__name__} has no active output; there is nothing to compare")
        extra = {"ids": single.atom_id, "batch_idx": single.batch_idx}
        extra |= {f"output/{k}": v for k, v in outputs.items()}
        save_events(folder / "one.npz", recorder.events, extra)

    def attempt(self, spec: MLIPSpec, rule: str, extra_width: float) -> Attempt:
        """Try one spec on the ranks."""
        begin = time.monotonic()
        for old in self.folder.glob("error*.json"):
            old.unlink()
        config = self.model.neighbor_config
        settings = {
            "skin": self.skin,
            "seed": self.seed,
            "extra_width": extra_width,
            "cutoff": config.cutoff if config else 1.0,
        }
        made: dict[str, Any] = {"spec": spec, "rule": rule, "ok": False}
        try:
            results = run_ranks(
                _WORKER,
                self.size,
                str(self.folder),
                self.factory,
                spec.to_json(),
                settings,
                launcher="gloo",
                timeout=self.timeout,
            )
        except RanksTimedOut as error:
            fault = Fault(
                FaultKind.HANG,
                f"ranks {list(error.missing)}",
                _where_ranks_are(str(error)),
                "look at the stacks: ranks entered different operations, or the limit is too short",
            )
            return Attempt(**made, faults=(fault,), seconds=time.monotonic() - begin)
        except RanksFailed as error:
            return Attempt(**made, faults=(self._failure(error),), seconds=time.monotonic() - begin)
        told = next((r["error"] for r in results if "error" in r), None)
        if told is not None:
            return Attempt(**made, faults=(_told(told),), seconds=time.monotonic() - begin)
        one = read_run(self.folder / "one.npz")
        ranks = [read_run(self.folder / f"rank{r}.npz", results[r]["n_owned"]) for r in range(self.size)]
        edges = (self.edges, sum(r["edges"] for r in results))
        rows = tuple((r["n_owned"], r["n_ghost"]) for r in results)
        gaps, faults = self._outputs(one, ranks, spec)
        if edges[0] != edges[1]:
            faults.append(
                Fault(
                    FaultKind.MISSING_EDGES,
                    "the neighbour list",
                    f"{edges[0]} edges on one process, {edges[1]} on the ranks",
                    "widen DomainConfig.ghost_width",
                )
            )
        wrong = [k for k, v in gaps.items() if v > self.rtol]
        if wrong:
            # Rounding grows along a forward; ten times finer than what the outputs are held to finds its origin.
            difference = first_difference(one, ranks, min(self.rtol, max(self.rtol / 10, 1e-9)))
            if difference is not None:
                faults.append(_named(difference, wrong))
        return Attempt(
            **made | {"ok": not wrong and not faults},
            deviations=gaps,
            edges=edges,
            rows=rows,
            faults=tuple(faults),
            seconds=time.monotonic() - begin,
        )

    def _outputs(self, one: Run, ranks: list[Run], spec: MLIPSpec) -> tuple[dict[str, float], list[Fault]]:
        gaps: dict[str, float] = {}
        faults: list[Fault] = []
        order = np.argsort(one.extra["ids"])
        for key in sorted(k for k in one.extra if k.startswith("output/")):
            name, expected = key.removeprefix("output/"), one.extra[key]
            missing = [r for r, run in enumerate(ranks) if key not in run.extra]
            if missing:
                gaps[name] = float("inf")
                continue
            if spec.outputs[name].kind is OutputKind.PER_NODE:
                ids = np.concatenate([r.extra["ids"][: r.n_owned] for r in ranks])
                got = np.concatenate([r.extra[key] for r in ranks])[np.argsort(ids)]
                gaps[name] = relative(got, expected[order], self.atol)
                continue
            values = [r.extra[key] for r in ranks]
            gaps[name] = max(relative(v, expected, self.atol) for v in values)
            if gaps[name] <= self.rtol:
                continue
            if max(relative(v / self.size, expected, self.atol) for v in values) <= self.rtol:
                faults.append(
                    Fault(
                        FaultKind.SUMMED_TWICE,
                        name,
                        f"{name} is {self.size} times that of one process, the number of ranks",
                        f"declare {name} OutputSpec(OutputKind.GLOBAL)",
                    )
                )
            elif relative(np.sum([v.astype(np.float64) for v in values], axis=0), expected, self.atol) <= self.rtol:
                faults.append(
                    Fault(
                        FaultKind.NOT_SUMMED,
                        name,
                        f"the ranks' values of {name} add up to that of one process: {name} is not summed",
                        f"declare {name} OutputSpec(OutputKind.PER_GRAPH)",
                    )
                )
        return gaps, faults

    def _failure(self, error: RanksFailed) -> Fault:
        """What a rank raised, with the place in the model's code."""
        found = sorted(self.folder.glob("error*.json"))
        if not found:
            first = error.failures[0] if error.failures else None
            message = f"{first.type}: {first.message}" if first else str(error)
            return Fault(FaultKind.ERROR, "the ranks", message[:2000], "read the message; the model itself did not run")
        return _told(json.loads(found[0].read_text(encoding="utf-8")))


def _where_ranks_are(text: str) -> str:
    """The calls of every rank's main thread, torch's own left out but for the innermost, from a timeout's message."""
    first, *stacks = text.split("--- stack of ")
    parts = [first.rstrip()]
    for stack in stacks:
        rank, _, threads = stack.partition("\n")
        # The main thread is written last.
        calls = re.findall(r'File ".*', re.split("(?:Current t|T)hread 0x", threads)[-1])
        calls = calls[:1] + [call for call in calls[1:] if "/torch/" not in call and "<frozen" not in call]
        parts.extend([f"--- {rank.rstrip(':')}, most recent call first:", *calls[:_MOST_CALLS]])
    return "\n".join(parts)


def _told(told: dict[str, str]) -> Fault:
    """The fault that an error in the model's code is."""
    kind, message, where = told["type"], f"{told['type']}: {told['message']}", told["where"]
    place = f"{told['module'] or 'the wrapper'} at {where}"
    outputs = re.match(r"(\w+) is declared", told["message"])
    if kind == "SummedTwiceError" and outputs:
        return Fault(FaultKind.SUMMED_TWICE, outputs[1], message, f"declare {outputs[1]} OutputSpec(OutputKind.GLOBAL)")
    if kind == "NotSummedError" and outputs:
        return Fault(
            FaultKind.NOT_SUMMED, outputs[1], message, f"declare {outputs[1]} OutputSpec(OutputKind.PER_GRAPH)"
        )
    if kind == "UnsupportedRowOp":
        function = where.rpartition(" ")[2]
        if "." not in function:
            # Not a method: a helper that the model calls.
            target = f"{Path(where.partition(':')[0]).stem}:{function}"
            return Fault(
                FaultKind.HELPER,
                f"{function} ({place})",
                message,
                f"add FunctionAdapter('{target}', …) with transforms or a replacement",
            )
        op = told["message"].partition(": ")[0]
        return Fault(FaultKind.UNSUPPORTED_OP, f"{op} in {place}", message, "see the message: to_local() or an adapter")
    if kind in ("ModelError", "AdapterError", "ConfigError"):
        return Fault(FaultKind.BAD_SPEC, place, message, "mend the spec as the message says")
    return Fault(FaultKind.ERROR, place, message, "the model runs on one process but not here: see the message")


def _named(difference: Difference, outputs: list[str]) -> Fault:
    where = f"{difference.what} in {difference.module or 'the wrapper'} at {difference.caller or 'its call'}"
    seen = f"{', '.join(outputs)} differ; the first to differ is {where}, by {difference.gap:.1e}"
    if difference.stale:
        return Fault(
            FaultKind.STALE_INPUT,
            difference.stale[0].rpartition(" of ")[2],
            f"{seen}; ghost rows are out of date in {'; '.join(difference.stale)}",
            "refresh that argument: MethodAdapter(…, transforms=(GatherInputs(…),))",
        )
    return Fault(
        FaultKind.DIVERGES, where, seen, "look at what this line assumes about rows: all atoms, or their order"
    )


def _changes(attempts: list[Attempt], job: _Job) -> Iterator[tuple[MLIPSpec, str, float]]:
    """Specs worth trying after the last attempt: (spec, what was changed, extra ghost width)."""
    last, declared = attempts[-1], attempts[0].spec
    for fault in last.faults:
        if fault.kind is FaultKind.SUMMED_TWICE:
            yield _with_output(last.spec, fault.where, OutputSpec(OutputKind.GLOBAL)), f"{fault.where} is GLOBAL", 0.0
        elif fault.kind is FaultKind.NOT_SUMMED:
            summed = OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)
            yield _with_output(last.spec, fault.where, summed), f"{fault.where} is PER_GRAPH, ALL_REDUCE", 0.0
        elif fault.kind is FaultKind.STALE_INPUT:
            found = re.search(r"out of date in argument (\S+)(?: key (\S+))? of (\S+?)(?:;|$)", fault.message)
            if found:
                at: str | int = int(found[1]) if found[1].isdigit() else found[1].strip("'")
                adapter = MethodAdapter(found[3], transforms=(GatherInputs(at, found[2] and found[2].strip("'")),))
                changed = dataclasses.replace(last.spec.distribution, adapters=(adapter,))
                rule = f"{last.rule} + " if last.rule.startswith("MethodAdapter") else ""
                yield (
                    dataclasses.replace(last.spec, distribution=changed),
                    f"{rule}MethodAdapter({found[3]!r}, GatherInputs({at!r}))",
                    0.0,
                )
        elif fault.kind in (FaultKind.DIVERGES, FaultKind.MISSING_EDGES):
            yield dataclasses.replace(declared, hops=declared.hops + 1), f"hops={declared.hops + 1}", 0.0
            config = job.model.neighbor_config
            if config is not None:
                yield declared, "a ghost region one cutoff wider", config.cutoff


def _with_output(spec: MLIPSpec, name: str, output: OutputSpec) -> MLIPSpec:
    return dataclasses.replace(spec, outputs={**spec.outputs, name: output})


def _report(attempts: list[Attempt], size: int) -> TraceReport:
    first, last = attempts[0], attempts[-1]
    if first.ok:
        return TraceReport(True, first.spec, tuple(attempts), None, "save the spec: report.spec.save(path)", size)
    if last.ok and last.rule == "a ghost region one cutoff wider":
        found = Fault(
            FaultKind.MISSING_EDGES,
            "the model",
            "it agrees with a ghost region one cutoff wider: it "
            "reads atoms beyond the cutoff it declares, whose edges are missing",
            "declare the cutoff it really reads to",
        )
        attempts = [dataclasses.replace(first, faults=(found, *first.faults)), *attempts[1:]]
        return TraceReport(False, first.spec, tuple(attempts), None, f"{found.message}; {found.remedy}", size)
    if last.ok:
        if last.rule.startswith("hops="):
            found = Fault(
                FaultKind.MISSING_EDGES,
                "the ghost region",
                f"it agrees with {last.rule}: the ghost region "
                f"is too thin for {first.spec.hops} hop(s), edges that ghosts receive are missing",
                f"declare {last.rule}, or refresh ghosts between layers",
            )
            attempts = [dataclasses.replace(first, faults=(found, *first.faults)), *attempts[1:]]
        action = f"use report.spec, which differs from the declared one by: {last.rule}; then save it"
        return TraceReport(True, last.spec, tuple(attempts), last.rule, action, size)
    fault = (first.faults or last.faults or (Fault(FaultKind.ERROR, "", "nothing was found", "run with more atoms"),))[
        0
    ]
    return TraceReport(
        False, first.spec, tuple(attempts), None, f"{fault.kind.value} in {fault.where}: {fault.remedy}", size
    )


def _located(factory: Callable[..., Any]) -> list[Any]:
    name = getattr(factory, "__qualname__", "")
    if not name or "<" in name or "." in name:
        raise ModelError(f"{factory!r} cannot be imported by a rank; give a function at the top level of a module")
    return [factory.__module__, name, inspect.getsourcefile(factory)]
