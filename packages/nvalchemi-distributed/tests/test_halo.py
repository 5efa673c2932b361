"""refresh and fold, the autograd path, ghost rules, routing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from systems import EPSILON, SIGMA, fcc, lj, random_system, single
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distmd_protocol.testkit import TOL, run_ranks
from nvalchemi_distributed import (
    DistributedModel,
    DistributionSpec,
    DomainConfig,
    DomainParallel,
    MLIPSpec,
    OutputKind,
)
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.domain.halo import _fold, _refresh, fold, pad, refresh
from nvalchemi_distributed.dynamics import NVE, maxwell_boltzmann
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models.base import BaseModelMixin, ModelConfig
from nvalchemi_distributed.neighbors import NeighborConfig

gloo = pytest.mark.gloo


class AutogradLJ(nn.Module, BaseModelMixin):
    """A pair energy in plain torch over a COO list; forces and virial are left to the framework.

    ``reverse`` gives half of each pair energy to the sender, so that ghosts receive parts too.
    """

    def __init__(self, cutoff=5.0, gives_forces=False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.gives_forces = gives_forces
        names = {"energy", "forces", "virial", "stress"}
        auto = set() if gives_forces else {"forces", "virial", "stress"}
        self.model_config = ModelConfig(
            outputs={"energy", "forces"} if gives_forces else names,
            autograd_outputs=auto,
            neighbor_config=NeighborConfig(cutoff, "coo"),
        )

    @property
    def distribution_spec(self):
        return MLIPSpec(
            name="autograd pair",
            distribution=DistributionSpec(shard_tensors=False),
            outputs={
                "energy": OutputKind.PER_GRAPH,
                "forces": OutputKind.PER_NODE,
                "virial": OutputKind.PER_GRAPH,
                "stress": OutputKind.PER_GRAPH,
            },
        )

    def energies(self, x, data):
        e = data.neighbors
        shift = torch.bmm(e.images.to(x.dtype).unsqueeze(1), data.cell[data.batch_idx[e.senders]]).squeeze(1)
        d = x[e.senders] + shift - x[e.receivers]
        r2 = (d * d).sum(-1)
        s6 = torch.where(r2 < self.cutoff**2, (SIGMA * SIGMA / r2) ** 3, 0.0)
        pair = 2 * EPSILON * self.scale * (s6 * s6 - s6)
        out = x.new_zeros(data.num_graphs, dtype=torch.float64)
        return out.index_add(0, data.batch_idx[e.receivers], pair).unsqueeze(-1)

    def forward(self, data):
        if not self.gives_forces:
            return {"energy": self.energies(data.positions, data)}
        # Its own gradient with respect to all rows it was given: ghost rows hold what belongs to their owners.
        x = data.positions.detach().clone().requires_grad_(True)
        energy = self.energies(x, data)
        return {"energy": energy.detach(), "forces": -torch.autograd.grad(energy.sum(), x)[0]}


def autograd_case(comm, gives_forces, grid):
    data = [
        random_system(8, sites=(4, 3, 4), tilt=0.4, fill=0.9),
        random_system(9, sites=(3, 4, 3), pbc=(True, False, True)),
    ]
    model = AutogradLJ(gives_forces=gives_forces)
    integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5, grid_dims=tuple(grid)))
    owned = parallel.partition(Batch.from_data_list(data) if comm.rank == 0 else None)
    parallel.evaluate(owned)
    whole = parallel.gather(owned)
    reference = single(lj(5.0), whole, 0.5)
    out = {
        k: float((getattr(whole, k) - reference[k]).abs().max() / reference[k].abs().max())
        for k in ("energy", "forces", *([] if gives_forces else ["virial", "stress"]))
    }
    return out


@gloo
@pytest.mark.parametrize("gives_forces", [False, True])
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1)])
def test_energy_only_model_gets_forces_and_virial_by_one_gradient(gives_forces, grid):
    """D03: the strain derivative is summed once; D25's form for one rank included."""
    size = grid[0] * grid[1] * grid[2]
    for result in run_ranks(autograd_case, size, gives_forces, grid, launcher="gloo"):
        for name, deviation in result.items():
            assert deviation < 1e-11, (name, deviation)


