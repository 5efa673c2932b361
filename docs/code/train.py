"""The tutorial's training script: two state points of liquid argon, a few updates.

    NPROC=1 mpirun -np 2 python train.py OUT
"""

import sys
from functools import partial
from pathlib import Path

# --8<-- [start:imports]
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_md import partition, simulate, space

from chemtrain_mpi import DifftreParallel, process_printouts
from chemtrain_mpi.observables import average, reduced_energy, reduced_pressure
from chemtrain_mpi.potentials import PairTerms, export_potential, pair_energy_template
from chemtrain_mpi.quantities import density, pair_energy_per_particle, pair_pressure
from distmd_protocol import Units, constants, latest

# --8<-- [end:imports]

out = Path(sys.argv[1])

# --8<-- [start:data]
KB = constants.BOLTZMANN_KJ_PER_MOL_K
PER_NM3 = constants.AVOGADRO_PER_MOL * 1e-24  # one mol/L in particles a nm³; also one MPa in kJ/mol/nm³

temperature = np.array([100.0, 120.0])  # K
rho = np.array([34.535731, 31.771959]) * PER_NM3
pressure = np.array([20.0, 20.0]) * PER_NM3
energy = np.array([-5.618864, -5.067891])  # residual internal energy, kJ/mol
kT = KB * temperature
# --8<-- [end:data]

# --8<-- [start:potential]
CUTOFF = 0.85  # nm
sampled = PairTerms("lennard_jones", CUTOFF, "shift")  # what truncated forces sample
reported = PairTerms("lennard_jones", CUTOFF, "none")  # what is compared: unshifted, with a tail correction


def to_parameters(theta):
    """Logarithms are trained, so that a step is a relative change and nothing turns negative."""
    return {name: jnp.exp(value) for name, value in theta.items()}


def energy_fn_template(theta):
    """Return the energy function of the trained parameters."""
    return pair_energy_template(sampled)(to_parameters(theta))


start = {"epsilon": jnp.log(KB * 110.0), "sigma": jnp.log(0.33)}
# --8<-- [end:potential]

# --8<-- [start:observables]
quantities = {
    "pressure": pair_pressure(reported, to_parameters),
    "energy": pair_energy_per_particle(reported, pair_energy_template(reported), to_parameters),
    "density": density(),
}
observables = {
    "Z": reduced_pressure("pressure", "density"),  # P / (ρ k_B T)
    "u/kT": reduced_energy("energy"),
    "pressure": average("pressure"),
    "energy": average("energy"),
}
targets = {
    "Z": {"target": jnp.float32(pressure / (rho * kT)), "gamma": jnp.ones(2)},
    "u/kT": {"target": jnp.float32(energy / kT), "gamma": jnp.ones(2)},
}
# --8<-- [end:observables]

# --8<-- [start:system]
cells = 3
basis = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
corners = np.stack(np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"), axis=-1).reshape(-1, 1, 3)
crystal = ((corners + basis + 0.25) / cells).reshape(-1, 3)  # fractional coordinates of 108 atoms
edges = (len(crystal) / rho) ** (1 / 3)
reference_states = {
    "position": jnp.asarray(np.broadcast_to(crystal, (2, *crystal.shape)), jnp.float32),
    "mass": jnp.full(2, 39.948, jnp.float32),
}
displacement, shift = space.periodic_general(float(edges[0]), fractional_coordinates=True)
neighbor_fn = partition.neighbor_list(
    displacement, float(edges[0]), CUTOFF, dr_threshold=0.1, fractional_coordinates=True, disable_cell_list=True
)
# --8<-- [end:system]

# --8<-- [start:trainer]
trainer = DifftreParallel(
    jax.random.PRNGKey(0),
    start,
    optax.adam(0.01),
    energy_fn_template,
    partial(simulate.nvt_langevin, shift_fn=shift, dt=0.008, kT=1.0, gamma=1.0),
    neighbor_fn,
    process_printouts(0.008, 6.4, 1.6, 0.16),  # time step, total, equilibration, between snapshots; ps
    {"kT": jnp.float32(kT), "box": jnp.float32(edges)},
    quantities,
    targets,
    observables,
    reference_states=reference_states,
    reweight_ratio=0.7,
    sim_batch_size=-1,
    parallelism="auto",
    checkpoint_path=out / "checkpoints",
)
trainer.initialize_trajstates(num_runs=1)
trainer.train(max_epochs=6, checkpoint_freq=3)
# --8<-- [end:trainer]

# --8<-- [start:export]
export_potential(
    out / "potential",
    reported,
    to_parameters(trainer.params),
    species=("Ar",),
    masses=(39.948,),
    units=Units("nm", "kJ/mol", "amu", "ps"),
    tail_correction=True,
    comm=trainer.comm,
)
# --8<-- [end:export]

# --8<-- [start:predict]
predicted = trainer.predict()  # every observable at every state point; collective
# --8<-- [end:predict]

if trainer.rank == 0:
    losses = [entry["loss"] for entry in trainer.history]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    for t, p, reference in zip(temperature, predicted["pressure"], pressure, strict=True):
        print(f"{t:.0f} K: {p / PER_NM3:.1f} MPa, reference {reference / PER_NM3:.1f} MPa")

# --8<-- [start:restore]
trainer.restore(latest(out / "checkpoints"))  # on every rank: continue from the newest checkpoint
# --8<-- [end:restore]
