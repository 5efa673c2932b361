"""Hooks: what they see, when they run, what they write."""

from __future__ import annotations

import csv
import math
import resource

import pytest
import torch
from systems import fcc, lj

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel, HookScope
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.dynamics import NVE, HostMemory, NVTLangevin, maxwell_boltzmann
from nvalchemi_distributed.dynamics.base import DynamicsStage
from nvalchemi_distributed.dynamics.hooks import LoggingHook, SnapshotHook
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.hooks import DynamicsContext, Hook, NeighborListHook
from nvalchemi_distributed.observables import kinetic_energy, pressure, temperature
from nvalchemi_distributed.units import EV_PER_CUBIC_ANGSTROM_IN_MPA

gloo = pytest.mark.gloo


def system():
    batch = Batch.from_data_list([fcc(repeat=(4, 3, 3), a=5.4), fcc(2, seed=2)])
    maxwell_boltzmann(batch, 200.0, seed=2)
    return batch


class Recorder:
    """Every stage with its step number; sees the order of a step."""

    stage = DynamicsStage.BEFORE_STEP
    frequency = 1

    def __init__(self):
        self.calls = []

    def _runs_on_stage(self, stage):
        return True

    def __call__(self, ctx, stage):
        assert isinstance(ctx, DynamicsContext)
        self.calls.append((stage.value, ctx.step_count))


def test_order_of_a_step_is_the_same_decomposed_and_not():
    model = lj()
    assert isinstance(Recorder(), Hook)
    plain, wrapped = Recorder(), Recorder()
    NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5), plain]).run(system(), 2)
    integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5), wrapped])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5), n_steps=2)
    parallel.run(parallel.partition(system()))
    assert plain.calls == wrapped.calls
    assert plain.calls[:4] == [
        ("before_compute", 0),
        ("after_compute", 0),
        ("before_step", 0),
        ("before_pre_update", 0),
    ]
    assert plain.calls[-1] == ("after_step", 2)


def log_and_snapshots(comm, path):
    model = lj(smoothing="shift")
    local, everything = HostMemory(10), HostMemory(10)
    log = LoggingHook(path, frequency=5)
    integrator = NVTLangevin(
        model,
        2.0,
        200.0,
        0.02,
        hooks=[NeighborListHook(model.neighbor_config, skin=0.5), SnapshotHook(local, 10), log],
        n_steps=99,
    )
    parallel = DomainParallel(
        integrator,
        DomainConfig(cutoff=5.0, skin=0.5),
        n_steps=20,
        hooks=[SnapshotHook(everything, 10, scope=HookScope.GLOBAL)],
    )
    owned = parallel.run(parallel.partition(system() if comm.rank == 0 else None))
    whole = parallel.gather(owned)
    direct = [temperature(whole).tolist(), (pressure(whole) * EV_PER_CUBIC_ANGSTROM_IN_MPA).tolist()]
    return {
        "steps": [parallel.step_count, local.steps, everything.steps],
        "ids": [f.atom_id.tolist() for f in local],
        "global": len(everything),
        "records": log.records,
        "direct": direct,
        "kinetic": [kinetic_energy(owned, parallel.reduce).tolist(), kinetic_energy(whole).tolist()],
    }


