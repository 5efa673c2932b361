"""Ready-made quantities and observables in a trainer, under a barostat: each against the stored snapshots by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

from chemtrain_mpi import observables, quantities
from chemtrain_mpi.potentials import pair_energy_template

ANGLES = np.linspace(0.0, np.pi, 7)


@pytest.mark.once
def test_every_part_gives_what_the_snapshots_hold():
    energy = quantities.potential_energy(pair_energy_template(problems.TERMS))
    parts = {
        "energy": energy,
        "volume": quantities.volume(),
        "density": quantities.density(),
        "coordination": quantities.coordination_number(1.5),
        "angles": quantities.angular_distribution(ANGLES, 1.5),
        "velocity": quantities.velocity(),
    }
    read = {name: observables.average(name) for name in ("energy", "density", "coordination")}
    read |= {
        "expansion": observables.thermal_expansion("energy", "volume"),
        "compressibility": observables.compressibility("volume"),
        "adf": observables.normalized_histogram("angles", ANGLES),
        "vacf": observables.velocity_autocorrelation("velocity", [0, 1]),
    }
    targets = {"density": {"target": jnp.array([0.4]), "gamma": jnp.ones(1)}}
    run = problems.constant_pressure(1, quantities=parts, observables=read, targets=targets)
    trainer = problems.DifftreParallel(**run)
    trainer.initialize_trajstates()
    found = {name: value[0] for name, value in trainer.predict().items()}
    trajectory = trainer.trajectories[0]
    snapshots, kT = trajectory.snapshots, 1.0
    positions = np.asarray(snapshots.position, np.float64)
    boxes = np.asarray(jax.vmap(lambda state: state.box)(snapshots), np.float64)
    # jax-md makes a matrix of the edge, and scales it alike in all directions.
    volume = np.linalg.det(boxes)
    assert np.ptp(volume) > 0, "the barostat must move"
    assert np.isclose(found["density"], np.mean(27 / volume), rtol=1e-5)
    enthalpy = np.asarray(trajectory.reference_energy) + 0.5 * volume
    covariance = np.mean((volume - volume.mean()) * (enthalpy - enthalpy.mean()))
    assert np.isclose(found["expansion"], covariance / (volume.mean() * kT**2), rtol=1e-3)
    assert np.isclose(found["compressibility"], volume.var() / (volume.mean() * kT), rtol=1e-3)
    number = []
    for position, edge in zip(positions, np.cbrt(volume), strict=True):
        d = position[:, None] - position[None]
        r = np.linalg.norm((d - np.round(d)) * edge, axis=-1)
        number.append((np.sum(r < 1.5) - 27) / 27)
    assert np.isclose(found["coordination"], np.mean(number), rtol=1e-5)
    assert np.isclose(np.sum(found["adf"] * np.diff(ANGLES)), 1.0, rtol=1e-5)
    momenta = np.asarray(snapshots.momentum)
    assert np.isclose(found["vacf"][0], np.mean(np.sum(momenta**2, axis=-1)), rtol=1e-4)
