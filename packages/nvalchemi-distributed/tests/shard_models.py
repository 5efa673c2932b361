"""A message-passing model in plain torch, its wrapper, and the checks that run it on ranks."""

from __future__ import annotations

import dataclasses
import warnings

import torch
from systems import random_system
from torch import nn

from nvalchemi_distributed import SPEC_MPNN_HALO, DomainConfig, DomainParallel
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.dynamics import NVE
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models.base import BaseModelMixin, ModelConfig
from nvalchemi_distributed.models.gradient import evaluate
from nvalchemi_distributed.neighbors import NeighborConfig

CUTOFF = 5.0


class Layer(nn.Module):
    """h_i ← h_i + W tanh(Σ_j f(r_ij) h_j); with ``both_ways`` each edge also writes to its sender."""

    def __init__(self, width, both_ways=False):
        super().__init__()
        self.mix, self.radial = nn.Linear(width, width), nn.Linear(4, width, bias=False)
        self.both_ways = both_ways

    def forward(self, node_feats, radial, edge_index):
        receivers, senders = edge_index
        weight = self.radial(radial)
        out = torch.zeros_like(node_feats)
        out.index_add_(0, receivers, weight * node_feats[senders])
        if self.both_ways:
            out.index_add_(0, senders, 0.5 * weight * node_feats[receivers])
        return node_feats + torch.tanh(self.mix(out))


class Mpnn(nn.Module):
    """``reads_mean``: every layer is followed by the subtraction of the mean feature of the atom's system."""

    def __init__(self, n_layers=2, width=6, both_ways=False, reads_mean=False, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Layer(width, both_ways) for _ in range(n_layers))
        self.readout = nn.Linear(width, 1)
        self.reads_mean = reads_mean
        self.double()

    def forward(self, positions, numbers, edge_index, shifts, batch, n_systems):
        receivers, senders = edge_index
        d = positions[senders] + shifts - positions[receivers]
        r = d.norm(dim=-1, keepdim=True)
        x = (r / CUTOFF).clamp(max=1.0)
        envelope = (1 - x * x) ** 3
        k = torch.arange(1, 5, dtype=r.dtype)
        radial = envelope * torch.cos(k * x)
        h = self.embed(numbers)
        for layer in self.layers:
            h = layer(h, radial, edge_index)
            if self.reads_mean:
                total = h.new_zeros(n_systems, h.shape[-1]).index_add_(0, batch, h)
                count = h.new_zeros(n_systems).index_add_(0, batch, torch.ones_like(h[:, 0]))
                h = h - 0.3 * (total / count.unsqueeze(-1))[batch]
        node_energy = self.readout(h).squeeze(-1)
        return torch.zeros(n_systems, dtype=h.dtype).index_add_(0, batch, node_energy)


class MpnnWrapper(nn.Module, BaseModelMixin):
    """Knows nothing of ranks."""

    def __init__(self, model, spec=SPEC_MPNN_HALO):
        super().__init__()
        self.model, self.spec = model, spec
        self.model_config = ModelConfig(
            outputs={"energy", "forces", "virial", "stress"},
            autograd_outputs={"forces", "virial", "stress"},
            neighbor_config=NeighborConfig(CUTOFF, "coo"),
        )

    @property
    def distribution_spec(self):
        return self.spec

    def forward(self, data):
        e = data.neighbors
        edge_index = torch.stack([e.receivers, e.senders])
        cell = data.cell[data.batch_idx[e.senders]]
        shifts = torch.einsum("ei,eij->ej", e.images.to(cell.dtype), cell)
        energy = self.model(data.positions, data.atomic_numbers, edge_index, shifts, data.batch_idx, data.num_graphs)
        return {"energy": energy.unsqueeze(-1)}


