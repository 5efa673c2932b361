"""Configurations, models and hooks that cannot work: an error on every rank before the first step."""

from __future__ import annotations

import pytest
import torch
from systems import fcc, lj

from distmd_protocol import RankError
from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel, MLIPSpec, StrategyKind
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics import NVE, HostMemory
from nvalchemi_distributed.dynamics.base import DynamicsStage
from nvalchemi_distributed.dynamics.hooks import SnapshotHook
from nvalchemi_distributed.errors import (
    ConfigError,
    DistributedSimulationError,
    InputError,
    NotPartitionedError,
)
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import LennardJonesModelWrapper
from nvalchemi_distributed.neighbors import NeighborConfig
from nvalchemi_distributed.stages import HookScope

gloo = pytest.mark.gloo


def make(model=None, skin=0.5, **config):
    model = model or lj()
    hooks = [NeighborListHook(model.neighbor_config, skin=skin)]
    return DomainParallel(NVE(model, 2.0, hooks=hooks), DomainConfig(**{"cutoff": 5.0, "skin": 0.5, **config}))


class Bare(LennardJonesModelWrapper):
    distribution_spec = None


class Undeclared(LennardJonesModelWrapper):
    distribution_spec = MLIPSpec(name="half", outputs={"energy": "per_graph"})


class Forgetful(LennardJonesModelWrapper):
    """Leaves out an output that it says it has."""

    def forward(self, data):
        out = super().forward(data)
        out.pop("virial")
        return out


class OneImage(LennardJonesModelWrapper):
    """Declares that it sees one image of each atom."""

    def __init__(self, *args):
        super().__init__(*args)
        self.model_config.minimum_image = True


def evaluated(parallel, comm, data=None):
    batch = Batch.from_data_list([data or fcc(3)])
    parallel.evaluate(parallel.partition(batch if comm.rank == 0 else None))


def test_minimum_image_is_checked_on_one_process_and_only_along_periodic_axes():
    model = OneImage(0.0101, 3.4, 5.3)
    integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config)])
    narrow = fcc(2, a=5.3)
    narrow.cell[0, 2, 2] = 10.59
    pair = Batch.from_data_list([fcc(2, a=5.31), narrow])
    with pytest.raises(InputError, match=r"system 1.*10\.59 Å wide along lattice vector 2.*10\.6"):
        integrator.step(pair)
    small = fcc(repeat=(2, 1, 2), a=5.31)
    small.pbc[0, 1] = False
    integrator.step(Batch.from_data_list([small]))


class Squeeze:
    """Sets the second lattice vector's length before the drift of one step, on the ranks given."""

    frequency, stage = 1, DynamicsStage.BEFORE_PRE_UPDATE

    def __init__(self, lengths, comm=None, ranks=()):
        self.lengths, self.here = dict(lengths), comm is None or comm.rank in ranks

    def __call__(self, ctx, stage):
        if self.here and ctx.step_count in self.lengths:
            ctx.batch.cell = ctx.batch.cell.clone()
            ctx.batch.cell[0, 1, 1] = self.lengths[ctx.step_count]


def squeezed(comm, lengths, ranks, skin, one_image):
    """Steps done, rebuilds, reductions of the last step and the error of a run whose cell changes on the way."""
    model = (OneImage if one_image else LennardJonesModelWrapper)(0.0101, 3.4, 5.0)
    hooks = [NeighborListHook(model.neighbor_config, skin=skin), Squeeze(lengths, comm, ranks)]
    parallel = DomainParallel(NVE(model, 1.0, hooks=hooks), DomainConfig(cutoff=5.0, skin=skin, grid_dims=(2, 1, 1)))
    owned = parallel.partition(Batch.from_data_list([fcc(repeat=(6, 2, 2))]) if comm.rank == 0 else None)
    n_ghost, before, error = owned.n_ghost, 0, ""
    try:
        for _ in range(5):
            before = parallel.traffic.reductions
            parallel.step(owned)
    except RankError as caught:
        error = str(caught)
    return parallel.step_count, parallel.rebuilds, parallel.traffic.reductions - before, error, owned.n_owned + n_ghost


