"""A message-passing model in plain torch, run decomposed without being changed, against one process."""

from __future__ import annotations

import pytest
import torch
from shard_models import Mpnn, MpnnWrapper, deviations, parallel_of, reference_of

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed.errors import UnsupportedRowOp

gloo = pytest.mark.gloo


def plain_torch_model(comm, both_ways, reads_mean, grid):
    model = MpnnWrapper(Mpnn(3, both_ways=both_ways, reads_mean=reads_mean))
    return deviations(comm, model, grid=tuple(grid))


@gloo
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("reads_mean", [False, True])
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1)])
def test_energy_forces_and_stress(both_ways, reads_mean, grid):
    size = grid[0] * grid[1] * grid[2]
    for gap, traffic, (owned, ghosts, total) in run_ranks(
        plain_torch_model, size, both_ways, reads_mean, grid, launcher="gloo"
    ):
        assert size == 1 or owned + ghosts < total
        assert max(gap.values()) < 1e-10, gap
        # Positions once and a refresh a layer after the first; a fold where edges write to both ends.
        if not both_ways:
            assert traffic["refresh"] == traffic["fold"] == 3


def loss_of(outputs):
    """Each term counts an owned atom, or this rank's part of an energy, once: ranks' losses add up to the loss."""
    return (outputs["forces"] ** 2).sum() + 0.1 * (outputs["forces"] ** 4).sum() + 0.3 * outputs["energy"].sum()


def parameter_gradients(comm, both_ways, reads_mean, differences):
    model = MpnnWrapper(Mpnn(2, both_ways=both_ways, reads_mean=reads_mean))
    # One weight for every layer: its gradient has a part from each.
    model.model.layers[1].mix.weight = model.model.layers[0].mix.weight
    parallel, owned = parallel_of(comm, model)
    names = [n for n, _ in model.named_parameters()]
    parameters = list(model.parameters())
    outputs = parallel.model.with_graph(owned)
    parts = torch.autograd.grad(loss_of(outputs), parameters)
    summed = [parallel.reduce.sum(p) for p in parts]
    whole = parallel.gather(owned)

    def single_loss():
        return loss_of(reference_of(model, whole, create_graph=True))

    expected = torch.autograd.grad(single_loss(), parameters)
    scale = max(float(g.abs().max()) for g in expected)
    gaps = {n: float((a - b).abs().max()) / scale for n, a, b in zip(names, summed, expected, strict=True)}
    slope = None
    if differences:
        # Independent of autograd: a central difference of the one-process loss along a shared weight.
        weight, h = model.model.layers[0].mix.weight, 1e-5
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[0, 1] += sign * h
            losses.append(float(single_loss()))
            with torch.no_grad():
                weight[0, 1] -= sign * h
        at = names.index("model.layers.0.mix.weight")
        slope = [(losses[0] - losses[1]) / (2 * h), float(summed[at][0, 1])]
    return gaps, slope, [owned.n_owned, owned.n_ghost, whole.num_nodes]


@gloo
@pytest.mark.parametrize(("size", "both_ways", "reads_mean"), [(1, True, True), (2, True, True), (3, False, False),
                                                                 (4, False, True)])  # fmt: skip
def test_gradients_of_a_force_loss(size, both_ways, reads_mean):
    """D25: one shared weight; the gradient is that of one process and of finite differences, not × ranks."""
    for gaps, slope, (owned, ghosts, total) in run_ranks(
        parameter_gradients, size, both_ways, reads_mean, size == 2, launcher="gloo"
    ):
        assert size == 1 or owned + ghosts < total
        assert max(gaps.values()) < 1e-10, gaps
        if slope is not None:
            assert slope[1] == pytest.approx(slope[0], rel=1e-6)


class ReadsRows(MpnnWrapper):
    """Notes what the batch says about rows."""

    def forward(self, data):
        self.seen = {
            "ptr": data.ptr.tolist(),
            "counts": (data.ptr[1:] - data.ptr[:-1]).tolist(),
            "list": data.num_nodes_list,
            "rows": data.num_nodes,
            "idx": int(data.batch_idx.shape[0]),
        }
        try:
            self.seen["slice"] = len(data.positions[data.ptr[0] : data.ptr[1]])
        except UnsupportedRowOp as error:
            self.seen["slice"] = str(error)
        return super().forward(data)


def rows_of(comm):
    model = ReadsRows(Mpnn(1))
    parallel, owned = parallel_of(comm, model)
    parallel.evaluate(owned)
    seen, whole = model.seen, parallel.gather(owned)
    reference_of(model, whole)
    return seen, model.seen, owned.n_owned, owned.n_ghost


@gloo
def test_ptr_counts_the_atoms_of_whole_systems_and_is_no_row_number():
    for seen, single, n_owned, n_ghost in run_ranks(rows_of, 2, launcher="gloo"):
        assert seen["ptr"] == single["ptr"]
        assert len(seen["ptr"]) == 3
        assert seen["counts"] == seen["list"] == single["list"]
        assert min(seen["counts"]) > 0
        assert seen["rows"] == seen["idx"] == n_owned + n_ghost < single["rows"] == seen["ptr"][-1]
        assert single["slice"] == single["counts"][0]
        assert "rows" in str(seen["slice"])
