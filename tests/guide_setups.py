"""What the guides leave to the reader, for each of their code blocks, and the figures that a test looks at."""

DIFFTRE_BEFORE = '''
"""The names that the guide's snippet uses: four state points of 27 Lennard-Jones particles."""
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_md import partition, simulate, space

from chemtrain import process_printouts
from chemtrain.observables import average
from chemtrain.potentials import PairTerms, pair_energy_template
from chemtrain.quantities import pair_pressure

EDGE, CUTOFF, DT = 4.0, 1.7, 0.005
terms = PairTerms("lennard_jones", CUTOFF, "shift")
displacement, shift = space.periodic_general(EDGE, fractional_coordinates=True)
grid = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)

key = jax.random.PRNGKey(0)
init_params = {"epsilon": jnp.float32(0.9), "sigma": jnp.float32(0.95)}
optimizer = optax.adam(0.01)
energy_fn_template = pair_energy_template(terms)
simulator_template = partial(simulate.nvt_langevin, shift_fn=shift, dt=DT, kT=1.0, gamma=1.0)
neighbor_fn = partition.neighbor_list(
    displacement, EDGE, CUTOFF, dr_threshold=0.7, fractional_coordinates=True, disable_cell_list=True
)
timings = process_printouts(DT, 0.5, 0.1, 0.05)
state_kwargs = {"kT": jnp.float32([1.0, 1.2, 1.4, 1.6]), "box": jnp.full(4, EDGE, jnp.float32)}
quantities = {"pressure": pair_pressure(terms)}
targets = {"pressure": {"target": jnp.float32([2.0, 2.4, 2.8, 3.2]), "gamma": jnp.ones(4)}}
observables = {"pressure": average("pressure")}
reference_states = {"position": jnp.broadcast_to(jnp.float32((grid + 0.5) / 3), (4, 27, 3))}
'''

DIFFTRE_AFTER = """
import json
import pathlib

pathlib.Path(f"rank{trainer.rank}.json").write_text(json.dumps({
    "module": DifftreParallel.__module__,
    "size": trainer.size,
    "updates": len(trainer.history),
    "batches": sorted({tuple(entry["batch"]) for entry in trainer.history}),
    "recomputed": sum(len(entry["recomputed"]) for entry in trainer.history),
    "losses": [trainer.history[0]["loss"], min(entry["loss"] for entry in trainer.history)],
    "params": {name: float(value).hex() for name, value in trainer.params.items()},
}))
"""

SIMULATIONS_BEFORE = '''
"""The names that the guide's blocks use: argon in a long box, so that two ranks hold different atoms."""
import itertools
import json
import os
import pathlib


def build_my_batch(device):
    repeat, a = (8, 2, 2), 5.6
    basis = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
    corners = torch.tensor(list(itertools.product(*(range(r) for r in repeat))))
    positions = (corners[:, None] + basis + 0.25).reshape(-1, 3) * a
    jitter = torch.rand(positions.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    cell = torch.diag(torch.tensor(repeat) * a)
    numbers = torch.full((len(positions),), 18)
    atoms = AtomicData((positions + 0.2 * jitter).double(), numbers, cell=cell.double(), pbc=True)
    return Batch.from_data_list([atoms]).to(device)


def report(name, **figures):
    pathlib.Path(f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(figures))
'''

AFTER_PIN_FP32 = """
import torch

report(
    "pin_fp32",
    module=pin_fp32.__module__,
    variable=os.environ.get("NVIDIA_TF32_OVERRIDE"),
    precision=torch.get_float32_matmul_precision(),
)
"""

# The block ends by destroying the group; its figures are still there.
AFTER_MACE = """
report(
    "mace",
    model=type(wrapper).__module__,
    owned=owned.num_nodes,
    ghosts=len(owned.epoch.batch_idx) - owned.num_nodes,
    total=owned.census.n_atoms,
    steps=sink.steps,
    atoms=[sink[i].num_nodes for i in range(len(sink))],
    finite=bool(torch.isfinite(owned.positions).all()),
)
"""

# The block goes between, indented.
BEFORE_COMPILE = "\ntry:\n"
AFTER_COMPILE = """
except Exception as refusal:
    report("compile", error=type(refusal).__name__, message=str(refusal))
else:
    report("compile", error=None, message="accepted")
"""

# A store of its own: under torchrun a second group would find the addresses of the first, which is gone,
# in the launcher's store, and a rank that is ahead would wait for them.
BEFORE_GLOBAL_HOOK = """
store = f"file://{pathlib.Path('second_group').absolute()}"
dist.init_process_group("gloo", store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
from nvalchemi.distributed import DomainConfig, DomainParallel
from nvalchemi.dynamics import NVE

n_steps = 3
domain_cfg = DomainConfig(cutoff=5.0, skin=0.5)
model = wrapper
my_integrator = NVE(model=model, dt=2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
"""

AFTER_GLOBAL_HOOK = """
full = build_my_batch(torch.device("cpu"))
generator = torch.Generator().manual_seed(1)
full.velocities = 0.01 * torch.randn(full.positions.shape, generator=generator, dtype=torch.float64)
expected = float(0.5 * (full.atomic_masses * (full.velocities**2).sum(-1)).sum())
owned = dynamics.partition(full if dist.get_rank() == 0 else None)
share = float(0.5 * (owned.atomic_masses * (owned.velocities**2).sum(-1)).sum())
seen = []


class Watch:
    stage = DynamicsStage.AFTER_STEP
    scope = HookScope.LOCAL
    frequency = 1

    def __call__(self, ctx, stage):
        seen.append(float(my_integrator.global_kinetic_energy))


dynamics.hooks.append(Watch())
dynamics.run(owned)
report("global_hook", seen=seen, expected=expected, share=share, atoms=[owned.num_nodes, full.num_nodes])
dynamics.close()
dist.destroy_process_group()
"""