def pressure_of_strained_fcc(comm):
    data = fcc(3, a=5.3, jitter=0.0)
    stretch = torch.diag(torch.tensor([1.01, 1.0, 1.0], dtype=torch.float64))
    data = AtomicData(data.positions @ stretch, data.atomic_numbers, cell=data.cell[0] @ stretch, pbc=True)
    stresses = []
    for model in (lj(5.0), AutogradLJ()):
        integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config)])
        parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0))
        owned = parallel.partition(Batch.from_data_list([data]) if comm.rank == 0 else None)
        stresses.append(parallel.evaluate(owned).stress.reshape(-1).tolist())
    return stresses


@gloo
def test_pressure_does_not_depend_on_the_partition():
    """D03: fcc 108, 1 % strain in x, 1, 2, 4 ranks, pair sum and strain derivative."""
    one = torch.tensor(run_ranks(pressure_of_strained_fcc, 1, launcher="gloo")[0])
    assert torch.allclose(one[0], one[1], rtol=1e-10, atol=1e-14)
    for size in (2, 4):
        for result in run_ranks(pressure_of_strained_fcc, size, launcher="gloo"):
            assert float((torch.tensor(result) - one).abs().max() / one.abs().max()) < TOL["decomposed-f64"]


def adjoint_case(comm):
    """<refresh x, y> = <x, fold y>, and the parameter gradient of a force loss."""
    model = lj()
    parallel = DomainParallel(
        NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)]), DomainConfig(cutoff=5.0, skin=0.5)
    )
    owned = parallel.partition(Batch.from_data_list([fcc(repeat=(6, 3, 3))]) if comm.rank == 0 else None)
    plan, transport = owned.epoch.plan, parallel._transport
    g = torch.Generator().manual_seed(comm.rank)
    x = torch.rand(plan.n_padded, 2, dtype=torch.float64, generator=g)
    y = torch.rand(plan.n_padded, 2, dtype=torch.float64, generator=g)
    left = parallel.reduce.sum((refresh(x, plan, transport) * y).sum())
    right = parallel.reduce.sum((x * fold(y, plan, transport)).sum())
    again = refresh(refresh(x, plan, transport), plan, transport)
    once = refresh(x, plan, transport)
    leaf = x[: plan.n_owned].clone().requires_grad_(True)
    padded = refresh(pad(leaf, plan), plan, transport)
    first = torch.autograd.grad((padded**3).sum(), leaf, create_graph=True)[0]
    second = torch.autograd.grad((first * leaf.detach()).sum(), leaf)[0]
    copies = fold(torch.ones(plan.n_padded, 1, dtype=torch.float64), plan, transport)[: plan.n_owned]
    return [
        abs(float(left - right)) / abs(float(left)),
        torch.equal(again, once),
        torch.allclose(first, 3 * leaf.detach() ** 2 * copies),
        torch.allclose(second, 6 * leaf.detach() ** 2 * copies, rtol=1e-12),
        float(copies.max()),
    ]


@gloo
@pytest.mark.parametrize("size", [1, 2, 4])
def test_refresh_and_fold_are_adjoint_also_twice(size):
    for gap, idempotent, first, second, copies in run_ranks(adjoint_case, size, launcher="gloo"):
        assert gap < 1e-13
        assert idempotent
        assert first
        assert second
        assert copies == 1.0 if size == 1 else copies > 1.0


def force_loss(comm):
    """Gradient of Σ|f|² with respect to a shared weight, summed over ranks, as training would do it."""
    model = AutogradLJ()
    parallel = DomainParallel(
        NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)]), DomainConfig(cutoff=5.0, skin=0.5)
    )
    owned = parallel.partition(Batch.from_data_list([random_system(8, sites=(5, 4, 4))]) if comm.rank == 0 else None)
    plan = owned.epoch.plan
    leaf = owned.positions.detach().clone().requires_grad_(True)
    padded = refresh(pad(leaf, plan), plan, parallel._transport)
    view = Batch(
        {**owned.epoch.static, "positions": padded}, {"cell": owned.cell, "pbc": owned.pbc}, owned.epoch.batch_idx
    )
    view.neighbors = owned.epoch.neighbors
    forces = -torch.autograd.grad(model(view)["energy"].sum(), leaf, create_graph=True)[0]
    gradient = torch.autograd.grad((forces**2).sum(), model.scale)[0]
    return float(parallel.reduce.sum(gradient))


