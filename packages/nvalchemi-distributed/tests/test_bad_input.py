"""What cannot work is an error on every rank, with the number and the remedy; nothing hangs and nothing is silent."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from systems import fcc, lj

from distmd_protocol import RankError
from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import (
    DistributionSpec,
    DomainConfig,
    DomainParallel,
    MLIPSpec,
    OutputKind,
    OutputSpec,
    Reduce,
)
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics import NVE, HostMemory, NVTLangevin
from nvalchemi_distributed.dynamics.hooks import SnapshotHook
from nvalchemi_distributed.errors import (
    ConfigError,
    InputError,
    LostAtomsError,
    ModelError,
    NonFiniteError,
    SinkFullError,
)
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import LennardJonesModelWrapper
from nvalchemi_distributed.stages import HookScope

gloo = pytest.mark.gloo


def make(model=None, skin=0.5, **config):
    model = model or lj()
    hooks = [NeighborListHook(model.neighbor_config, skin=skin)]
    return DomainParallel(NVE(model, 2.0, hooks=hooks), DomainConfig(**{"cutoff": 5.0, "skin": 0.5, **config}))


def broken(name):
    """The good system with one fault."""
    data = fcc(3)
    if name == "nan-position":
        data.positions[17, 1] = float("nan")
    elif name == "infinite-position":
        data.positions[23, 0] = float("inf")
    elif name == "infinite-velocity":
        data.velocities[3, 0] = float("inf")
    elif name == "zero-mass":
        data.atomic_masses[5] = 0.0
    elif name == "left-handed":
        data.cell[0] = data.cell[0][[1, 0, 2]]
    elif name == "singular":
        data.cell[0, 1] = data.cell[0, 0]
    elif name == "no-vector":
        data.cell[0, 2] = 0.0
    elif name == "same-place":
        data.positions[40] = data.positions[41] + data.cell[0, 0]
    elif name == "doubled-id":
        data.add_node_property("atom_id", torch.zeros(data.num_nodes, dtype=torch.int64))
    return data


WORDS = {
    "nan-position": "atoms [17]",
    "infinite-position": "atoms [23]",
    "infinite-velocity": "atoms [3]",
    "zero-mass": "atoms [5]",
    "left-handed": "left-handed",
    "singular": "in a plane",
    "no-vector": "one is zero",
    "same-place": "atoms 40 and 41",
    "doubled-id": "atom_id",
}


def partition_faults(comm):
    """Message of each fault on this rank."""
    out = {}
    for name in WORDS:
        try:
            make().partition(Batch.from_data_list([broken(name)]) if comm.rank == 0 else None)
        except RankError as error:
            out[name] = str(error)
    for name, batch in {
        "no-batch": None,
        "everywhere": Batch.from_data_list([fcc(3)]),
    }.items():
        try:
            make().partition(batch)
        except RankError as error:
            out[name] = str(error)
    # A group that has seen errors still works.
    parallel = make()
    parallel.run(parallel.partition(Batch.from_data_list([fcc(3)]) if comm.rank == 0 else None), 2)
    out["steps"] = str(parallel.step_count)
    return out


@gloo
def test_partition_refuses_bad_systems_on_every_rank():
    for messages in run_ranks(partition_faults, 2, launcher="gloo"):
        for name, words in WORDS.items():
            assert words in messages[name], name
            assert "InputError" in messages[name]
        assert "full Batch on rank zero" in messages["no-batch"]
        assert "pass None on the other ranks" in messages["everywhere"]
        assert messages["steps"] == "2"


class Poisoned(LennardJonesModelWrapper):
    """Returns a non-finite number after a few calls: ``what`` is energy, forces or nothing."""

    def __init__(self, what, value, after):
        super().__init__(0.0101, 3.4, 5.0)
        self.what, self.value, self.after, self.calls = what, value, after, 0

    def forward(self, data):
        out = super().forward(data)
        self.calls += 1
        if self.calls > self.after:
            target = out[self.what]
            if self.what == "forces" and 3 in data.atom_id[: len(target)].tolist():
                target[data.atom_id[: len(target)].tolist().index(3)] = self.value
            elif self.what == "energy":
                target[0] = self.value
        return out


def poisoned(comm, what, value):
    model = Poisoned(what, float(value), 4)
    frames = HostMemory(50)
    parallel = make(model)
    parallel.hooks.append(SnapshotHook(frames, scope=HookScope.GLOBAL))
    owned = parallel.partition(Batch.from_data_list([fcc(3)]) if comm.rank == 0 else None)
    try:
        parallel.run(owned, 20)
    except NonFiniteError as error:
        return [str(error), len(frames)]


@gloo
@pytest.mark.parametrize(
    ("what", "value"), [("forces", "nan"), ("forces", "inf"), ("energy", "nan"), ("energy", "inf")]
)
def test_non_finite_results_end_the_run_and_write_nothing_more(what, value):
    results = run_ranks(poisoned, 2, what, value, launcher="gloo")
    for message, _ in results:
        assert "step 3" in message
        if what == "forces":
            assert "ids [3]" in message
        else:
            assert "energy" in message
    assert [frames for _, frames in results] == [3, 0]


def large_but_finite(comm):
    """Charges whose sum is too large for float32."""

    class Charged(LennardJonesModelWrapper):
        def __init__(self):
            super().__init__(0.0101, 3.4, 5.0)
            self.model_config.outputs = self.model_config.outputs | {"charges"}
            self.model_config.active_outputs = {"energy", "forces", "charges"}

        def forward(self, data):
            self.model_config.active_outputs.discard("charges")
            out = super().forward(data)
            self.model_config.active_outputs.add("charges")
            return {**out, "charges": torch.full_like(data.positions[: len(out["forces"]), 0], 3.0e38)}

    model = Charged()
    kind = OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY)
    spec = dataclasses.replace(model.distribution_spec, outputs={**model.distribution_spec.outputs, "charges": kind})
    dynamics = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    parallel = DomainParallel(dynamics, DomainConfig(cutoff=5.0, skin=0.5), spec=spec)
    system = Batch.from_data_list([fcc(3)]).to(dtype=torch.float32)
    owned = parallel.run(parallel.partition(system if comm.rank == 0 else None), 2)
    return [float(owned.charges.min()), bool(torch.isfinite(owned.charges.sum()))]


@gloo
def test_finite_values_with_an_infinite_sum_are_no_error():
    for smallest, sum_is_finite in run_ranks(large_but_finite, 2, launcher="gloo"):
        assert smallest > 2.9e38
        assert not sum_is_finite


def blown_up(comm):
    """A time step far too long, positions become infinite in an update."""

    class Explode(NVE):
        def pre_update(self, batch):
            super().pre_update(batch)
            if self.step_count == 2:
                batch.positions[batch.atom_id == 7] = float("nan")

    model = lj()
    integrator = Explode(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5))
    try:
        parallel.run(parallel.partition(Batch.from_data_list([fcc(3)]) if comm.rank == 0 else None), 5)
    except NonFiniteError as error:
        return str(error)


@gloo
def test_non_finite_positions_are_named_on_every_rank():
    for message in run_ranks(blown_up, 2, launcher="gloo"):
        assert "atoms [7]" in message
        assert "step 2" in message


def loses_an_atom(comm):
    parallel = make()
    owned = parallel.partition(Batch.from_data_list([fcc(3)]) if comm.rank == 0 else None)
    if comm.rank == 1:
        lost, place = int(owned.atom_id[0]), owned.positions[0].tolist()
        owned.replace_rows({k: v[1:] for k, v in owned.node_fields.items()}, owned.batch_idx[1:])
    else:
        lost, place = -1, None
    # The next rebuild must notice.
    from nvalchemi_distributed.domain.rebuild import start_epoch

    try:
        start_epoch(owned, parallel._boxes, parallel._domain, 5)
    except LostAtomsError as error:
        return [str(error), lost, place]


@gloo
def test_a_lost_atom_is_named_on_every_rank():
    """D14: count and id set are checked at every migration."""
    results = run_ranks(loses_an_atom, 2, launcher="gloo")
    _, lost, place = results[1]
    for message, _, _ in results:
        assert f"missing ids [{lost}], last at {{{lost}: {place}}}" in message


def full_sink(comm):
    parallel = make()
    parallel.hooks.append(SnapshotHook(HostMemory(2), scope=HookScope.GLOBAL))
    try:
        parallel.run(parallel.partition(Batch.from_data_list([fcc(3)]) if comm.rank == 0 else None), 9)
    except RankError as error:
        return str(error)


@gloo
def test_a_sink_that_fails_on_rank_zero_is_an_error_on_every_rank():
    for message in run_ranks(full_sink, 2, launcher="gloo"):
        assert SinkFullError.__name__ in message
        assert "rank 0" in message


class Histogram(NVE):
    """A tensor that is no per-atom state, and has as many rows as atoms after the first rebuild only."""

    def pre_update(self, batch):
        rebuilt = self.step_count >= 1
        self.counts = torch.zeros(batch.num_nodes if rebuilt else batch.num_nodes + 1)
        super().pre_update(batch)


def test_a_coincidence_of_sizes_does_not_end_a_run():
    model = lj()
    batch = Batch.from_data_list([fcc(3)])
    batch.velocities = torch.full_like(batch.velocities, 0.01)
    integrator = Histogram(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.0)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0))
    parallel.run(parallel.partition(batch), 5)
    assert parallel.rebuilds > 3
    assert integrator.counts.shape == (108,)


class Folding(LennardJonesModelWrapper):
    """Declares forces that ghosts share in, and gives those of owned atoms only."""

    distribution_spec = MLIPSpec(
        name="folding",
        distribution=DistributionSpec(shard_tensors=False),
        outputs={"energy": "per_graph", "virial": "per_graph", "stress": "per_graph", "forces": "per_node"},
    )


class Coordination(LennardJonesModelWrapper):
    """A per-atom output of its own: one row an atom, also where a rank owns as many atoms as there are systems."""

    def __init__(self):
        super().__init__(0.0101, 3.4, 5.0)
        self.model_config.outputs |= {"coordination"}
        self.model_config.active_outputs.add("coordination")

    @property
    def distribution_spec(self):
        spec = super().distribution_spec
        coordination = OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY)
        return dataclasses.replace(spec, name="coordination", outputs={**spec.outputs, "coordination": coordination})

    def forward(self, data):
        self.model_config.active_outputs.discard("coordination")
        out = super().forward(data)
        self.model_config.active_outputs.add("coordination")
        return {**out, "coordination": data.positions[: data.neighbors.n_receivers, 0] * 2.0}


def odd_outputs(comm):
    out = []
    parallel = make(Folding(0.0101, 3.4, 5.0))
    owned = parallel.partition(Batch.from_data_list([fcc(3)]) if comm.rank == 0 else None)
    try:
        parallel.evaluate(owned)
    except ModelError as error:
        out.append(str(error))
    x = torch.tensor([[2.0, 5, 5], [20.0, 5, 5], [24.0, 5, 5]], dtype=torch.float64)
    three = AtomicData(x, torch.full((3,), 18), cell=torch.diag(torch.tensor([40.0, 30.0, 30.0])), pbc=True)
    parallel = make(Coordination())
    owned = parallel.partition(Batch.from_data_list([three]) if comm.rank == 0 else None)
    parallel.evaluate(owned)
    return [*out, owned.num_nodes, parallel.gather(owned).coordination.tolist()]


@gloo
def test_outputs_go_where_the_spec_says():
    results = run_ranks(odd_outputs, 2, launcher="gloo")
    assert sorted(r[1] for r in results) == [1, 2]
    for message, _, values in results:
        assert "PER_NODE with Reduce.NONE needs" in message
        assert values == [4.0, 40.0, 48.0]


def test_outputs_go_where_the_spec_says_on_one_process():
    one = AtomicData(torch.zeros(1, 3, dtype=torch.float64), torch.tensor([18]))
    model = Coordination()
    batch = Batch.from_data_list([one])
    NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config)]).run(batch, 1)
    assert "coordination" in batch.node_fields
    assert "energy" in batch.system_fields


def wrong_temperatures(comm):
    model = lj()
    batch = Batch.from_data_list([fcc(2), fcc(2)])
    hooks = [NeighborListHook(model.neighbor_config, skin=0.5)]
    integrator = NVTLangevin(model, 1.0, torch.tensor([80.0, 90.0, 100.0]), 0.01, hooks=hooks)
    messages = []
    for attempt in (
        lambda: DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5)).partition(
            batch if comm.rank == 0 else None
        ),
        lambda: integrator.run(batch, 1),
    ):
        try:
            attempt()
        except (RankError, ConfigError) as error:
            messages.append(str(error))
    return messages


@gloo
def test_one_temperature_a_system():
    for messages in run_ranks(wrong_temperatures, 2, launcher="gloo"):
        assert len(messages) == 2
        for message in messages:
            assert "3 numbers for 2 systems" in message


def test_silent_changes_of_numbers_are_refused():
    with pytest.raises(InputError, match="integers"):
        AtomicData(torch.zeros(2, 3), torch.tensor([17.9, 18.0]))
    batch = Batch.from_data_list([fcc(3)])
    batch.add_key("phase", torch.zeros(batch.num_nodes, dtype=torch.complex64))
    with pytest.raises(RankError, match=r"InputError.*phase is torch\.complex64"):
        make().partition(batch)
