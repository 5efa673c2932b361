"""The tutorial's simulation script: 1,000 argon atoms over the ranks that torchrun starts.

    torchrun --standalone --nproc_per_node=2 simulate.py POTENTIAL OUT
"""

import sys
from pathlib import Path

# --8<-- [start:imports]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nvalchemi_distributed import DomainConfig, DomainParallel, HookScope, pin_fp32
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics import ExtxyzSink, HostMemory, NVTLangevin, maxwell_boltzmann
from nvalchemi_distributed.dynamics.base import DynamicsStage
from nvalchemi_distributed.dynamics.hooks import SnapshotHook
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import PairPotentialWrapper

# --8<-- [end:imports]

potential, out = Path(sys.argv[1]), Path(sys.argv[2])

# --8<-- [start:pin]
pin_fp32()  # before models are built, and before a CUDA context exists
# --8<-- [end:pin]

# --8<-- [start:group]
dist.init_process_group(backend="gloo")  # "nccl" on GPUs
mesh = DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("domain",))
# --8<-- [end:group]

# --8<-- [start:integrator]
model = PairPotentialWrapper.from_artefact(potential)  # converted to Å, eV, amu, fs
own_atoms = HostMemory(capacity=20)
integrator = NVTLangevin(
    model=model,
    dt=4.0,  # fs
    temperature=115.0,  # K
    friction=0.01,  # 1/fs
    seed=1,
    hooks=[
        NeighborListHook(model.neighbor_config, skin=1.0, stage=DynamicsStage.BEFORE_COMPUTE),
        SnapshotHook(sink=own_atoms, frequency=20),
    ],
    n_steps=100,
)
# --8<-- [end:integrator]


# --8<-- [start:global]
class KineticEnergy:
    """Records the kinetic energy of the whole system; every rank computes the same number."""

    stage = DynamicsStage.AFTER_STEP
    scope = HookScope.GLOBAL
    frequency = 20

    def __init__(self):
        self.values = []

    def __call__(self, ctx, stage):
        """Gathered atoms come in `atom_id` order, so the sum is the same for any number of ranks."""
        whole = ctx.batch
        energy = 0.5 * (whole.atomic_masses * whole.velocities.square().sum(-1)).sum()
        self.values.append(float(energy))


# --8<-- [end:global]

# --8<-- [start:domain]
kinetic = KineticEnergy()
trajectory = SnapshotHook(sink=ExtxyzSink(out / "trajectory.extxyz"), frequency=20, scope=HookScope.GLOBAL)
dynamics = DomainParallel(
    dynamics=integrator,
    config=DomainConfig(cutoff=model.cutoff, skin=1.0, mesh=mesh),
    hooks=[kinetic, trajectory],
)
# --8<-- [end:domain]


# --8<-- [start:batch]
def build_batch():
    """1,000 atoms on a simple cubic lattice at 31.437 mol/L; it melts at once."""
    spacing = (1e27 / (31.437 * 6.02214076e23)) ** (1 / 3)  # Å
    axis = torch.arange(10, dtype=torch.float64)
    jitter = 0.1 * torch.rand(1000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = AtomicData(
        positions=(torch.cartesian_prod(axis, axis, axis) + jitter) * spacing,
        atomic_numbers=torch.full((1000,), 18),
        cell=torch.eye(3, dtype=torch.float64) * 10 * spacing,
        pbc=True,
    )
    batch = Batch.from_data_list([data])
    maxwell_boltzmann(batch, 115.0, seed=0)
    return batch


# --8<-- [end:batch]

# --8<-- [start:run]
out.mkdir(parents=True, exist_ok=True)
owned = dynamics.partition(build_batch() if dist.get_rank() == 0 else None)
dynamics.run(owned)
# --8<-- [end:run]

if dist.get_rank() == 0:
    print(f"rank 0 owns {owned.n_owned} atoms and {owned.n_ghost} ghosts")
    print(f"kinetic energy {kinetic.values[-1]:.3f} eV after {dynamics.step_count} steps")
# --8<-- [start:close]
dynamics.close()
dist.destroy_process_group()
# --8<-- [end:close]