@gloo
def test_double_backward_of_a_force_loss_equals_one_rank():
    """D25: the shared weight's gradient is the sum over ranks, once."""
    one = run_ranks(force_loss, 1, launcher="gloo")[0]
    for size in (2, 3, 4):
        for value in run_ranks(force_loss, size, launcher="gloo"):
            assert abs(value / one - 1) < 1e-10


def test_custom_ops_pass_torchs_checks():
    """Fake kernels and autograd registration, as torch.compile needs them."""
    from nvalchemi_distributed.domain.transport import Transport

    transport = Transport(None)
    none = torch.zeros(0, dtype=torch.int64)
    x = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    for op in (_refresh, _fold):
        torch.library.opcheck(op, (x, none, none, none, none, transport.key))


def lagging_owner(comm):
    """D01: A has crossed to 10.1 while rank 0 still owns it; B at 13.7 is on rank 1."""
    x = torch.tensor([[9.9, 10.0, 10.0], [13.7, 10.0, 10.0]], dtype=torch.float64)
    data = AtomicData(x, torch.tensor([18, 18]), cell=20.0 * torch.eye(3, dtype=torch.float64), pbc=True)
    model = lj(5.0)
    config = DomainConfig(cutoff=5.0, skin=0.0, grid_dims=(2, 1, 1), migration_hysteresis=0.5, rebalance_above=1e9)
    integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config)])
    parallel = DomainParallel(integrator, config)
    owned = parallel.partition(Batch.from_data_list([data]) if comm.rank == 0 else None)
    before = owned.atom_id.tolist()
    if 0 in before:
        owned.positions[before.index(0), 0] = 10.1
    parallel.evaluate(owned)
    whole = parallel.gather(owned)
    return [before, owned.atom_id.tolist(), whole.forces.tolist()]


@gloo
def test_an_atom_that_lags_behind_its_owner_stays_visible():
    """D01."""
    results = run_ranks(lagging_owner, 2, launcher="gloo")
    assert [r[0] for r in results] == [[0], [1]]
    assert [r[1] for r in results] == [[0], [1]], "the hysteresis keeps A with rank 0"
    r = 3.6
    s6 = (SIGMA / r) ** 6
    expected = abs(24 * EPSILON * (2 * s6 * s6 - s6) / r)
    for _, _, forces in results:
        f = torch.tensor(forces, dtype=torch.float64)
        assert abs(float(f[0].norm()) - expected) < 1e-12
        assert abs(float(f[1].norm()) - expected) < 1e-12
        assert float(f.sum(0).abs().max()) < 1e-15


def hysteresis_run(comm, hysteresis):
    batch = Batch.from_data_list([fcc(repeat=(6, 3, 3), a=5.5)])
    maxwell_boltzmann(batch, 800.0, seed=3)
    model = lj(smoothing="shift")
    integrator = NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5, migration_hysteresis=hysteresis))
    owned = parallel.partition(batch if comm.rank == 0 else None)
    outside = 0
    for _ in range(12):
        parallel.run(owned, 5)
        whole = parallel.gather(owned)
        reference = single(model, whole, 0.5)
        assert float((whole.forces - reference["forces"]).abs().max()) < 1e-12
        frac = owned.epoch.reference[:, 0] / owned.cell[0, 0, 0]
        outside += int(((frac * 2).floor() != comm.rank).sum())
    return [outside, parallel.traffic.by_name.get("migrate.rows", 0)]


