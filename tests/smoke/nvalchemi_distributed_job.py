"""Some steps of 216 argon atoms on one process, with nvalchemi-distributed's wheel and neither JAX nor MPI."""

import numpy as np
import torch

from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics import NVE, maxwell_boltzmann
from nvalchemi_distributed.dynamics.base import DynamicsStage
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import PairPotentialWrapper

axis = 3.8 * torch.arange(6, dtype=torch.float64)
data = AtomicData(
    positions=torch.cartesian_prod(axis, axis, axis),
    atomic_numbers=torch.full((216,), 18),
    cell=22.8 * torch.eye(3, dtype=torch.float64),
    pbc=True,
)
batch = Batch.from_data_list([data])
maxwell_boltzmann(batch, 50.0, seed=0)
model = PairPotentialWrapper("lennard_jones", {"epsilon": np.array([[0.0101]]), "sigma": np.array([[3.396]])}, 8.5)
integrator = NVE(
    model=model,
    dt=2.0,
    hooks=[NeighborListHook(model.neighbor_config, skin=1.0, stage=DynamicsStage.BEFORE_COMPUTE)],
    n_steps=20,
)
with DomainParallel(dynamics=integrator, config=DomainConfig(cutoff=model.cutoff, skin=1.0)) as dynamics:
    owned = dynamics.run(dynamics.partition(batch))
    assert owned.num_nodes == 216
    assert torch.isfinite(owned.forces).all()
    assert dynamics.step_count == 20