@gloo
@pytest.mark.parametrize(
    ("ranks", "skin", "length"),
    [
        ([0, 1], 0.5, 9.0),  # the list would be made anew
        ([0, 1], 2.0, 9.98),  # it would not: the skin covers the change
        ([1], 2.0, 9.98),  # one rank alone, against the contract, and still no rank waits for another
    ],
)
def test_a_cell_that_becomes_too_narrow_on_the_way_is_refused_on_every_rank(ranks, skin, length):
    # Step 1 leaves a cell that is wide enough, and a run that goes on.
    lengths = [[1, 10.5], [3, length]]
    for steps, rebuilds, _, error, rows in run_ranks(squeezed, 2, lengths, ranks, skin, True, launcher="gloo"):
        assert rows < 96
        assert steps == 3
        assert rebuilds <= 2
        assert "InputError" in error
        assert f"system 0: its cell is {length:g} Å wide along lattice vector 1, below twice the cutoff 5.0" in error
        assert "repeat the cell to at least 10 Å" in error


@gloo
def test_a_changed_cell_costs_a_model_of_one_image_no_collective():
    runs = [run_ranks(squeezed, 2, [[4, 10.55]], [0, 1], 2.0, one, launcher="gloo") for one in (True, False)]
    for one, any_image in zip(*runs, strict=True):
        assert one == any_image
        assert one[0] == 5
        assert one[1] == 1
    # A model that takes integer images goes on in the narrow cell.
    for steps, _, _, error, _ in run_ranks(squeezed, 2, [[3, 9.98]], [0, 1], 2.0, False, launcher="gloo"):
        assert (steps, error) == (5, "")


def test_a_cell_that_becomes_too_narrow_is_refused_on_one_process():
    model = OneImage(0.0101, 3.4, 5.0)
    hooks = [NeighborListHook(model.neighbor_config, skin=2.0), Squeeze({2: 9.98})]
    integrator = NVE(model, 1.0, hooks=hooks)
    batch = Batch.from_data_list([fcc(2)])
    with pytest.raises(InputError, match=r"9\.98 Å wide along lattice vector 1"):
        integrator.run(batch, 5)
    assert integrator.step_count == 2


def config_faults(comm):
    out = {}

    def attempt(name, fn):
        try:
            fn()
        except (DistributedSimulationError, RankError) as error:
            out[name] = f"{type(error).__name__}: {error}"

    model = lj()
    attempt("grid", lambda: make(grid_dims=(2, 2, 2)))
    attempt("no-list", lambda: DomainParallel(NVE(model, 1.0), DomainConfig(cutoff=5.0)))
    attempt("cutoff", lambda: make(cutoff=4.0))
    attempt("skin", lambda: make(skin=0.9))
    attempt("not-partitioned", lambda: make().run(None, 3))
    attempt("gather", lambda: make().gather())
    attempt("save", lambda: make().save("nowhere/x"))
    attempt("step", lambda: make().step(None))
    attempt("compile", lambda: make(compile=True))
    attempt("width", lambda: make(ghost_width=5.2))
    attempt("no-spec", lambda: make(Bare(0.01, 3.4, 5.0)))
    attempt("dtype", lambda: AtomicData(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([18, 18])))
    attempt("no-kind", lambda: evaluated(make(Undeclared(0.01, 3.4, 5.0)), comm))
    attempt("no-output", lambda: evaluated(make(Forgetful(0.01, 3.4, 5.0)), comm))
    attempt("minimum-image", lambda: evaluated(make(OneImage(0.01, 3.4, 5.0)), comm, fcc(repeat=(2, 1, 2))))
    small = Batch.from_data_list([fcc(2)]) if comm.rank == 0 else None
    attempt("degenerate", lambda: make(require_nondegenerate=True).partition(small))
    return out


