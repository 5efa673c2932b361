"""Every kind of operation on row tensors, on several ranks, against the same code on one process."""

# ruff: noqa: E501 — one case a line
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from shard_models import CUTOFF, Mpnn, MpnnWrapper, parallel_of, two_systems
from torch.utils.checkpoint import checkpoint

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import SPEC_MPNN_HALO, ShardTensor, refresh_neighbors, scatter_to_owners, system_sum
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.domain.halo import copy_to_ghosts
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.ops import RowInfo, RowKind
from nvalchemi_distributed.strategies.scope import as_row_tensors, forward_scope

gloo = pytest.mark.gloo
S = 2


def fields(data):
    """What the cases compute with: features that are a function of the atom alone."""
    ids = data.atom_id + 1000 * data.batch_idx
    table = torch.rand(4000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    plain = ids.to_local() if isinstance(ids, ShardTensor) else ids
    x = table[plain]
    if isinstance(ids, ShardTensor):
        x = ShardTensor.wrap(x, RowInfo(RowKind.NODE), ids._context)
    e = data.neighbors
    # Edges carry numbers that depend on their two ends alone, whatever their order.
    d = data.positions[e.senders] - data.positions[e.receivers]
    edge_shift = torch.einsum("ei,eij->ej", e.images.to(d.dtype), data.cell[data.batch_idx[e.senders]])
    return SimpleNamespace(
        x=x, pos=data.positions, z=data.atomic_numbers, batch=data.batch_idx, cell=data.cell,
        recv=e.receivers, send=e.senders, edge=(d + edge_shift) / CUTOFF,
        w=torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3), table=torch.rand(
            20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
    )  # fmt: skip


def scattered(d, values, like=None):
    out = torch.zeros_like(d.x[:, : values.shape[-1]] if like is None else like)
    return out.index_add_(0, d.recv, values)


def in_place(d):
    y = d.x.clone()
    y += 1
    y.mul_(d.x)
    y[:, 1] = 2.0
    y[:, 2:] *= 3.0
    y.clamp_(max=4.0)
    return y


def written_through_a_view(d):
    """A write through a view makes the whole stale; the gather must see it."""
    y = d.x.clone()
    before = y[d.send].sum()
    part = y[:, :2]
    part.index_add_(0, d.recv, d.edge[:, :2])
    return scattered(d, y[d.send]) + 0 * before


def plain_rows(d):
    """Rows from nowhere: the owner's value wins."""
    h = torch.zeros(d.x.shape[0], 4, dtype=torch.float64) + d.x[:, :1]
    return scattered(d, h[d.send])


def accumulate_in_plain(d):
    out = torch.zeros(d.x.shape[0], 3, dtype=torch.float64)
    out.index_add_(0, d.recv, d.edge)
    return scattered(d, out[d.send])


def attention(d):
    """Softmax over each atom's edges, the largest taken off first."""
    score = (d.x[d.recv, 0] if not isinstance(d.x, ShardTensor) else d.x[d.recv][:, 0]) * d.edge[:, 0]
    top = torch.full_like(d.x[:, 0], -1e9).scatter_reduce_(0, d.recv, score, "amax", include_self=True)
    e = torch.exp(score - top[d.recv])
    total = torch.zeros_like(d.x[:, 0]).index_add_(0, d.recv, e)
    return scattered(d, (e / total[d.recv]).unsqueeze(-1) * d.x[d.send])


def filtered_edges(d):
    near = d.edge.norm(dim=-1) < 0.8
    recv, send = d.recv[near], d.send[near]
    return torch.zeros_like(d.x).index_add_(0, recv, d.x[send] * d.edge[near].norm(dim=-1, keepdim=True))


def forces_inside(d):
    pos = d.pos.detach().requires_grad_(True)
    r2 = ((pos[d.send] - pos[d.recv]) ** 2).sum(-1)
    h = torch.zeros_like(d.x[:, 0]).index_add_(0, d.recv, torch.exp(-0.02 * r2))
    e = (h[d.send] * h[d.recv] * torch.exp(-0.02 * r2)).sum()
    (g,) = torch.autograd.grad(e, pos)
    return g


def forces_of_a_whole_energy(d):
    """The energy is whole on every rank: it counts once."""
    pos = d.pos.detach().requires_grad_(True)
    per_atom = torch.zeros_like(d.x[:, 0]).index_add_(0, d.recv, ((pos[d.send] - pos[d.recv]) ** 2).sum(-1))
    energy = system_sum(per_atom, d.batch, S)
    (g,) = torch.autograd.grad((energy * energy).sum(), pos)
    return g


def through_checkpoint(d):
    leaf = d.pos.detach().requires_grad_(True)

    def layer(p):
        h = torch.zeros_like(p).index_add_(0, d.recv, torch.tanh(p[d.send]))
        return torch.zeros_like(p).index_add_(0, d.recv, torch.sin(h[d.send])) + h[d.recv].sum() * 0

    (g,) = torch.autograd.grad((checkpoint(layer, leaf, use_reentrant=False) ** 2).sum(), leaf)
    return g


def double_gradient(d):
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    pos = d.pos.detach().requires_grad_(True)
    h = torch.zeros_like(pos).index_add_(0, d.recv, torch.tanh(w * (pos[d.send] - pos[d.recv])))
    e = (torch.zeros_like(pos).index_add_(0, d.recv, w * torch.sin(h[d.send])) ** 2).sum()
    (g,) = torch.autograd.grad(e, pos, create_graph=True)
    (gg,) = torch.autograd.grad((g * g).sum(), w)
    return ("part", gg)


CASES = {
    # row by row
    "arithmetic": lambda d: 2 - d.x * 3 / (1 + d.x) ** 2 + 1 / d.x - (-d.x) % 0.7,
    "functions": lambda d: torch.where(d.x > 0.5, d.x.exp(), torch.sigmoid(d.x)).clamp(0.2, 2.0) + F.silu(d.x),
    "logic": lambda d: ((d.x > 0.3) & ~(d.x < 0.2) | (d.x == d.x[:, :1])).double() + (d.x != d.x[:, :1]) * 2 + (d.x // 0.3) + abs(+d.x),
    "dtype": lambda d: d.x.float().double() + d.z.to(d.x.dtype).unsqueeze(-1),
    "like": lambda d: torch.zeros_like(d.x) + torch.ones_like(d.x) * 2 + torch.full_like(d.x, 3.0),
    "in place": in_place,
    "masked": lambda d: d.x.masked_fill(d.x > 0.5, 0.0) + torch.where(d.x > 0.5, 0.0, d.x),
    # along features
    "norms": lambda d: d.x.norm(dim=-1, keepdim=True) + torch.linalg.norm(d.x, dim=1, keepdim=True) + F.normalize(d.x),
    "softmax": lambda d: F.softmax(d.x, -1) + d.x.log_softmax(dim=1) + d.x.cumsum(-1),
    "sums": lambda d: d.x.sum(-1, keepdim=True) + d.x.mean(dim=1, keepdim=True) + d.x.amax(-1, keepdim=True),
    "max of features": lambda d: d.x.max(dim=-1).values.unsqueeze(-1) + d.x.sort(-1).values,
    "three dimensions": lambda d: (d.x[:, None, :] * d.x[:, :, None]).sum(-1) + d.x.unsqueeze(0).sum(2).squeeze(0).unsqueeze(1),
    # shapes
    "views": lambda d: d.x.view(-1, 2, 2).transpose(1, 2).reshape(d.x.shape[0], 4).unsqueeze(1).expand(-1, 3, -1).flatten(1),
    "rows elsewhere": lambda d: (d.x.T * 2).t() + d.x.permute(1, 0).movedim(0, 1) + d.x.mT.T,
    "joins": lambda d: torch.cat([d.x, d.x * 2], -1) + torch.cat(torch.stack([d.x, d.x], 1).unbind(1), -1),
    "parts": lambda d: torch.cat([*d.x.split(2, -1), *d.x.chunk(2, -1), d.x.narrow(1, 1, 2)], dim=1),
    "indices": lambda d: torch.stack([d.x[:, 0], d.x[..., 1], d.x[:, 2:][:, 0], d.x[:, [3, 1]][:, 0]], -1) + d.x[:, None, 0],
    "matrices": lambda d: torch.linalg.det(d.x.view(-1, 2, 2) + 2 * torch.eye(2, dtype=d.x.dtype)).unsqueeze(-1) * d.x,
    # products
    "weights": lambda d: d.x @ d.w + F.linear(d.x, d.w.t()) + torch.matmul(d.x, d.w) + torch.einsum("nf,fk->nk", d.x, d.w),
    "one matrix a row": lambda d: torch.bmm(d.x.unsqueeze(1), d.x.unsqueeze(2)).squeeze(-1) + torch.einsum(
        "ni,ni->n", d.x, d.x).unsqueeze(-1),
    "outer of rows": lambda d: torch.einsum("ni,nj->nij", d.x, d.x).flatten(1) @ torch.ones(16, 2, dtype=d.x.dtype),
    "matrix on the left": lambda d: (d.w.t() @ d.x.t()).t(),
    "layer norm": lambda d: F.layer_norm(d.x, (4,)) + F.gelu(d.x),
    "embedding": lambda d: F.embedding(d.z, d.table) + d.table[d.z] + F.one_hot(d.z, 20).double() @ d.table,
    # gather and scatter
    "gather": lambda d: scattered(d, d.x[d.send] * d.x[d.recv]),
    "index_select": lambda d: scattered(d, d.x.index_select(0, d.send) + torch.index_select(d.x, 0, d.recv)),
    "gather function": lambda d: scattered(d, d.x.gather(0, d.send.unsqueeze(-1).expand(-1, 4))),
    "two layers": lambda d: scattered(d, torch.tanh(scattered(d, d.x[d.send]))[d.send]),
    "scatter_add": lambda d: torch.zeros_like(d.x).scatter_add_(0, d.recv.unsqueeze(-1).expand(-1, 4), d.x[d.send]),
    "scatter_add new": lambda d: torch.zeros_like(d.x).scatter_add(0, d.recv[:, None].repeat(1, 4), d.x[d.send]),
    "scatter_reduce": lambda d: torch.zeros_like(d.x).scatter_reduce(
        0, d.recv[:, None].expand(-1, 4), d.x[d.send], "sum"),
    "scatter mean": lambda d: torch.zeros_like(d.x).scatter_reduce(
        0, d.recv[:, None].expand(-1, 4), d.x[d.send], "mean", include_self=False),
    "index_put": lambda d: torch.zeros_like(d.x).index_put_((d.recv,), d.x[d.send], accumulate=True),
    "into senders": lambda d: scattered(d, torch.zeros_like(d.x).index_add_(0, d.send, d.x[d.recv] ** 2)[d.send]),
    "both ways": lambda d: torch.zeros_like(d.x).index_add_(0, d.recv, d.x[d.send]).index_add_(0, d.send, 2 * d.x[d.recv]),
    "fold": lambda d: scattered(d, scatter_to_owners(d.x * (1 if not isinstance(d.x, ShardTensor) else owned_mask(d)))[d.send]),
    "attention": attention,
    "filtered edges": filtered_edges,
    "plain rows": plain_rows,
    "plain accumulator": accumulate_in_plain,
    "through a view": written_through_a_view,
    "edges joined": lambda d: torch.zeros_like(d.x).index_add_(
        0, torch.cat([d.recv, d.recv]), torch.cat([d.x[d.send], d.x[d.recv]])),
    "edge_index": lambda d: scattered(d, d.x[torch.stack([d.recv, d.send])[1]] * d.x[torch.stack([d.recv, d.send]).long()[0]]),
    "cells": lambda d: torch.einsum("ni,nij->nj", d.pos, torch.linalg.inv(d.cell + torch.eye(3).double())[d.batch]),
    # systems
    "per system": lambda d: torch.zeros(S, 4, dtype=torch.float64).index_add_(0, d.batch, d.x) * 2,
    "per system, by edges": lambda d: d.x.new_zeros(S, 3).index_add(0, d.batch[d.recv], d.edge.abs()),
    "constant in the target": lambda d: torch.full((S, 4), 7.0).double().index_add_(0, d.batch, d.x),
    "constant added": lambda d: torch.zeros(S, 4, dtype=torch.float64).index_add_(0, d.batch, d.x) + 5.0,
    "nonlinear": lambda d: torch.zeros(S, 4, dtype=torch.float64).index_add_(0, d.batch, d.x).sqrt().log(),
    "counts": lambda d: torch.bincount(d.batch, minlength=S).double().unsqueeze(-1),
    "mean read back": lambda d: d.x - (system_sum(d.x, d.batch, S) / torch.bincount(d.batch, minlength=S)[:, None])[d.batch],
    "whole sum": lambda d: (d.x.sum() + d.x.sum(0)[1]).reshape(1),
    "whole mean": lambda d: d.x.mean(0) + d.x.mean() + d.edge.abs().mean(0, keepdim=True).sum(),
    "extremes": lambda d: (d.x.detach().max() + d.x.amin(0) + (d.x > 0.9).any() + (d.x > 0).all()).reshape(-1),
    "edges summed": lambda d: d.edge.abs().sum(0),
    "number": lambda d: torch.tensor([float(d.x.sum()), float(d.x[:, 0].sum().item())]),
    # gradients
    "forces inside": forces_inside,
    "whole energy": forces_of_a_whole_energy,
    "checkpoint": through_checkpoint,
    "double gradient": double_gradient,
}  # fmt: skip


def owned_mask(d):
    """1 for owned rows, 0 for ghosts: parts to fold."""
    n = d.x._context.n_owned
    return ShardTensor.wrap(
        (torch.arange(d.x.shape[0]) < n).double().unsqueeze(-1), RowInfo(RowKind.NODE, fresh=False), d.x._context
    )


def run_cases(comm, names):
    model = MpnnWrapper(Mpnn())
    parallel, owned = parallel_of(comm, model)
    whole = two_systems()
    whole.atom_id = torch.arange(whole.num_nodes)
    NeighborListHook(model.neighbor_config, skin=0.5).update(whole)
    single = fields(whole)
    epoch = owned.epoch
    positions = copy_to_ghosts(owned.positions, epoch.plan, parallel._transport)
    view = Batch({**epoch.static, "positions": positions}, {"cell": owned.cell, "pbc": owned.pbc}, epoch.batch_idx)
    view.neighbors = epoch.neighbors
    ids, n = epoch.static["atom_id"], epoch.plan.n_owned
    gaps = {}
    references = {name: CASES[name](single) for name in names}
    with forward_scope(model, SPEC_MPNN_HALO.distribution, epoch.plan, parallel._transport) as context:
        d = fields(as_row_tensors(view, context))
        for name in names:
            expected, got = references[name], CASES[name](d)
            if isinstance(got, tuple):
                got, expected = parallel.reduce.sum(got[1].detach()), expected[1].detach()
            elif isinstance(got, ShardTensor):
                info = got.row_info
                assert info.kind is not RowKind.EDGE
                if info.kind is RowKind.NODE:
                    rows = got.to_local().detach()
                    assert rows.shape[0] == context.n_padded, (name, rows.shape)
                    if info.fresh:
                        assert torch.allclose(rows[n:], expected[ids[n:]].detach(), rtol=1e-11, atol=1e-12), name
                    again = refresh_neighbors(got).to_local().detach()
                    assert torch.allclose(again[n:], expected[ids[n:]].detach(), rtol=1e-9, atol=1e-11), name
                    got, expected = rows[:n], expected[ids[:n]]
                else:
                    got = parallel.reduce.sum(got.to_local().detach()) if info.partial else got.to_local()
            gaps[name] = float((got.detach() - expected.detach()).abs().max() / expected.detach().abs().max())
    return gaps, [n, epoch.plan.n_ghost, whole.num_nodes]


@gloo
@pytest.mark.parametrize("size", [1, 3])
def test_operations_equal_one_process(size):
    for gaps, (owned, ghosts, total) in run_ranks(run_cases, size, list(CASES), launcher="gloo", timeout=120):
        assert size == 1 or owned + ghosts < total
        wrong = {k: v for k, v in gaps.items() if not v < 1e-11}
        assert not wrong
