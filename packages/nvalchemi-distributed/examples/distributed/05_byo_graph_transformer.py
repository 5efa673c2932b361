"""Bring your own kernel: a graph transformer whose attention is a custom op, adapted by one declaration.

What happens inside a kernel registered with ``torch.library`` cannot be seen, so an :class:`OpAdapter` says what it
means over ranks: which arguments are rows of atoms, and what its output is. Left out, the validation names the op.

    python 05_byo_graph_transformer.py --out runs/transformer
    python 05_byo_graph_transformer.py --out runs/transformer --without-adapter
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_distributed import SPEC_MPNN_HALO, DistributionSpec, MLIPSpec, OpAdapter, OutputKind, OutputSpec
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.models.base import BaseModelMixin, ModelConfig, NeighborConfig, NeighborListFormat
from nvalchemi_distributed.ops import KeepRows
from nvalchemi_distributed.validate import trace_and_validate


@torch.library.custom_op("byo::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, receivers: Tensor, senders: Tensor) -> Tensor:
    """Σ_j softmax_j(q_i·k_j/√d + b_ij) v_j over the neighbours j of each atom i.

    Args:
        query, key, value: (N, d) rows of atoms.
        bias: (E,) of each edge; −∞ switches it off.
        receivers, senders: (E,) the ends i and j.

    Returns:
        (N, d); zero for atoms that receive nothing.
    """
    score = (query[receivers] * key[senders]).sum(-1) / query.shape[-1] ** 0.5 + bias
    top = torch.zeros_like(query[:, 0]).scatter_reduce(0, receivers, score, "amax", include_self=True)
    weight = torch.exp(score - top[receivers])
    norm = torch.zeros_like(top).index_add(0, receivers, weight).clamp_min(1e-30)
    out = torch.zeros_like(value)
    return out.index_add(0, receivers, (weight / norm[receivers]).unsqueeze(-1) * value[senders])


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, bias, receivers, senders, out = ctx.saved_tensors
    scale = query.shape[-1] ** -0.5
    score = (query[receivers] * key[senders]).sum(-1) * scale + bias
    top = torch.zeros_like(query[:, 0]).scatter_reduce(0, receivers, score, "amax", include_self=True)
    weight = torch.exp(score - top[receivers])
    weight = weight / torch.zeros_like(top).index_add(0, receivers, weight).clamp_min(1e-30)[receivers]
    g = grad[receivers]
    d_value = torch.zeros_like(value).index_add(0, senders, weight.unsqueeze(-1) * g)
    d_score = weight * ((g * value[senders]).sum(-1) - (g * out[receivers]).sum(-1))
    d_query = torch.zeros_like(query).index_add(0, receivers, (d_score * scale).unsqueeze(-1) * key[senders])
    d_key = torch.zeros_like(key).index_add(0, senders, (d_score * scale).unsqueeze(-1) * query[receivers])
    return d_query, d_key, d_value, d_score, None, None


attention.register_autograd(_backward, setup_context=_setup)

ADAPTER = OpAdapter("byo::attention", output_transforms={0: KeepRows(kind="node")})
"""Receivers are owned atoms, so owned rows of the output are complete; key and value reach the kernel with fresh
ghosts, as every argument with rows of atoms does."""


class Block(nn.Module):
    """Attention over neighbours and a feed-forward layer, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, h: Tensor, bias: Tensor, receivers: Tensor, senders: Tensor) -> Tensor:
        """(N, width) features to the same."""
        h = h + torch.ops.byo.attention(self.query(h), self.key(h), self.value(h), bias, receivers, senders)
        return h + self.mix(h)


class GraphTransformer(nn.Module):
    """Energies from attention whose bias falls to −∞ at the cutoff.

    Args:
        cutoff: Å.
        width: features.
        n_blocks: depth.
    """

    def __init__(self, cutoff: float = 5.0, width: int = 12, n_blocks: int = 2) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.species = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))
        self.energy = nn.Linear(width, 1)

    def forward(self, r: Tensor, numbers: Tensor, receivers: Tensor, senders: Tensor) -> Tensor:
        """(N, 1) energies of the atoms, from (E,) distances in Å."""
        x = r / self.cutoff
        near = x < 1.0
        # Beyond the cutoff (edges of a list with skin) the logarithm is not taken: its gradient would be 0 · ∞.
        bias = torch.where(near, 3.0 * torch.log(torch.where(near, 1.0 - x**2, 1.0)) - x, -torch.inf)
        h = self.species(numbers)
        for block in self.blocks:
            h = block(h, bias, receivers, senders)
        return self.energy(h)


class TransformerWrapper(nn.Module, BaseModelMixin):
    """Energy, and forces by the backward formula that the kernel registers."""

    def __init__(self, model: GraphTransformer, adapted: bool = True) -> None:
        super().__init__()
        self.model, self.adapted = model, adapted
        self.model_config = ModelConfig(
            outputs=frozenset({"energy", "forces"}),
            autograd_outputs=frozenset({"forces"}),
            neighbor_config=NeighborConfig(cutoff=model.cutoff, format=NeighborListFormat.COO),
        )

    @property
    def distribution_spec(self) -> MLIPSpec:
        """The preset, and the meaning of the kernel."""
        distribution = DistributionSpec(custom_ops=(ADAPTER,) if self.adapted else ())
        outputs = {"energy": OutputSpec(OutputKind.PER_GRAPH), "forces": OutputSpec(OutputKind.PER_NODE)}
        return dataclasses.replace(SPEC_MPNN_HALO, distribution=distribution, outputs=outputs, name="graph transformer")

    def forward(self, data: Batch) -> dict[str, Tensor]:
        """The energy (S, 1)."""
        edges, x = data.neighbors, data.positions
        cells = data.cell[data.batch_idx[edges.senders]]
        shifts = torch.einsum("ei,eij->ej", edges.images.to(cells.dtype), cells)
        r = (x[edges.senders] + shifts - x[edges.receivers]).norm(dim=-1)
        per_atom = self.model(r, data.atomic_numbers, edges.receivers, edges.senders)
        energy = torch.zeros(data.num_graphs, 1, dtype=per_atom.dtype)
        return {"energy": energy.index_add_(0, data.batch_idx, per_atom)}


def make_model() -> TransformerWrapper:
    """Equal weights on every rank."""
    torch.manual_seed(3)
    return TransformerWrapper(GraphTransformer().double())


def make_model_without_adapter() -> TransformerWrapper:
    """The same model, and nothing that says what its kernel means."""
    torch.manual_seed(3)
    return TransformerWrapper(GraphTransformer().double(), adapted=False)


def make_batch(repeat: int = 9) -> Batch:
    """A long bar of disordered rock salt."""
    a = 2.9
    grid = torch.cartesian_prod(torch.arange(repeat + 2), torch.arange(4), torch.arange(4)).double()
    x = grid * a + 0.2 * torch.randn(grid.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    numbers = torch.where(grid.sum(-1) % 2 == 0, 11, 17)
    cell = torch.diag((grid.max(0).values + 1) * a)
    return Batch.from_data_list([AtomicData(x, numbers, cell=cell, pbc=True)])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for spec.json and report.json")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--without-adapter", action="store_true", help="see what the validation says then")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    factory = make_model_without_adapter if args.without_adapter else make_model
    report = trace_and_validate(factory, make_batch(), world_size=args.ranks, rtol=1e-8)
    print(report.log_summary)
    report.save(args.out / "report.json")
    if not report.ok:
        raise SystemExit(report.next_action)
    report.spec.save(args.out / "spec.json")


if __name__ == "__main__":
    main()
