"""Langevin dynamics of one system with a MACE model, decomposed over ranks.

    torchrun --nproc_per_node=2 03_mace_nvt_distributed.py --model medium-0b2 --structure in.xyz --out run

``--model`` is a file, or a name that mace-torch has in its cache folder; nothing is downloaded. Without ``--structure``
a silicon crystal of ``--repeat`` cubic cells is used. The trajectory of the whole system goes into
``OUT/trajectory.extxyz`` (rank zero writes it, ASE opens it), a summary into ``OUT/summary.json``. Runs on one process
as well. Needs the ``mace`` and ``ase`` extras.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import ase.build
import ase.io
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distmd_protocol import Comm, LocalComm, rank_zero
from nvalchemi_distributed import DomainConfig, DomainParallel, HookScope, world_comm
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics import ExtxyzSink, HostMemory, NVTLangevin, maxwell_boltzmann
from nvalchemi_distributed.dynamics.base import DynamicsStage
from nvalchemi_distributed.dynamics.hooks import SnapshotHook
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models.mace import MACEWrapper
from nvalchemi_distributed.units import BOLTZMANN

_log = logging.getLogger("mace_nvt")


def main() -> None:
    """Command line to result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="medium-0b2", help="checkpoint: a file, or a name in MACE's cache folder")
    parser.add_argument("--structure", type=Path, help="any file that ASE reads; periodic or not")
    parser.add_argument("--repeat", type=int, nargs=3, default=(8, 4, 4), help="cells of silicon without --structure")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between frames")
    parser.add_argument("--temperature", type=float, default=300.0, help="K")
    parser.add_argument("--dt", type=float, default=0.5, help="fs")
    parser.add_argument("--friction", type=float, default=0.01, help="1/fs")
    parser.add_argument("--skin", type=float, default=0.5, help="Å")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    # torchrun sets RANK; on one process nothing is exchanged.
    parallel_run = dist.is_torchelastic_launched()
    comm: Comm = world_comm() if parallel_run else LocalComm()
    mesh = DeviceMesh("cpu", list(range(comm.size)), mesh_dim_names=("domain",)) if parallel_run else None

    rank_zero(comm, args.out.mkdir, parents=True, exist_ok=True)

    # 1. Wrap the model: the same wrapper as on a single process.
    dtype = getattr(torch, args.dtype)
    wrapper = MACEWrapper.from_checkpoint(args.model, dtype=dtype)

    # 2. The inner integrator, with the neighbour list it needs. Each rank also keeps its own atoms.
    sink = HostMemory(capacity=args.steps // args.every + 1)
    neighbors = NeighborListHook(wrapper.neighbor_config, skin=args.skin, stage=DynamicsStage.BEFORE_COMPUTE)
    integrator = NVTLangevin(
        model=wrapper,
        dt=args.dt,
        temperature=args.temperature,
        friction=args.friction,
        seed=args.seed,
        hooks=[neighbors, SnapshotHook(sink=sink, frequency=args.every)],
    )

    # 3. Decompose. The outer hook sees the whole system; rank zero writes it.
    frames = ExtxyzSink(args.out / "trajectory.extxyz", digits=9 if args.dtype == "float32" else 17)
    dynamics = DomainParallel(
        dynamics=integrator,
        config=DomainConfig(cutoff=float(wrapper.cutoff), skin=args.skin, mesh=mesh),
        n_steps=args.steps,
        hooks=[SnapshotHook(sink=frames, frequency=args.every, scope=HookScope.GLOBAL)],
    )

    # 4. The full batch on rank zero; every rank gets the atoms it owns.
    owned = dynamics.partition(initial_state(args, dtype) if comm.rank == 0 else None)

    # 5. Run.
    dynamics.run(owned)

    whole = dynamics.gather(owned)
    counts = comm.allgather([owned.n_owned, owned.n_ghost])
    summary = {
        "atoms": whole.num_nodes,
        "ranks": comm.size,
        "owned_and_ghosts": counts,
        "steps": dynamics.step_count,
        "rebuilds": dynamics.rebuilds,
        "frames_on_this_rank": len(sink),
        "energy_eV": float(whole.energy),
        "temperature_K": temperature(whole),
    }
    rank_zero(comm, report, args.out / "summary.json", summary)
    dynamics.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def initial_state(args: argparse.Namespace, dtype: torch.dtype) -> Batch:
    """The structure with Maxwell–Boltzmann velocities."""
    if args.structure is not None:
        atoms = ase.io.read(args.structure)
    else:
        atoms = ase.build.bulk("Si", cubic=True) * tuple(args.repeat)
        atoms.rattle(0.02, seed=args.seed)
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=dtype)])
    maxwell_boltzmann(batch, args.temperature, seed=args.seed)
    return batch


def temperature(batch: Batch) -> float:
    """Kinetic temperature in K."""
    kinetic = 0.5 * (batch.atomic_masses * batch.velocities.square().sum(-1)).sum()
    return float(2.0 * kinetic / (3 * batch.num_nodes * BOLTZMANN))


def report(file: Path, summary: dict[str, Any]) -> None:
    """Write and log the summary."""
    file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _log.info("%s", json.dumps(summary))


if __name__ == "__main__":
    main()
