"""SevenNet-0 with its shipped weights, NVE: milliseconds a step and memory over ranks, beside the bare model.

    python benchmarks/sevennet_scaling.py [--ranks 1 2] [--dtypes float32] [--steps 1] [--cells 2 2 16] [--json FILE]

Silicon, diamond a = 5.43 Å jittered by 0.05 Å, 512 atoms in 11 × 11 × 87 Å, 300 K, skin 0.5 Å, 1 fs. "Model alone" is
SevenNet's own forward with forces and stress, which cannot be left out there, on the graph within its cutoff of 5 Å,
without neighbour list, integrator or ranks. Times are minima and medians over blocks; one thread a rank. Needs the
``models`` extra.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _graph_scaling import Problem, main, parser

LATTICE, JITTER, CUTOFF, KELVIN = 5.43, 0.05, 5.0, 300.0


def wrapper(dtype: torch.dtype) -> Any:
    """The network with its shipped weights, wrapped."""
    from nvalchemi_distributed.models.sevennet import SevenNetWrapper

    return SevenNetWrapper.from_checkpoint("SevenNet-0", dtype=dtype)


def crystal(cells: list[int], dtype: torch.dtype) -> Any:
    """The batch, with velocities."""
    from ase.build import bulk

    from nvalchemi_distributed.data import AtomicData, Batch
    from nvalchemi_distributed.dynamics import maxwell_boltzmann

    atoms = bulk("Si", a=LATTICE, cubic=True).repeat(cells)
    atoms.rattle(JITTER, seed=0)
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms)])
    maxwell_boltzmann(batch, KELVIN, seed=1)
    return batch.to(dtype=dtype)


def alone(model: Any, batch: Any) -> Callable[[], object]:
    """SevenNet's own forward, its gradient included."""
    import sevenn._keys as KEY

    from nvalchemi_distributed.neighbors import build_neighbor_list

    edges = build_neighbor_list(batch.positions, batch.cell, batch.pbc, batch.batch_idx, CUTOFF)
    dtype, n = batch.dtype, batch.num_nodes
    shift = edges.images.to(dtype) @ batch.cell[0]
    vectors = batch.positions[edges.senders] + shift - batch.positions[edges.receivers]
    volume = batch.cell[0].det().abs()

    def forward() -> object:
        data = {
            KEY.NODE_FEATURE: batch.atomic_numbers,
            KEY.ATOMIC_NUMBERS: batch.atomic_numbers,
            KEY.EDGE_IDX: torch.stack([edges.receivers, edges.senders]),
            KEY.EDGE_VEC: vectors.clone().requires_grad_(True),
            KEY.CELL_VOLUME: volume,
            KEY.NUM_ATOMS: torch.tensor(n),
            KEY.BATCH: torch.zeros(0, dtype=torch.int64),
        }
        return model.model(data)

    return forward


if __name__ == "__main__":
    options = parser(__doc__)
    options.set_defaults(dtypes=["float32"], steps=1)
    options.add_argument(
        "--cells", type=int, nargs=3, default=[2, 2, 16], help="cubic cells of 8 atoms along each axis"
    )
    args = options.parse_args()
    problem = Problem(
        work="sevennet-0-silicon",
        model=wrapper,
        batch=partial(crystal, args.cells),
        alone=alone,
        cutoff=CUTOFF,
        skin=0.5,
        dt=1.0,
        packages=("sevenn", "e3nn"),
    )
    main(__file__, problem, args, ["--cells", *map(str, args.cells)])
