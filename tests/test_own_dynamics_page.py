"""The page about own integrators: its thermostat gives the canonical ensemble, and the same on one process and two."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import pytest
import torch
from ase.build import bulk

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics import maxwell_boltzmann
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import LennardJonesModelWrapper
from nvalchemi_distributed.observables import kinetic_energy
from nvalchemi_distributed.units import BOLTZMANN

PAGE_CODE = Path(__file__).resolve().parents[1] / "docs" / "code" / "own_dynamics.py"


def thermostat(**keywords):
    return runpy.run_path(str(PAGE_CODE))["VelocityRescale"](**keywords)


def argon(repeat):
    atoms = bulk("Ar", a=5.4, cubic=True).repeat(repeat)
    atoms.rattle(0.05, seed=2)
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms)])
    maxwell_boltzmann(batch, 80.0, seed=1)
    return batch


def last_state(comm):
    model = LennardJonesModelWrapper(0.0104, 3.4, 5.5)
    hooks = [NeighborListHook(model.neighbor_config, skin=0.3)]
    integrator = thermostat(model=model, dt=4.0, temperature=120.0, relaxation=50.0, seed=5, hooks=hooks)
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.5, skin=0.3))
    owned = parallel.partition(argon((8, 3, 3)) if comm.rank == 0 else None)
    assert comm.size == 1 or owned.n_owned + owned.n_ghost < 288
    parallel.run(owned, 20)
    whole = parallel.gather()
    return whole.positions.tolist(), whole.velocities.tolist()


@pytest.mark.gloo
def test_two_ranks_equal_one_process():
    model = LennardJonesModelWrapper(0.0104, 3.4, 5.5)
    batch = argon((8, 3, 3))
    hooks = [NeighborListHook(model.neighbor_config, skin=0.3)]
    thermostat(model=model, dt=4.0, temperature=120.0, relaxation=50.0, seed=5, hooks=hooks).run(batch, 20)
    cell = batch.cell[0]
    for positions, velocities in run_ranks(last_state, 2, launcher="gloo"):
        apart = (torch.tensor(positions, dtype=torch.float64) - batch.positions) @ torch.linalg.inv(cell)
        assert float(((apart - apart.round()) @ cell).abs().max()) <= 1e-12 * float(batch.positions.abs().max())
        gap = (torch.tensor(velocities, dtype=torch.float64) - batch.velocities).abs().max()
        assert float(gap) <= 1e-12 * float(batch.velocities.abs().max())


def test_kinetic_energies_are_those_of_the_canonical_ensemble():
    """Without forces the factor alone draws them: mean and variance of a gamma distribution of 3N − 3 halves."""
    batch = argon((2, 1, 1))
    batch.forces = torch.zeros_like(batch.positions)
    integrator = thermostat(
        model=LennardJonesModelWrapper(0.0104, 3.4, 5.5), dt=1.0, temperature=80.0, relaxation=1.0, seed=3
    )
    found = []
    for integrator.step_count in range(6000):
        integrator.post_update(batch)
        found.append(float(kinetic_energy(batch)) / (BOLTZMANN * 80.0))
    values = torch.tensor(found)
    half = (3 * 8 - 3) / 2
    # Neighbours are correlated by exp(−1): some 2,800 independent draws.
    assert abs(float(values.mean()) - half) < 4 * (half / 2800) ** 0.5
    assert abs(float(values.var()) / half - 1) < 4 * (2 / 2800 + 6 / half / 2800) ** 0.5


def printed(comm):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(PAGE_CODE))["main"]()
    return out.getvalue()


@pytest.mark.gloo
def test_its_run_prints_the_same_energy_on_every_rank():
    first, second = (line.split() for line in run_ranks(printed, 2, launcher="gloo"))
    assert first[:2] == ["rank", "0:"]
    assert int(first[2]) + int(second[2]) == 512
    assert first[4] == second[4]
    assert 2.0 < float(first[4]) < 8.0
