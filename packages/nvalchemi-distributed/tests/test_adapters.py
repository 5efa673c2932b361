"""Adapters: right over ranks, installed for a forward and gone after it, whatever happens."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import ExitStack

import pytest
import torch
from shard_models import (
    CUTOFF,
    Mpnn,
    MpnnWrapper,
    OwnedEnergyWrapper,
    ScriptedMpnn,
    deviations,
    parallel_of,
    reference_of,
)
from systems import random_system

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import (
    SPEC_MPNN_HALO,
    DistributionSpec,
    FunctionAdapter,
    JitAdapter,
    MethodAdapter,
    PythonAdapter,
    ScriptAdapter,
)
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.errors import AdapterError
from nvalchemi_distributed.ops import (
    AllReduceSum,
    GatherInputs,
    RefreshInputs,
    RefreshOutputs,
    ScatterOutputs,
    SliceOwned,
)

gloo = pytest.mark.gloo


def plain(*adapters, **changes):
    distribution = DistributionSpec(shard_tensors=False, adapters=adapters)
    return dataclasses.replace(SPEC_MPNN_HALO, distribution=distribution, **changes)


def module_path(comm, how, n_layers=3):
    layers = range(1, n_layers)
    if how == "inputs":
        adapters = [MethodAdapter(f"model.layers.{k}", transforms=(GatherInputs("node_feats"),)) for k in layers]
    elif how == "position":
        adapters = [MethodAdapter(f"model.layers.{k}", transforms=(RefreshInputs(0),)) for k in layers]
    elif how == "outputs":
        adapters = [MethodAdapter(f"model.layers.{k - 1}", transforms=(RefreshOutputs(),)) for k in layers]
    else:
        adapters = []
    if how == "hops":
        # The ghosts are computed here: a region of two cutoffs, in a cell long enough for it.
        batch = Batch.from_data_list([random_system(8, sites=(14, 3, 3), tilt=0.2)])
        return deviations(comm, OwnedEnergyWrapper(Mpnn(2), plain(hops=2)), batch=batch)
    return deviations(comm, OwnedEnergyWrapper(Mpnn(n_layers), plain(*adapters)))


@gloo
@pytest.mark.parametrize("how", ["inputs", "position", "outputs", "hops", "nothing"])
def test_module_path(how):
    """One refresh a layer after the first, its adjoint, and the exchange of positions: nothing else."""
    for gap, traffic, (owned, ghosts, total) in run_ranks(module_path, 2, how, launcher="gloo"):
        assert owned + ghosts < total
        if how == "nothing":
            assert gap["energy"] > 1e-6
            continue
        assert max(gap.values()) < 1e-10, gap
        assert traffic["refresh"] == (1 if how == "hops" else 3)
        assert traffic["fold"] == traffic["refresh"]


def torchscript(comm, adapted):
    adapters = [ScriptAdapter("model.body", f"layers.{k}", "node_feats") for k in (1, 2)] if adapted else []
    model = OwnedEnergyWrapper(ScriptedMpnn(), plain(*adapters))
    gap, traffic, rows = deviations(comm, model)
    parallel, owned = parallel_of(comm, model)
    whole = parallel.gather(owned)
    parameters = list(model.parameters())
    # The scope has closed by the time the gradient is taken.
    outputs = parallel.model.with_graph(owned)
    parts = torch.autograd.grad((outputs["forces"] ** 2).sum(), parameters, allow_unused=True)
    expected = torch.autograd.grad(
        (reference_of(model, whole, create_graph=True)["forces"] ** 2).sum(), parameters, allow_unused=True
    )
    scale = max(float(e.abs().max()) for e in expected if e is not None)
    off = [
        float((parallel.reduce.sum(p) - e).abs().max()) / scale
        for p, e in zip(parts, expected, strict=True)
        if p is not None and e is not None
    ]
    return gap, traffic, rows, max(off), [p is None for p in parts] == [e is None for e in expected]


@gloo
@pytest.mark.parametrize("adapted", [True, False])
def test_layers_inside_torchscript(adapted):
    for gap, traffic, (owned, ghosts, total), off, same in run_ranks(torchscript, 2, adapted, launcher="gloo"):
        assert owned + ghosts < total
        if not adapted:
            assert gap["energy"] > 1e-6
            continue
        assert max(gap.values()) < 1e-10, gap
        assert traffic["refresh"] == traffic["fold"] == 3
        assert same
        assert off < 1e-10


class Spread(torch.nn.Module):
    """Sums over edges that write to receivers and to senders: ghost rows hold parts."""

    def forward(self, h, weight, receivers, senders):
        out = torch.zeros_like(h).index_add(0, receivers, weight * h[senders])
        return out.index_add(0, senders, 0.5 * weight * h[receivers])


def sum_of(h):
    return h.sum(0)


class Shared(torch.nn.Module):
    """Two layers over :class:`Spread`, then energies that depend on the sum over all atoms."""

    def __init__(self):
        super().__init__()
        self.spread = Spread()

    def forward(self, x, receivers, senders, shifts, n):
        d = x[senders] + shifts - x[receivers]
        weight = ((1 - (d.norm(dim=-1, keepdim=True) / CUTOFF).clamp(max=1.0) ** 2) ** 3).expand(-1, 2)
        h = x.new_tensor([[1.0, 0.5]]).expand(x.shape[0], 2)
        for _ in range(2):
            h = torch.tanh(0.2 * h + 0.1 * self.spread(h, weight, receivers, senders))
        whole = sum_of(h)
        return ((h[:n] - 0.02 * whole) ** 2).sum() + 0.0 * whole.sum()


class SharedWrapper(MpnnWrapper):
    def forward(self, data):
        e = data.neighbors
        shifts = e.images.to(data.cell.dtype) @ data.cell[0]
        return {"energy": self.model(data.positions, e.receivers, e.senders, shifts, e.n_receivers).reshape(1, 1)}


def shared_sums(comm, left_out):
    transforms = {"slice": SliceOwned(0), "sum": AllReduceSum()}
    kept = tuple(t for name, t in transforms.items() if name != left_out)
    adapters = [FunctionAdapter(f"{__name__}:sum_of", kept)]
    if left_out != "scatter":
        adapters.append(MethodAdapter("model.spread", transforms=(ScatterOutputs(),)))
    batch = Batch.from_data_list([random_system(8, sites=(14, 3, 3), tilt=0.2)])
    return deviations(comm, SharedWrapper(Shared(), plain(*adapters)), batch=batch)


@gloo
@pytest.mark.parametrize("left_out", [None, "scatter", "slice", "sum"])
def test_scatter_slice_and_sum_give_the_single_process(left_out):
    """Each of the three is needed: without it the energy is another."""
    for gap, traffic, (owned, ghosts, total) in run_ranks(shared_sums, 2, left_out, launcher="gloo"):
        assert ghosts > 0
        assert owned + ghosts < total
        if left_out is not None:
            assert gap["energy"] > 1e-6
            continue
        assert max(gap.values()) < 1e-10, gap
        # Positions, and a fold with a refresh after each layer, with their adjoints.
        assert traffic["refresh"] == traffic["fold"] == 5


# -- what adapters leave behind ----------------------------------------------------------------------------------------


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


def wrapped(original, x, *args, **kwargs):
    return original(x + 1.0, *args, **kwargs)


class Keyed(torch.nn.Module):
    def forward(self, data):
        return {"h": data["h"] * 2.0}


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(2, 2)
        self.keyed = Keyed()

    def forward(self, x):
        return self.lin(x)


class NoGhosts:
    """A context in which every operation is visible: refresh adds 100, fold 1000."""

    n_owned = n_padded = 3
    is_distributed = True

    def refresh(self, x):
        return x + 100.0

    def refresh_owned(self, x):
        return x + 10.0

    def fold(self, x):
        return x + 1000.0

    def total(self, x):
        return x * 7.0


ME = __name__


@pytest.mark.parametrize("fails", [False, True])
def test_adapters_are_gone_after_the_block_also_after_an_error(fails):
    here = sys.modules[__name__]
    model, original = Small(), here.double
    before = {p: set(m.__dict__) for p, m in model.named_modules()}
    adapters = [
        MethodAdapter("lin", transforms=(GatherInputs("input"), RefreshOutputs())),
        MethodAdapter("lin", replacement=f"{ME}:wrapped"),
        FunctionAdapter(f"{ME}:double", (GatherInputs("x"),)),
        PythonAdapter(ME, "double", f"{ME}:triple"),
        JitAdapter(ME, "double", triple),
    ]
    if fails:
        adapters.append(MethodAdapter("nowhere", transforms=(GatherInputs(0),)))
    x = torch.ones(3, 2)
    plain_result = model(x)
    with ExitStack() as outer:
        if fails:
            outer.enter_context(pytest.raises(AdapterError, match="no submodule 'nowhere'"))
        with ExitStack() as stack:
            for a in adapters:
                a.install(model, NoGhosts(), stack)
            # replacement(original, x): the outer one runs first, x + 1, then the refresh of the input, + 100.
            expected = model.lin.weight.sum(1) * 102.0 + model.lin.bias + 100.0
            assert torch.allclose(model(x)[0], expected, rtol=1e-5)
            assert here.double is triple
    assert here.double is original
    assert {p: set(m.__dict__) for p, m in model.named_modules()} == before
    assert torch.equal(model(x), plain_result)


def test_transforms_reach_names_positions_keys_and_outputs():
    model = Small()
    data = {"h": torch.zeros(3, 1)}
    with ExitStack() as stack:
        MethodAdapter("keyed", transforms=(GatherInputs("data", "h"), ScatterOutputs(key="h"))).install(
            model, NoGhosts(), stack
        )
        assert float(model.keyed(data)["h"][0]) == (0 + 100) * 2 + 1000 + 100
    with ExitStack() as stack:
        FunctionAdapter(f"{ME}:pair", (SliceOwned(0), AllReduceSum(1))).install(model, NoGhosts(), stack)
        first, second = pair(torch.ones(3))
        assert float(second[0]) == 7.0
        assert float(first[0]) == 1.0


def pair(x):
    return x, x


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (lambda: MethodAdapter("lin", transforms=(GatherInputs("nothing"),)), "no argument 'nothing'.*input"),
        (lambda: MethodAdapter("lin", transforms=(GatherInputs(),)), "does not say which argument"),
        (lambda: MethodAdapter("lin", "missing", (GatherInputs(0),)), "no such method"),
        (lambda: FunctionAdapter(f"{ME}:nobody", (GatherInputs(0),)), "nobody.*cannot be found"),
        (lambda: FunctionAdapter("no_such_module:f", (GatherInputs(0),)), "cannot be found"),
        (lambda: PythonAdapter(ME, "double", "no_such_module:f"), "cannot be found"),
    ],
)
def test_what_cannot_be_installed(adapter, words):
    with ExitStack() as stack, pytest.raises(AdapterError, match=words):
        adapter().install(Small(), NoGhosts(), stack)


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (GatherInputs(3), "was not passed"),
        (RefreshOutputs(2), "there is one output"),
        (GatherInputs(0, "key"), "there is no tensor"),
        (SliceOwned(0), "expected 3 rows"),
    ],
)
def test_what_does_not_fit_at_the_call(transform, words):
    model = Small()
    with ExitStack() as stack:
        MethodAdapter("lin", transforms=(transform,)).install(model, NoGhosts(), stack)
        with pytest.raises(AdapterError, match=words):
            model(torch.ones(5, 2))


@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")
def test_inside_torchscript_is_refused_with_the_remedy():
    model = torch.nn.Module()
    model.scripted = torch.jit.script(Small().lin)
    outer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    model.whole = torch.jit.script(outer)
    with ExitStack() as stack:
        MethodAdapter("scripted", transforms=(GatherInputs("input"),)).install(model, NoGhosts(), stack)
        x = torch.zeros(3, 2)
        assert not torch.equal(model.scripted(x), model.scripted._c.forward(x))
        with pytest.raises(AdapterError, match=r"TorchScript.*hops"):
            MethodAdapter("whole.0", transforms=(GatherInputs("input"),)).install(model, NoGhosts(), stack)
    assert torch.equal(model.scripted(x), model.scripted._c.forward(x))
