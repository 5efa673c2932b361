"""Each fault is put into a model and must be named by the report."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from shard_models import CUTOFF, Mpnn, MpnnWrapper, OwnedEnergyWrapper
from systems import random_system

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import (
    SPEC_MPNN_HALO,
    DistributionSpec,
    MLIPSpec,
    OutputKind,
    OutputSpec,
    Reduce,
    current_dd_context,
    system_sum,
)
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.validate import FaultKind, trace_and_validate

pytestmark = pytest.mark.gloo


def sample():
    return Batch.from_data_list([random_system(8, sites=(14, 3, 3), tilt=0.2)])


def good():
    return MpnnWrapper(Mpnn(2))


def check(factory, **kw):
    return trace_and_validate(factory, sample(), rtol=1e-8, timeout=60, **kw)


def test_a_good_model_passes(tmp_path):
    report = check(good)
    assert report.ok, report.log_summary
    assert len(report.attempts) == 1
    assert report.fix_applied is None
    assert max(report.attempts[0].deviations.values()) < 1e-10
    assert set(report.attempts[0].deviations) == {"energy", "forces", "virial", "stress"}
    reference, decomposed = report.attempts[0].edges
    assert reference == decomposed > 0
    total = sum(owned for owned, _ in report.attempts[0].rows)
    assert all(owned + ghosts < total for owned, ghosts in report.attempts[0].rows)
    saved = json.loads(report.save(tmp_path / "report.json").read_text())
    assert saved["ok"] is True
    assert MLIPSpec.from_json(json.dumps(saved["spec"])) == report.spec == SPEC_MPNN_HALO
    assert MLIPSpec.load(report.spec.save(tmp_path / "spec.json")) == report.spec
    assert "PASS on 2 ranks" in report.log_summary


def plain_layers():
    """Layers read each other's ghosts, and nothing refreshes them."""
    spec = dataclasses.replace(SPEC_MPNN_HALO, distribution=DistributionSpec(shard_tensors=False))
    return OwnedEnergyWrapper(Mpnn(3), spec)


def test_stale_ghosts_are_found_layer_by_layer_and_mended():
    report = check(plain_layers)
    first = report.faults[0]
    assert first.kind is FaultKind.STALE_INPUT
    assert first.where == "model.layers.1"
    assert "argument 0 of model.layers.1" in first.message
    assert "in model.layers.1 at" in first.message
    assert "shard_models.py" in first.message
    assert report.ok, report.log_summary
    assert "model.layers.1" in report.fix_applied
    assert "model.layers.2" in report.fix_applied
    assert len(report.spec.distribution.third_party_helpers) == 2


