"""MACE, random weights, NVE: milliseconds a step decomposed over ranks, beside the bare model.

    python benchmarks/mace_scaling.py [--ranks 1 2] [--dtypes float64 float32] [--steps 4] [--script] [--json FILE]

1024 atoms, fcc a = 4.5 Å jittered by 0.1 Å in 18 × 18 × 72 Å, two layers of 32x0e + 32x1o, r_max 5 Å, correlation 2,
max_ell 2, skin 0.5 Å, 1 fs. "Model alone" is MACE's own forward with forces, on the graph within r_max, without
neighbour list, integrator or ranks. Times are minima and medians over blocks; one thread a rank. Where other work
shares the cores they measure the machine: the processor time of the busiest rank says more there. Needs the ``mace``
extra.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from _graph_scaling import Problem, main, parser

LATTICE, JITTER, CELLS, CUTOFF, KELVIN = 4.5, 0.1, (4, 4, 16), 5.0, 300.0


def network(dtype: torch.dtype, scripted: bool) -> torch.nn.Module:
    """The random-weight network."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # mace first: it lets this e3nn read its own constants.
        import mace.modules.blocks as blocks
        import numpy as np
        from e3nn import o3
        from e3nn.util.jit import compile as script
        from mace.modules.models import ScaleShiftMACE

        model = ScaleShiftMACE(
            r_max=CUTOFF,
            num_bessel=8,
            num_polynomial_cutoff=5,
            max_ell=2,
            interaction_cls=blocks.RealAgnosticResidualInteractionBlock,
            interaction_cls_first=blocks.RealAgnosticResidualInteractionBlock,
            num_interactions=2,
            num_elements=1,
            hidden_irreps=o3.Irreps("32x0e+32x1o"),
            MLP_irreps=o3.Irreps("16x0e"),
            atomic_energies=np.array([0.0]),
            avg_num_neighbors=22.0,
            atomic_numbers=[18],
            correlation=2,
            gate=torch.nn.functional.silu,
            atomic_inter_scale=0.01,
            atomic_inter_shift=0.0,
        )
        model = model.eval().requires_grad_(False)
        model = script(model) if scripted else model
    torch.set_default_dtype(torch.float32)
    return model


def wrapper(dtype: torch.dtype, scripted: bool) -> Any:
    """The network, wrapped."""
    from nvalchemi_distributed.models.mace import MACEWrapper

    return MACEWrapper(network(dtype, scripted))


def crystal(dtype: torch.dtype) -> Any:
    """The batch, with velocities."""
    from nvalchemi_distributed.data import AtomicData, Batch
    from nvalchemi_distributed.dynamics import maxwell_boltzmann

    axes = [torch.arange(n, dtype=torch.float64) for n in CELLS]
    base = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=torch.float64)
    x = (torch.cartesian_prod(*axes)[:, None] + base).reshape(-1, 3) * LATTICE
    x += JITTER * torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cell = LATTICE * torch.diag(torch.tensor(CELLS, dtype=torch.float64))
    batch = Batch.from_data_list([AtomicData(x, torch.full((len(x),), 18), cell=cell, pbc=True)])
    maxwell_boltzmann(batch, KELVIN, seed=1)
    return batch.to(dtype=dtype)


def alone(model: Any, batch: Any) -> Callable[[], object]:
    """MACE's own forward with forces."""
    from nvalchemi_distributed.neighbors import build_neighbor_list

    edges = build_neighbor_list(batch.positions, batch.cell, batch.pbc, batch.batch_idx, CUTOFF)
    dtype, n = batch.dtype, batch.num_nodes
    whole = -edges.images.to(dtype)

    def forward() -> object:
        data = {
            "positions": batch.positions.clone(),
            "node_attrs": torch.ones(n, 1, dtype=dtype),
            "edge_index": torch.stack([edges.senders, edges.receivers]),
            "unit_shifts": whole,
            "shifts": whole @ batch.cell[0],
            "cell": batch.cell[0],
            "batch": torch.zeros(n, dtype=torch.int64),
            "ptr": torch.tensor([0, n]),
            "head": torch.zeros(1, dtype=torch.int64),
        }
        return model.model(data, compute_force=True)

    return forward


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--script", action="store_true", help="the network as TorchScript")
    args = options.parse_args()
    problem = Problem(
        work="mace-script" if args.script else "mace",
        model=lambda dtype: wrapper(dtype, args.script),
        batch=crystal,
        alone=alone,
        cutoff=CUTOFF,
        skin=0.5,
        dt=1.0,
        packages=("mace-torch", "e3nn"),
    )
    main(__file__, problem, args, ["--script"] if args.script else [])