@gloo
def test_migration_hysteresis_is_wide_enough_for_every_edge():
    """Atoms stay with their owner up to 1 Å outside; forces stay right."""
    assert sum(r[0] for r in run_ranks(hysteresis_run, 2, 1.0, launcher="gloo")) > 0
    assert sum(r[0] for r in run_ranks(hysteresis_run, 2, 0.0, launcher="gloo")) == 0


def routes(comm):
    """Who talks to whom in a step without a rebuild."""
    batch = Batch.from_data_list([fcc(repeat=(8, 2, 2))])
    model = lj()
    integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=1.0)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=1.0, grid_dims=(comm.size, 1, 1)))
    owned = parallel.partition(batch if comm.rank == 0 else None)
    parallel.evaluate(owned)
    before = dict(parallel.traffic.by_name)
    messages = parallel.traffic.messages
    parallel.run(owned, 10)
    after = parallel.traffic.by_name
    assert parallel.rebuilds == 1
    made = {k: after[k] - before.get(k, 0) for k in after if after[k] != before.get(k, 0)}
    return [made, parallel.traffic.messages - messages, owned.epoch.plan.peers.tolist()]


@gloo
def test_a_step_without_rebuild_is_one_exchange_with_neighbours_and_two_reductions():
    for rank, (made, messages, peers) in enumerate(run_ranks(routes, 4, launcher="gloo")):
        assert made == {"vote": 10, "refresh": 10, "outputs": 10}
        assert peers == sorted({(rank - 1) % 4, (rank + 1) % 4})
        assert messages == 20


def sub_mesh(comm):
    """Ranks 1 and 3 of 4 decompose a system of their own; group rank is not global rank."""
    mesh = DeviceMesh("cpu", [1, 3], mesh_dim_names=("domain",))
    # Ranks 1 and 3 find each other through a store in rank 0's process, which may leave only after that.
    comm.barrier()
    if comm.rank not in (1, 3):
        return None
    model = lj()
    integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5, mesh=mesh), n_steps=3)
    owned = parallel.partition(Batch.from_data_list([fcc(repeat=(6, 3, 3))]) if dist.get_rank() == 1 else None)
    parallel.run(owned)
    whole = parallel.gather(owned)
    reference = single(model, whole, 0.5)
    parallel.close()
    return [owned.n_owned, float((whole.forces - reference["forces"]).abs().max())]


@gloo
def test_sub_mesh_of_a_larger_world():
    outcomes = run_ranks(sub_mesh, 4, launcher="gloo", fresh=True)
    assert [outcome.failure for outcome in outcomes] == [None] * 4
    results = [outcome.result for outcome in outcomes]
    assert results[0] is None
    assert results[2] is None
    assert results[1][0] + results[3][0] == 216
    assert max(results[1][1], results[3][1]) < 1e-13


def mesh_faults(comm):
    from nvalchemi_distributed.errors import ConfigError

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "domain"))
    comm.barrier()
    model = lj()
    try:
        DomainParallel(NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config)]), DomainConfig(5.0, mesh=mesh))
    except ConfigError as error:
        return str(error)


@gloo
def test_mesh_of_two_dimensions_is_refused_with_the_remedy():
    for outcome in run_ranks(mesh_faults, 4, launcher="gloo", fresh=True):
        assert outcome.failure is None
        assert "mesh['domain']" in outcome.result


def one_forward(comm):
    """DistributedModel without an integrator's step."""
    model = lj()
    parallel = DomainParallel(
        NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)]), DomainConfig(cutoff=5.0, skin=0.5)
    )
    owned = parallel.partition(Batch.from_data_list([fcc(3)]) if comm.rank == 0 else None)
    assert isinstance(parallel.model, DistributedModel)
    out = parallel.model(owned)
    return [float(out["energy"]), list(out["forces"].shape), owned.n_owned]


@gloo
def test_energy_is_global_on_every_rank():
    one = run_ranks(one_forward, 1, launcher="gloo")[0]
    for energy, shape, owned in run_ranks(one_forward, 2, launcher="gloo"):
        assert abs(energy / one[0] - 1) < 1e-12
        assert shape == [owned, 3]
