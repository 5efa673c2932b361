"""Bring your own model: a descriptor network in plain torch, checked on several ranks, then run under NVE.

The model knows nothing of ranks, ghosts or this package. Its wrapper names the preset ``SPEC_MPNN_HALO``;
``trace_and_validate`` compares it with one process and the working spec is saved beside its weights.

    python 04_byo_pytorch_mpnn.py --out runs/byo                 # validate, save spec and report
    torchrun --nproc_per_node 2 04_byo_pytorch_mpnn.py --out runs/byo --simulate   # and run with the saved spec
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from nvalchemi_distributed import SPEC_MPNN_HALO, DomainConfig, DomainParallel, MLIPSpec, world_comm
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics import NVE, maxwell_boltzmann
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models.base import BaseModelMixin, ModelConfig, NeighborConfig, NeighborListFormat
from nvalchemi_distributed.validate import trace_and_validate


class DescriptorNetwork(nn.Module):
    """Radial symmetry functions of each atom (Behler and Parrinello, PRL 98, 146401 (2007), eq. 3), refined once by its
    neighbours' hidden features, then a network for the atom's energy. Å and eV.

    Args:
        cutoff: Å.
        n_radial: number of Gaussians.
        width: hidden features.
    """

    def __init__(self, cutoff: float = 5.0, n_radial: int = 8, width: int = 16) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.register_buffer("centres", torch.linspace(1.5, cutoff, n_radial))
        self.species = nn.Embedding(100, width)
        self.first = nn.Linear(n_radial + width, width)
        self.message = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(2 * width, width)
        self.energy = nn.Linear(width, 1)

    def forward(self, positions: Tensor, numbers: Tensor, edge_index: Tensor, shifts: Tensor, batch: Tensor, n: int):
        """Energies (S,) of S systems.

        Args:
            positions: (N, 3).
            numbers: (N,) atomic numbers.
            edge_index: (2, E) receivers and senders.
            shifts: (E, 3) Å, added to the senders' positions.
            batch: (N,) system of each atom.
            n: S.
        """
        receivers, senders = edge_index
        r = (positions[senders] + shifts - positions[receivers]).norm(dim=-1, keepdim=True)
        fade = 0.5 * (torch.cos(torch.pi * (r / self.cutoff).clamp(max=1.0)) + 1.0)
        radial = torch.exp(-4.0 * (r - self.centres) ** 2) * fade
        symmetry = torch.zeros(len(positions), radial.shape[-1], dtype=r.dtype)
        symmetry.index_add_(0, receivers, radial)
        h = torch.tanh(self.first(torch.cat([symmetry, self.species(numbers)], dim=-1)))
        gathered = torch.zeros_like(h).index_add_(0, receivers, fade * self.message(h)[senders])
        h = torch.tanh(self.second(torch.cat([h, gathered], dim=-1)))
        return torch.zeros(n, dtype=h.dtype).index_add_(0, batch, self.energy(h).squeeze(-1))


class DescriptorWrapper(nn.Module, BaseModelMixin):
    """What the framework asks for: a configuration, the model's inputs out of a batch, its outputs by name."""

    def __init__(self, model: DescriptorNetwork) -> None:
        super().__init__()
        self.model = model
        self.model_config = ModelConfig(
            outputs=frozenset({"energy", "forces", "stress"}),
            autograd_outputs=frozenset({"forces", "stress"}),
            neighbor_config=NeighborConfig(cutoff=model.cutoff, format=NeighborListFormat.COO),
        )

    @property
    def distribution_spec(self) -> MLIPSpec:
        """Plain torch and message passing: the preset."""
        return SPEC_MPNN_HALO

    def adapt_input(self, data: Batch) -> dict[str, Tensor | int]:
        """The model's arguments out of a batch."""
        edges = data.neighbors
        cells = data.cell[data.batch_idx[edges.senders]]
        return {
            "positions": data.positions,
            "numbers": data.atomic_numbers,
            "edge_index": torch.stack([edges.receivers, edges.senders]),
            "shifts": torch.einsum("ei,eij->ej", edges.images.to(cells.dtype), cells),
            "batch": data.batch_idx,
            "n": data.num_graphs,
        }

    def adapt_output(self, raw: Tensor, data: Batch) -> dict[str, Tensor]:
        """The model's result by name."""
        return {"energy": raw.unsqueeze(-1)}

    def forward(self, data: Batch) -> dict[str, Tensor]:
        """The energy (S, 1); forces and stress are its gradient, which the framework takes."""
        return self.adapt_output(self.model(**self.adapt_input(data)), data)


def make_model() -> DescriptorWrapper:
    """Equal weights on every rank: at the top of the file, where ranks find it."""
    torch.manual_seed(7)
    return DescriptorWrapper(DescriptorNetwork().double())


def make_batch(repeat: int = 8) -> Batch:
    """A long bar of fcc copper, slightly disordered."""
    a = 3.7
    corners = torch.cartesian_prod(torch.arange(repeat), torch.arange(3), torch.arange(3)).double()
    base = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=torch.float64)
    x = (corners[:, None] + base).reshape(-1, 3) * a
    x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    cell = torch.diag(torch.tensor([repeat * a, 3 * a, 3 * a], dtype=torch.float64))
    return Batch.from_data_list([AtomicData(x, torch.full((len(x),), 29), cell=cell, pbc=True)])


def validate(out: Path, ranks: int) -> None:
    """Compare with one process; write the working spec and the report."""
    report = trace_and_validate(make_model, make_batch(), world_size=ranks, rtol=1e-8)
    print(report.log_summary)
    report.save(out / "report.json")
    if not report.ok:
        raise SystemExit(report.next_action)
    report.spec.save(out / "spec.json")


def run(out: Path, steps: int) -> None:
    """NVE with the saved spec."""
    comm = world_comm()
    model = make_model()
    spec = MLIPSpec.load(out / "spec.json")
    integrator = NVE(model, dt=0.5, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    config = DomainConfig(cutoff=model.cutoff, skin=0.5, require_nondegenerate=comm.size > 1)
    dynamics = DomainParallel(integrator, config, n_steps=steps, spec=spec)
    batch = make_batch()
    maxwell_boltzmann(batch, 300.0, seed=2)
    owned = dynamics.partition(batch if comm.rank == 0 else None)
    dynamics.evaluate(owned)

    def total() -> float:
        kinetic = 0.5 * (owned.atomic_masses * (owned.velocities**2).sum(-1)).sum()
        return float(owned.energy.sum() + dynamics.reduce.sum(kinetic))

    before = total()
    dynamics.run(owned)
    after = total()
    if comm.rank == 0:
        result = {"ranks": comm.size, "atoms": dynamics.gather(owned).num_nodes, "energy_before": before,
                  "energy_after": after}  # fmt: skip
        (out / "run.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
        print(f"{comm.size} ranks, {steps} steps: energy {before:.6f} -> {after:.6f} eV")
    else:
        dynamics.gather(owned)
    dynamics.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for spec.json, report.json and run.json")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the validation")
    parser.add_argument("--simulate", action="store_true", help="run with the saved spec (under torchrun)")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.simulate:
        run(args.out, args.steps)
    else:
        validate(args.out, args.ranks)


if __name__ == "__main__":
    main()