class Opaque(torch.nn.Module):
    """Two layers in one function: no module between them that could be refreshed."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x, receivers, senders, shifts, n):
        d = x[senders] + shifts - x[receivers]
        w = (1 - (d.norm(dim=-1) / CUTOFF).clamp(max=1.0) ** 2) ** 3
        h = torch.zeros(len(x), dtype=x.dtype).index_add(0, receivers, w)
        g = torch.zeros(len(x), dtype=x.dtype).index_add(0, receivers, w * torch.tanh(self.scale * h[senders]))
        return g[:n].sum()


class OpaqueWrapper(MpnnWrapper):
    def forward(self, data):
        e = data.neighbors
        shifts = e.images.to(data.cell.dtype) @ data.cell[0]
        return {"energy": self.model(data.positions, e.receivers, e.senders, shifts, e.n_receivers).reshape(1, 1)}


def opaque():
    spec = dataclasses.replace(SPEC_MPNN_HALO, distribution=DistributionSpec(shard_tensors=False))
    return OpaqueWrapper(Opaque(), spec)


def test_a_thin_ghost_region_is_named():
    report = check(opaque)
    assert report.faults[0].kind is FaultKind.MISSING_EDGES, report.log_summary
    assert "too thin" in report.faults[0].message
    assert report.ok
    assert report.spec.hops == 2
    assert report.fix_applied == "hops=2"


class Farsighted(MpnnWrapper):
    """Reads pairs to 1.7 times the cutoff it declares, by the nearest image and without the list."""

    def forward(self, data):
        x, n = data.positions, data.neighbors.n_receivers
        frac = x @ torch.linalg.inv(data.cell[0])
        d = frac[None, :] - frac[:n, None]
        d = (d - d.round()) @ data.cell[0]
        r2 = (d**2).sum(-1) + torch.eye(n, len(x), dtype=x.dtype) * 1e4
        pair = (1 - (r2 / (1.7 * CUTOFF) ** 2).clamp(max=1.0)) ** 3
        return {"energy": pair.sum().reshape(1, 1)}


def farsighted():
    spec = dataclasses.replace(SPEC_MPNN_HALO, distribution=DistributionSpec(shard_tensors=False))
    return Farsighted(Mpnn(1), spec)


def wide_sample():
    return Batch.from_data_list([random_system(8, sites=(14, 5, 5))])


def test_a_model_that_reads_beyond_its_cutoff_is_named():
    report = trace_and_validate(farsighted, wide_sample(), rtol=1e-8, timeout=60)
    assert any(f.kind is FaultKind.MISSING_EDGES for f in report.faults), report.log_summary


class Whole(MpnnWrapper):
    """Sums over ranks itself, by the verb."""

    def forward(self, data):
        e = super().forward(data)["energy"]
        per_atom = data.positions[:, 0] * 0 + 1.0
        return {"energy": e, "atoms": system_sum(per_atom, data.batch_idx, data.num_graphs).unsqueeze(-1)}


def whole(reduce="all_reduce", kind=OutputKind.PER_GRAPH, shard=True, own=Whole):
    outputs = {**SPEC_MPNN_HALO.outputs, "atoms": OutputSpec(kind, reduce)}
    spec = MLIPSpec(DistributionSpec(shard_tensors=shard), outputs)
    model = own(Mpnn(1), spec)
    model.model_config.outputs |= {"atoms"}
    model.model_config.active_outputs = {"energy", "atoms"}
    return model


class PlainWhole(Whole):
    def forward(self, data):
        e = OwnedEnergyWrapper.forward(self, data)["energy"]
        ones = torch.ones(data.num_nodes, dtype=e.dtype)
        return {"energy": e, "atoms": system_sum(ones, data.batch_idx, data.num_graphs).unsqueeze(-1)}


class PlainPart(Whole):
    def forward(self, data):
        e = OwnedEnergyWrapper.forward(self, data)["energy"]
        n = data.neighbors.n_receivers
        atoms = torch.zeros(data.num_graphs, 1, dtype=e.dtype)
        return {"energy": e, "atoms": atoms.index_add(0, data.batch_idx[:n], torch.ones(n, 1, dtype=e.dtype))}


def summed_twice():
    return whole()


def summed_twice_in_plain_tensors():
    return whole(shard=False, own=PlainWhole)


def not_summed():
    return whole(Reduce.NONE, OutputKind.GLOBAL, shard=False, own=PlainPart)


@pytest.mark.parametrize(
    ("factory", "kind", "fix"),
    [
        (summed_twice, FaultKind.SUMMED_TWICE, "atoms is GLOBAL"),
        (summed_twice_in_plain_tensors, FaultKind.SUMMED_TWICE, "atoms is GLOBAL"),
        (not_summed, FaultKind.NOT_SUMMED, "atoms is PER_GRAPH, ALL_REDUCE"),
    ],
)
def test_an_output_summed_twice_or_not_at_all(factory, kind, fix):
    report = check(factory)
    fault = next(f for f in report.faults if f.kind is kind)
    assert fault.where == "atoms"
    assert report.ok, report.log_summary
    assert report.fix_applied == fix
    assert report.spec.outputs["atoms"].kind is (OutputKind.GLOBAL if "GLOBAL" in fix else OutputKind.PER_GRAPH)


def per_molecule_sum(values, batch):
    """Assumes that the last atom belongs to the last system: a third-party habit."""
    return torch.zeros(int(batch[-1]) + 1, dtype=values.dtype).index_add(0, batch, values)


class WithHelper(MpnnWrapper):
    def forward(self, data):
        return {"energy": per_molecule_sum(data.positions[:, 0], data.batch_idx).unsqueeze(-1)}


def with_helper():
    model = WithHelper(Mpnn(1))
    model.restrict({"energy"})
    return model


class WithOddOp(MpnnWrapper):
    def forward(self, data):
        energy = super().forward(data)["energy"]
        return {"energy": energy + 0 * torch.cdist(data.positions, data.positions).sum()}


def with_odd_op():
    return WithOddOp(Mpnn(1))


def test_a_helper_and_an_unsupported_op_are_named():
    report = check(with_helper)
    assert not report.ok
    (fault,) = report.faults
    assert fault.kind is FaultKind.HELPER
    assert "per_molecule_sum" in fault.where
    assert "FunctionAdapter('test_validate:per_molecule_sum'" in fault.remedy
    assert "per_molecule_sum" in report.next_action
    report = check(with_odd_op)
    (fault,) = report.faults
    assert fault.kind is FaultKind.UNSUPPORTED_OP
    assert fault.where.startswith("cdist in ")
    assert "WithOddOp.forward" in fault.where
    assert "to_local()" in fault.message
    assert "adapter" in fault.message


class ExtraReduction(MpnnWrapper):
    """One rank enters a reduction while the other goes on to the exchange of the gradient."""

    def forward(self, data):
        context = current_dd_context()
        if context.is_distributed and context.rank == 0:
            context.total(torch.ones(1, dtype=torch.float64))
        return super().forward(data)


class Absent(MpnnWrapper):
    """One rank never comes back from the model."""

    def forward(self, data):
        context = current_dd_context()
        if context.is_distributed and context.rank == 1:
            time.sleep(600)
        return super().forward(data)


def extra_reduction():
    return ExtraReduction(Mpnn(2))


def absent():
    return Absent(Mpnn(2))


def own_pid(comm):
    return os.getpid()


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("factory", "where"),
    [(extra_reduction, ["in total", "in fresh_rows"]), (absent, ["in fresh_rows", "line \\d+ in forward"])],
)
def test_ranks_that_do_not_come_back_are_a_hang_and_are_ended(factory, where):
    # Started, and with every import done that torch leaves for the first call, before the limit begins to count.
    assert check(good).ok
    pids = run_ranks(own_pid, 2, launcher="gloo")
    assert all(running(pid) for pid in pids)
    begin = time.monotonic()
    report = trace_and_validate(factory, sample(), rtol=1e-8, timeout=8)
    assert time.monotonic() - begin < 40
    assert not report.ok
    (fault,) = report.faults
    assert fault.kind is FaultKind.HANG, report.log_summary
    assert fault.where == "ranks [0, 1]"
    # Where each rank is, not the first one's alone.
    _, *ranks = fault.message.split("--- rank ")
    assert len(ranks) == 2
    for rank, calls in enumerate(ranks):
        assert calls.startswith(str(rank))
        assert re.search(where[rank], calls), fault.message
        assert "worker.py" in calls
    assert "different operations" in fault.remedy
    # No change of the spec mends it, and none is tried: each would cost the limit again.
    assert len(report.attempts) == 1
    assert not any(running(pid) for pid in pids)
    # The next validation gets ranks of its own.
    assert not set(run_ranks(own_pid, 2, launcher="gloo")) & set(pids)


def test_what_cannot_be_validated():
    with pytest.raises(ModelError, match="top level"):
        trace_and_validate(lambda: good(), sample())
