"""What is refused, what is kept, how often ghosts are refreshed, and known faults of other codes."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from shard_models import CUTOFF, Mpnn, MpnnWrapper, parallel_of, reference_of
from systems import fcc, random_system

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import (
    SPEC_MPNN_HALO,
    DomainConfig,
    DomainParallel,
    ShardTensor,
    autograd_target,
    current_dd_context,
    refresh_neighbors,
    scatter_to_owners,
    system_sum,
    to_local,
)
from nvalchemi_distributed._core import shard_tensor as guide_path
from nvalchemi_distributed.context import NOT_DISTRIBUTED, DistributedContext
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.domain.plan import HaloPlan
from nvalchemi_distributed.dynamics import NVE
from nvalchemi_distributed.errors import ModelError, UnsupportedRowOp
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.ops import RowInfo, RowKind
from nvalchemi_distributed.strategies.scope import forward_scope

gloo = pytest.mark.gloo

NODE, EDGE, SYSTEM = (RowInfo(k) for k in RowKind)


def wrap(t, info=NODE, context=NOT_DISTRIBUTED):
    return ShardTensor.wrap(t, info, context)


def three():
    x = wrap(torch.rand(5, 3, dtype=torch.float64))
    edge = wrap(torch.rand(7, 3, dtype=torch.float64), EDGE)
    senders = wrap(torch.arange(7) % 5, RowInfo(RowKind.EDGE, refers=RowKind.NODE))
    return x, edge, senders


REFUSED = {
    "cdist": lambda x, e, s: torch.cdist(x, x),
    "matmul": lambda x, e, s: x @ x.T,
    "cumsum": lambda x, e, s: x.cumsum(0),
    "softmax": lambda x, e, s: F.softmax(e, dim=0),
    "sort": lambda x, e, s: x.sort(dim=0),
    "median": lambda x, e, s: x.median(),
    "std": lambda x, e, s: x.std(),
    "norm": lambda x, e, s: x.norm(),
    "unique": lambda x, e, s: torch.unique(x),
    "flatten": lambda x, e, s: x.flatten(),
    "squeeze": lambda x, e, s: x[:, :1].T.squeeze(1) if x.shape[0] == 1 else x.squeeze(0),
    "unbind": lambda x, e, s: x.unbind(0),
    "cat": lambda x, e, s: torch.cat([x, x]),
    "expand": lambda x, e, s: wrap(torch.rand(1, 3)).expand(4, -1),
    "repeat": lambda x, e, s: x.repeat(2, 1),
    "x[": lambda x, e, s: x[2],
    "x[ ": lambda x, e, s: x[:3],
    "x[mask": lambda x, e, s: x[x[:, 0] > 0.5],
    "rand_like": lambda x, e, s: torch.rand_like(x),
    "dropout": lambda x, e, s: F.dropout(x, 0.5, training=True),
    "batch_norm": lambda x, e, s: F.batch_norm(x, None, None, training=True),
    "einsum": lambda x, e, s: torch.einsum("ni,ni->i", x, x),
    "one_hot": lambda x, e, s: F.one_hot(s),
    "scatter_reduce": lambda x, e, s: torch.zeros_like(x).scatter_reduce(0, s[:, None].expand(-1, 3), e, "amax"),
    "max": lambda x, e, s: x.max(dim=0),
    "add(out": lambda x, e, s: torch.add(x, x, out=torch.empty(5, 3, dtype=x.dtype)),
    "tolist": lambda x, e, s: x.tolist(),
    "numpy": lambda x, e, s: x.numpy(),
    "my::op": lambda x, e, s: torch.ops.my.op(x),
}


@torch.library.custom_op("my::op", mutates_args=())
def my_op(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_has_no_meaning_over_ranks_is_refused_by_name_with_both_remedies(name):
    with pytest.raises(UnsupportedRowOp) as error:
        REFUSED[name](*three())
    text = str(error.value)
    assert name.strip() in text
    assert "to_local()" in text
    assert "dapter" in text


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda x, e, s: x[:, 0] + e[:5, 0], "mixes edge and node rows"),
        (lambda x, e, s: torch.zeros(5, 3)[s], "reads a plain tensor by an index of atoms"),
        (lambda x, e, s: x.index_select(0, s + 0), "numbers nothing known"),
        (lambda x, e, s: e.index_select(0, s), "reads edge rows by an index that numbers nodes"),
        (
            lambda x, e, s: torch.zeros_like(x).index_add_(0, torch.arange(7) % 5, e),
            "nothing says what the index numbers",
        ),
        (lambda x, e, s: torch.zeros_like(x).index_add_(0, s, x), "writes node rows by an index with edge"),
        (lambda x, e, s: torch.zeros_like(e).index_add_(0, s, e), "by an index of nodes into edge rows"),
        (lambda x, e, s: torch.zeros(3, 3).add_(x), "no place for 5 rows"),
        (
            lambda x, e, s: torch.nn.Parameter(torch.zeros(5, 3), requires_grad=False).add_(x),
            "a Parameter was written to",
        ),
        (lambda x, e, s: x[:, :, None] + x[:, 0], "rows along different dimensions"),
    ],
)
def test_what_does_not_fit(act, words):
    with pytest.raises(UnsupportedRowOp, match=words):
        act(*three())


def ghostly():
    """Three owned rows and two ghosts; nothing may be exchanged."""
    none = torch.zeros(0, dtype=torch.int64)
    return DistributedContext(HaloPlan(3, 2, none, none, none, none))


def test_numbers_of_rows_are_checked_where_they_are_known():
    context = ghostly()
    with pytest.raises(UnsupportedRowOp, match="there are 5, 3 owned and 2 ghosts"):
        wrap(torch.zeros(4, 3), NODE, context)
    s = wrap(torch.tensor([0, 4]), RowInfo(RowKind.EDGE, refers=RowKind.NODE), context)
    with pytest.raises(UnsupportedRowOp, match="dimension 0 needs 5 rows"):
        torch.zeros(3, 1).index_add_(0, s, wrap(torch.ones(2, 1), EDGE, context))


def test_kinds_follow_their_dimension():
    x, edge, senders = three()
    both = torch.stack([senders, senders])
    assert both.row_info.dim == 1
    assert both[0].row_info.refers is RowKind.NODE
    assert x.T.row_info.dim == 1
    assert x[None, :, 0].row_info.dim == 1
    assert x.view(5, 3, 1).permute(2, 1, 0).row_info.dim == 2
    assert x.sum(1).row_info.dim == 0
    assert x[senders].row_info.kind is RowKind.EDGE
    assert edge[edge[:, 0] > 0.5].row_info.kind is RowKind.EDGE
    one = wrap(torch.rand(1, 3, 1))
    assert one.squeeze().shape == (1, 3), "one atom stays a row"
    assert x.sum().row_info.partial
    assert (x.sum() * 2 + x.sum()).row_info.partial
    assert not (x.sum() + 1).row_info.partial
    assert not x.sum().exp().row_info.partial


def test_wrapping_copies_nothing_and_stays_in_the_graph():
    leaf = torch.rand(5, 3, requires_grad=True)
    x = wrap(leaf)
    assert x.data_ptr() == leaf.data_ptr() == to_local(x).data_ptr()
    assert type(to_local(x)) is torch.Tensor
    (g,) = torch.autograd.grad((x * x).sum().to_local(), leaf)
    assert torch.equal(g, 2 * leaf.detach())
    with torch.no_grad():
        z = wrap(leaf.clone())
    z.requires_grad_()
    (z * z).sum().backward()
    with pytest.raises(UnsupportedRowOp, match="part of a gradient"):
        _ = z.grad


def test_verbs_are_the_identity_outside():
    x = torch.rand(4, 2)
    assert current_dd_context() is NOT_DISTRIBUTED
    assert not current_dd_context().is_distributed
    for verb in (to_local, autograd_target, refresh_neighbors, scatter_to_owners):
        assert verb(x) is x
    idx = torch.tensor([0, 0, 1, 1])
    assert torch.equal(system_sum(x, idx, 2), torch.stack([x[:2].sum(0), x[2:].sum(0)]))
    with pytest.raises(ModelError, match="no decomposed forward"):
        _ = current_dd_context().n_owned
    assert guide_path.ShardTensor is ShardTensor


def refresh_counts(comm):
    """Exchanges that a few reads cost."""
    model = MpnnWrapper(Mpnn())
    parallel, owned = parallel_of(comm, model)
    epoch, traffic = owned.epoch, parallel.traffic
    counts = {}

    def since(name, act):
        before = {k: traffic.by_name.get(k, 0) for k in ("refresh", "fold", "system_sum")}
        act()
        counts[name] = [traffic.by_name.get(k, 0) - before[k] for k in before]

    with forward_scope(model, SPEC_MPNN_HALO.distribution, epoch.plan, parallel._transport) as context:
        x = wrap(torch.rand(context.n_padded, 2), RowInfo(RowKind.NODE, fresh=False), context)
        send = wrap(epoch.neighbors.senders, RowInfo(RowKind.EDGE, refers=RowKind.NODE), context)
        recv = wrap(epoch.neighbors.receivers, RowInfo(RowKind.EDGE, refers=RowKind.NODE, owned=True), context)
        batch = wrap(epoch.batch_idx, RowInfo(RowKind.NODE, refers=RowKind.SYSTEM), context)
        since("read by receivers", lambda: x[recv])
        since("read twice", lambda: (x[send], x[send]))
        x.mul_(2)
        since("after a write", lambda: (x[send], x.index_select(0, send)))
        since("scatter", lambda: torch.zeros_like(x).index_add_(0, recv, x[send]))
        since("scatter to senders", lambda: torch.zeros_like(x).index_add_(0, send, x[recv]))
        stacked = torch.stack([recv, send])
        since("edge_index", lambda: torch.zeros_like(x).index_add_(0, stacked[0], x[stacked[1]]))
        total = torch.zeros(2, 2).index_add_(0, batch, x)
        since("read a sum twice", lambda: (total.exp(), total[batch]))
        with torch.autocast("cpu", torch.bfloat16):
            h = F.linear(x, torch.rand(3, 2))
            h = torch.zeros_like(h).index_add_(0, recv, h[send])
            far = h[send]
        half = [str(h.dtype), bool(torch.isfinite(far.to_local()).all())]
        try:
            with (
                torch.inference_mode(),
                forward_scope(model, SPEC_MPNN_HALO.distribution, epoch.plan, parallel._transport),
            ):
                pass
        except ModelError as error:
            refused = str(error)
    return counts, half, refused, current_dd_context().is_distributed


@gloo
def test_how_often_ghosts_are_refreshed():
    for counts, half, refused, left in run_ranks(refresh_counts, 2, launcher="gloo"):
        assert counts == {
            "read by receivers": [0, 0, 0],
            "read twice": [1, 0, 0],
            "after a write": [1, 0, 0],
            "scatter": [0, 0, 0],
            "scatter to senders": [0, 1, 0],
            "edge_index": [0, 0, 0],
            "read a sum twice": [0, 0, 1],
        }
        assert half == ["torch.bfloat16", True]
        assert "no_grad" in refused
        assert left is False


def slopes(comm):
    """D26: forces are −dE/dx over several step lengths, with the energy of a decomposed run."""
    model = MpnnWrapper(Mpnn(2, reads_mean=True))
    parallel, owned = parallel_of(comm, model, skin=0.5)
    parallel.evaluate(owned)
    whole = parallel.gather(owned)
    atom, force = 17, float(whole.forces[17, 1])
    mine = owned.atom_id == atom
    out = []
    for h in (1e-3, 1e-4, 1e-5):
        energies = []
        for sign in (1, -2, 1):
            owned.positions = owned.positions + sign * h * mine[:, None] * torch.tensor([0.0, 1.0, 0.0])
            energies.append(float(parallel.evaluate(owned).energy.sum()))
        out.append(-(energies[0] - energies[1]) / (2 * h))
    return force, out


@gloo
def test_forces_are_minus_the_slope_of_the_energy():
    for force, found in run_ranks(slopes, 2, launcher="gloo"):
        assert abs(force) > 1e-4, "off equilibrium"
        for slope, tolerance in zip(found, (1e-4, 1e-5, 1e-5), strict=True):
            assert slope == pytest.approx(force, rel=tolerance, abs=1e-8)


class ConstantEnergies(MpnnWrapper):
    """About −3.6 eV an atom in float32."""

    def forward(self, data):
        e = -3.6 + 1e-3 * torch.sin(37.0 * data.positions[:, 0])
        return {"energy": system_sum(e.double(), data.batch_idx, data.num_graphs).unsqueeze(-1)}


def float32_energies(comm):
    data = [fcc(repeat=(20, 10, 10), dtype=torch.float32)]
    model = ConstantEnergies(Mpnn(1))
    model.restrict({"energy"})
    parallel, owned = parallel_of(comm, model, Batch.from_data_list(data))
    # Partition wraps atoms, which rounds: the reference is computed where they are now.
    whole = parallel.gather(owned)
    e = -3.6 + 1e-3 * torch.sin(37.0 * whole.positions[:, 0])
    out = parallel.model(owned)["energy"]
    return float(out), float(e.double().sum())


@gloo
@pytest.mark.parametrize("size", [1, 2])
def test_energy_sums_do_not_depend_on_the_ranks(size):
    """D26: 8000 energies; float32 sums differ by milli-electronvolts with the number of chunks."""
    for energy, expected in run_ranks(float32_energies, size, launcher="gloo"):
        assert abs(energy - expected) < 1e-9 * abs(expected)


def lonely(comm):
    """D27: an isolated atom, an empty rank, atoms outside the cell, and nothing that grows."""
    bulk = random_system(3, sites=(3, 3, 3))
    length = 60.0
    x = torch.cat([bulk.positions, torch.tensor([[40.0, 5.0, 5.0]], dtype=torch.float64)])
    cell = torch.diag(torch.tensor([length, 30.0, 30.0], dtype=torch.float64))
    numbers = torch.full((len(x),), 18)
    model = MpnnWrapper(Mpnn(2))
    results = []
    for shift in (0, 2):
        moved = x + shift * cell[0] - shift * cell[1]
        batch = Batch.from_data_list([AtomicData(moved, numbers, cell=cell, pbc=True)])
        integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
        config = DomainConfig(CUTOFF, skin=0.5, grid_dims=(comm.size, 1, 1), rebalance_above=100.0)
        parallel = DomainParallel(integrator, config)
        owned = parallel.partition(batch if comm.rank == 0 else None)
        parallel.evaluate(owned)
        results.append(parallel.gather(owned))
    expected = reference_of(model, results[0])
    alive = []
    for _ in range(12):
        parallel.evaluate(owned)
        gc.collect()
        alive.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    forces = results[0].forces
    return [
        float((forces - expected["forces"]).abs().max() / expected["forces"].abs().max()),
        float((forces - results[1].forces).abs().max() / forces.abs().max()),
        float(forces[-1].abs().max()),
        float(forces.abs().max()),
        alive[-1] - alive[2],
        owned.n_owned,
    ]


@gloo
@pytest.mark.parametrize("size", [1, 4])
def test_isolated_atoms_empty_ranks_and_atoms_outside_the_cell(size):
    results = run_ranks(lonely, size, launcher="gloo")
    if size == 4:
        assert min(r[-1] for r in results) == 0, "a rank without atoms takes part"
    for gap, shifted, alone, largest, grown, _ in results:
        assert largest > 1e-3
        assert gap < 1e-10
        assert shifted < 1e-9
        assert alone == 0.0
        assert grown == 0