class OwnedEnergyWrapper(MpnnWrapper):
    """As a wrapper in plain tensors: only the atoms that receive count."""

    def forward(self, data):
        e = data.neighbors
        batch = data.batch_idx
        edge_index = torch.stack([e.receivers, e.senders])
        shifts = torch.einsum("ei,eij->ej", e.images.to(data.cell.dtype), data.cell[batch[e.senders]])
        per_atom = {}
        hook = self.model.readout.register_forward_hook(lambda _m, _i, out: per_atom.update(e=out))
        try:
            self.model(data.positions, data.atomic_numbers, edge_index, shifts, batch, data.num_graphs)
        finally:
            hook.remove()
        n = e.n_receivers
        energy = torch.zeros(data.num_graphs, 1, dtype=shifts.dtype)
        return {"energy": energy.index_add(0, batch[:n], per_atom["e"][:n])}


def with_outputs(spec, **changes):
    return dataclasses.replace(spec, outputs={**spec.outputs, **changes})


def two_systems():
    """Elongated, so that no rank of up to four sees everything."""
    return Batch.from_data_list(
        [
            random_system(8, sites=(10, 4, 4), tilt=0.3, fill=0.9),
            random_system(9, sites=(8, 4, 4), pbc=(True, False, True)),
        ]
    )


def parallel_of(comm, model, batch=None, grid=None, skin=0.5):
    batch = two_systems() if batch is None else batch
    integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=skin)])
    config = DomainConfig(cutoff=CUTOFF, skin=skin, grid_dims=grid, require_nondegenerate=comm.size > 1)
    parallel = DomainParallel(integrator, config)
    return parallel, parallel.partition(batch if comm.rank == 0 else None)


def reference_of(model, batch, create_graph=False):
    copy = batch.clone()
    NeighborListHook(model.neighbor_config).update(copy)
    return evaluate(model, copy, create_graph=create_graph)


def deviations(comm, model, names=("energy", "forces", "virial", "stress"), batch=None, grid=None, reference=None):
    """Largest relative deviation from one process, the traffic of one evaluation, and the ranks' sizes."""
    parallel, owned = parallel_of(comm, model, batch, grid)
    before = dict(parallel.traffic.by_name)
    parallel.evaluate(owned)
    traffic = {k: v - before.get(k, 0) for k, v in parallel.traffic.by_name.items() if v != before.get(k, 0)}
    whole = parallel.gather(owned)
    expected = reference_of(reference or model, whole)
    gap = {
        k: float((getattr(whole, k) - expected[k].detach()).abs().max() / expected[k].detach().abs().max())
        for k in names
    }
    return gap, traffic, [owned.n_owned, owned.n_ghost, whole.num_nodes]


class ScriptedLayer(nn.Module):
    """As :class:`Layer`, in the subset of Python that TorchScript reads."""

    def __init__(self, width: int):
        super().__init__()
        self.mix, self.radial = nn.Linear(width, width), nn.Linear(4, width, bias=False)

    def forward(self, node_feats: torch.Tensor, radial: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        message = self.radial(radial) * node_feats[edge_index[1]]
        out = torch.zeros_like(node_feats).index_add(0, edge_index[0], message)
        return node_feats + torch.tanh(self.mix(out))


class ScriptedBody(nn.Module):
    """The layers between an embedding and a readout, compiled as a whole."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, h: torch.Tensor, radial: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h, radial, edge_index)
        return h


class ScriptedMpnn(nn.Module):
    """Per-atom energies from a scripted body."""

    def __init__(self, n_layers=3, width=5):
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.readout = nn.Embedding(20, width), nn.Linear(width, 1)
        self.body = ScriptedBody([ScriptedLayer(width) for _ in range(n_layers)]).double()
        self.double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.body = torch.jit.script(self.body)

    def forward(self, positions, numbers, edge_index, shifts, batch, n_systems):
        d = positions[edge_index[1]] + shifts - positions[edge_index[0]]
        x = (d.norm(dim=-1, keepdim=True) / CUTOFF).clamp(max=1.0)
        radial = (1 - x * x) ** 3 * torch.cos(torch.arange(1, 5, dtype=x.dtype) * x)
        return self.readout(self.body(self.embed(numbers), radial, edge_index)).squeeze(-1)