@gloo
def test_configurations_are_refused_on_every_rank():
    for messages in run_ranks(config_faults, 2, launcher="gloo"):
        assert "product 8 but there are 2 ranks" in messages["grid"]
        assert "NeighborListHook" in messages["no-list"]
        assert "below the model's cutoff 5.0" in messages["cutoff"]
        assert "skin=0.9 is above" in messages["skin"]
        assert messages["not-partitioned"].startswith("NotPartitionedError")
        for name in ("gather", "save", "step"):
            assert messages[name].startswith("NotPartitionedError")
            assert "partition" in messages[name]
        assert "compile=True" in messages["compile"]
        assert "ghost_width=5.2 is below cutoff + skin + migration_hysteresis = 5.5" in messages["width"]
        assert "Bare has no distribution_spec" in messages["no-spec"]
        assert "float32 or float64" in messages["dtype"]
        assert "outputs ['forces'" in messages["no-kind"]
        assert "did not give ['virial']" in messages["no-output"]
        assert "InputError" in messages["minimum-image"]
        assert "5.3 Å wide along lattice vector 1, below twice the cutoff 5.0" in messages["minimum-image"]
        assert "at least 10 Å" in messages["minimum-image"]
        assert "require_nondegenerate" in messages["degenerate"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cutoff": -1.0}, "cutoff"),
        ({"cutoff": float("nan")}, "cutoff"),
        ({"skin": -0.1}, "skin"),
        ({"migration_hysteresis": -1.0}, "migration_hysteresis"),
        ({"compile": True}, "not built yet"),
        ({"strategy": StrategyKind.GRAPH_PARTITION}, "not built yet"),
        ({"strategy": "spiral"}, "strategy"),
        ({"grid_dims": (0, 1, 1)}, "grid_dims"),
        ({"grid_dims": (2, 1)}, "grid_dims"),
        ({"ghost_width": 5.0, "skin": 0.5}, "ghost_width"),
        ({"ghost_width": float("nan")}, "ghost_width"),
        ({"rebalance_above": 0.5}, "rebalance_above"),
    ],
)
def test_domain_config_refuses_at_construction(change, words):
    with pytest.raises(ConfigError, match=words):
        DomainConfig(**{"cutoff": 5.0, **change})


def test_ghost_width_must_cover_all_hops():
    class TwoHops(LennardJonesModelWrapper):
        distribution_spec = MLIPSpec(name="deep", hops=2)

    with pytest.raises(ConfigError, match="2 hops"):
        make(TwoHops(0.01, 3.4, 5.0), ghost_width=8.0)


def test_list_hook_must_fit_the_model():
    model = lj()
    wrong = NeighborListHook(NeighborConfig(5.0, "coo"), skin=0.5)
    with pytest.raises(ConfigError, match="format coo"):
        DomainParallel(NVE(model, 1.0, hooks=[wrong]), DomainConfig(cutoff=5.0, skin=0.5))
    with pytest.raises(ConfigError, match="BEFORE_COMPUTE"):
        NeighborListHook(model.neighbor_config, stage=DynamicsStage.AFTER_STEP)


def test_global_hook_on_the_integrator_is_refused():
    model = lj()
    hooks = [
        NeighborListHook(model.neighbor_config, skin=0.5),
        SnapshotHook(HostMemory(3), scope=HookScope.GLOBAL),
    ]
    with pytest.raises(ConfigError, match="register it on DomainParallel"):
        DomainParallel(NVE(model, 1.0, hooks=hooks), DomainConfig(cutoff=5.0, skin=0.5))


class Keeper(NVE):
    """Keeps last step's accelerations, one row an atom: migration would not carry them."""

    def pre_update(self, batch):
        self.previous = batch.forces / batch.atomic_masses.unsqueeze(-1)
        super().pre_update(batch)


def test_per_atom_state_of_an_integrator_is_refused_by_name():
    model = lj()
    batch = Batch.from_data_list([fcc(3)])
    integrator = Keeper(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.0)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0))
    batch.velocities = torch.full_like(batch.velocities, 0.01)
    with pytest.raises(RankError, match=r"Keeper keeps \['previous'\].*add_key"):
        parallel.run(parallel.partition(batch), 5)


def test_a_foreign_batch_and_a_closed_run_are_refused():
    parallel = make()
    parallel.partition(Batch.from_data_list([fcc(3)]))
    other = make()
    owned = other.partition(Batch.from_data_list([fcc(3)]))
    with pytest.raises(NotPartitionedError, match="did not partition"):
        parallel.step(owned)
    parallel.close()
    with pytest.raises(NotPartitionedError, match="closed"):
        parallel.gather()


def test_integer_positions_are_refused():
    with pytest.raises(InputError, match="float32 or float64"):
        AtomicData(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([18, 18]))


def test_hooks_and_steps_are_checked_where_they_are_given():
    model = lj()
    every = SnapshotHook(HostMemory(3))
    every.frequency = 0
    with pytest.raises(ConfigError, match="frequency=0"):
        NVE(model, 1.0, hooks=[every])
    integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    for hook, words in ((every, "frequency=0"), (print, "not a hook")):
        with pytest.raises(ConfigError, match=words):
            DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5), hooks=[hook])
    batch = Batch.from_data_list([fcc(3)])
    with pytest.raises(ConfigError, match="n_steps=-5"):
        integrator.run(batch, n_steps=-5)
    parallel = make()
    owned = parallel.partition(batch)
    with pytest.raises(ConfigError, match="n_steps=-5"):
        parallel.run(owned, n_steps=-5)