@gloo
def test_local_and_global_hooks_on_two_ranks(tmp_path):
    """``DomainParallel(n_steps=…)`` wins over the integrator's; logs are the whole system's on every rank."""
    results = run_ranks(log_and_snapshots, 2, str(tmp_path / "log.csv"), launcher="gloo")
    for r in results:
        assert r["steps"][0] == 20
        assert r["steps"][1] == [10, 20]
        assert r["kinetic"][0] == pytest.approx(r["kinetic"][1], rel=1e-12)
    assert [r["global"] for r in results] == [2, 0]
    for a, b in zip(results[0]["ids"], results[1]["ids"], strict=True):
        assert sorted(a + b) == list(range(176))
        assert a == sorted(a)
    assert results[0]["records"] == results[1]["records"]
    last = [row for row in results[0]["records"] if row[0] == 20]
    assert [row[4] for row in last] == pytest.approx(results[0]["direct"][0], rel=1e-10)
    assert [row[5] for row in last] == pytest.approx(results[0]["direct"][1], rel=1e-9)
    with open(tmp_path / "log.csv", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 4 * 2
    assert float(rows[-1]["temperature_K"]) == pytest.approx(last[-1][4])
    assert all(math.isfinite(float(v)) for row in rows for v in row.values())


def test_pressure_needs_the_stress_and_stale_outputs_do_not_stay():
    model = lj()
    batch = system()
    integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    integrator.run(batch, 1)
    assert batch.stress is not None
    model.restrict({"energy", "forces"})
    integrator.run(batch, 1)
    assert batch.stress is None
    with pytest.raises(AttributeError, match="active_outputs"):
        pressure(batch)


def test_neighbor_list_hook_rebuilds_only_when_needed():
    """An affine strain far from the origin is no displacement."""
    model = lj()
    batch = Batch.from_data_list([fcc(2)])
    batch.positions = batch.positions + 1000.0
    hook = NeighborListHook(model.neighbor_config, skin=1.0)
    hook.update(batch)
    batch.positions = batch.positions * 1.001
    batch.cell = batch.cell * 1.001
    hook.update(batch)
    assert hook.rebuilds == 1
    batch.positions[3, 0] += 0.6
    hook.update(batch)
    assert hook.rebuilds == 2
    batch.positions[3, 0] = float("nan")
    assert hook._stale(batch)


def test_frequencies_and_bad_hooks():
    with pytest.raises(ConfigError, match="frequency"):
        SnapshotHook(HostMemory(1), 0)
    with pytest.raises(ConfigError, match="frequency"):
        LoggingHook(frequency=0)
    with pytest.raises(ConfigError, match="skin"):
        NeighborListHook(lj().neighbor_config, skin=-1.0)


def test_memory_stays_flat():
    """D27: 500 steps more need no more memory than 100."""
    model = lj(smoothing="shift")
    integrator = NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5))
    owned = parallel.partition(system())
    parallel.run(owned, 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parallel.run(owned, 500)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB
    assert torch.isfinite(owned.forces).all()


class Squeeze:
    """Scales cell and atoms by a hundredth."""

    frequency = 1

    def __init__(self, stage):
        self.stage = stage

    def __call__(self, ctx, stage):
        ctx.batch.cell *= 0.99
        ctx.batch.positions *= 0.99


def squeezed(comm, stage):
    """Forces after two steps, or the error."""
    model = lj()
    batch = Batch.from_data_list([fcc(repeat=(8, 3, 3), a=5.15)])
    integrator = NVE(
        model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5), Squeeze(DynamicsStage[stage])]
    )
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5))
    owned = parallel.partition(batch if comm.rank == 0 else None)
    assert owned.n_owned + owned.n_ghost < 288
    try:
        parallel.run(owned, 2)
    except ConfigError as error:
        return str(error)
    return parallel.gather().forces.tolist()


@gloo
def test_a_list_is_never_out_of_date_when_hooks_move_atoms():
    """Hooks that come before the list hook, after it, and at an earlier stage."""
    results = []
    for stage, first in (("BEFORE_COMPUTE", True), ("BEFORE_COMPUTE", False), ("AFTER_PRE_UPDATE", False)):
        model = lj()
        batch = Batch.from_data_list([fcc(repeat=(8, 3, 3), a=5.15)])
        # A skin so thin that a hundredth brings pairs in that it does not hold.
        hooks = [NeighborListHook(model.neighbor_config, skin=0.01), Squeeze(DynamicsStage[stage])]
        # The evaluation before the first step squeezes too.
        integrator = NVE(model, 2.0, hooks=hooks[::-1] if first else hooks)
        integrator.run(batch, 2)
        exact = batch.clone()
        make_list = NeighborListHook(model.neighbor_config, skin=0.0)
        make_list.update(exact)
        expected = model(exact)["forces"]
        assert float((batch.forces - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
        results.append(batch.forces)
    assert float((results[0] - results[1]).abs().max()) <= 1e-12 * float(results[0].abs().max())
    for message in run_ranks(squeezed, 2, "BEFORE_COMPUTE", launcher="gloo"):
        assert "a hook changed positions at DynamicsStage.BEFORE_COMPUTE of step 0" in message
        assert "AFTER_PRE_UPDATE" in message
    for forces in run_ranks(squeezed, 2, "AFTER_PRE_UPDATE", launcher="gloo"):
        assert float((torch.tensor(forces, dtype=torch.float64) - results[2]).abs().max()) <= 1e-12 * float(
            results[2].abs().max()
        )
