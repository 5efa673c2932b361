"""Ensembles against published numbers, and long runs: `slow` tests, with a short form of each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from systems import fcc, lj

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.dynamics import NVE, NVTLangevin, maxwell_boltzmann
from nvalchemi_distributed.dynamics.base import DynamicsStage
from nvalchemi_distributed.dynamics.hooks import LoggingHook
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import LennardJonesModelWrapper
from nvalchemi_distributed.observables import kinetic_energy
from nvalchemi_distributed.units import BOLTZMANN, EV_PER_CUBIC_ANGSTROM_IN_MPA, FEMTOSECOND

pytestmark = pytest.mark.gloo

EPS, SIG, MASS = 0.01, 3.4, 39.948


def lj_fluid(comm, cells, equilibrate, measure, dt_star):
    """U/N and P in reduced units at T* = 1.4, ρ* = 0.9, r_cut = 2.5 σ shifted to zero; block-averaged errors."""
    a = (4 / 0.9) ** (1 / 3) * SIG
    tau = SIG * math.sqrt(MASS / EPS) / FEMTOSECOND  # fs
    batch = Batch.from_data_list([fcc(cells, a=a, jitter=0.1)])
    kelvin = 1.4 * EPS / BOLTZMANN
    maxwell_boltzmann(batch, kelvin, seed=4)
    model = LennardJonesModelWrapper(EPS, SIG, 2.5 * SIG, smoothing="shift")
    integrator = NVTLangevin(
        model,
        dt_star * tau,
        kelvin,
        0.5 / tau,
        seed=12,
        hooks=[NeighborListHook(model.neighbor_config, skin=0.4 * SIG)],
    )
    parallel = DomainParallel(integrator, DomainConfig(cutoff=2.5 * SIG, skin=0.4 * SIG))
    owned = parallel.partition(batch if comm.rank == 0 else None)
    parallel.run(owned, equilibrate)
    log = LoggingHook(frequency=8)
    parallel.hooks.append(log)
    parallel.run(owned, measure)
    table = np.array(log.records)
    n = 4 * cells**3

    def block(values, blocks=16):
        means = values[: len(values) // blocks * blocks].reshape(blocks, -1).mean(1)
        return float(values.mean()), float(means.std(ddof=1) / math.sqrt(blocks))

    return [block(table[:, 2] / n / EPS), block(table[:, 5] / EV_PER_CUBIC_ANGSTROM_IN_MPA * SIG**3 / EPS)]


def check_fluid(result, floor):
    """HOOMD-blue's validation suite (lj_equation_of_state): U/N = −4.6622 ± 0.0006, P* = 6.6462 ± 0.0033."""
    (u, u_error), (p, p_error) = result
    assert abs(u + 4.6622) < 3 * math.hypot(u_error, 0.0006) + floor
    assert abs(p - 6.6462) < 3 * math.hypot(p_error, 0.0033) + 6 * floor


def test_lj_fluid_short():
    """A few thousand steps of 256 atoms: finite size and few samples, so a generous floor."""
    check_fluid(run_ranks(lj_fluid, 1, 4, 1000, 2400, 0.005, launcher="gloo", timeout=200)[0], 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "cells"), [(1, 6), (2, 8)])
def test_lj_fluid_at_the_published_point(size, cells):
    check_fluid(run_ranks(lj_fluid, size, cells, 2**10, 2**16, 0.005, launcher="gloo", timeout=7200)[0], 0.0)


class EnergyRecord:
    """Total energy of the whole system every 50 steps."""

    stage = DynamicsStage.AFTER_STEP
    frequency = 50

    def __init__(self):
        self.values = []

    def __call__(self, ctx, stage):
        self.values.append(float(ctx.batch.energy + kinetic_energy(ctx.batch, ctx.reduce)))


def drift(comm, steps):
    """Slope of the total energy, eV a step, of 500 atoms in NVE."""
    batch = Batch.from_data_list([fcc(5, a=5.5)])
    maxwell_boltzmann(batch, 200.0, seed=6)
    model = lj(6.5, smoothing="shift")
    integrator = NVE(model, 4.0, hooks=[NeighborListHook(model.neighbor_config, skin=1.0)])
    record = EnergyRecord()
    parallel = DomainParallel(integrator, DomainConfig(cutoff=6.5, skin=1.0), n_steps=steps, hooks=[record])
    parallel.run(parallel.partition(batch if comm.rank == 0 else None))
    values = torch.tensor(record.values, dtype=torch.float64)
    return [float(np.polyfit(np.arange(len(values)) * 50, values.numpy(), 1)[0]), float(values.std())]


@pytest.mark.slow
def test_energy_drift_does_not_grow_with_ranks():
    """D16: 10,000 steps of 500 atoms at 1, 2 and 4 ranks."""
    one = run_ranks(drift, 1, 10_000, launcher="gloo", timeout=3600)[0]
    for size in (2, 4):
        slope, spread = run_ranks(drift, size, 10_000, launcher="gloo", timeout=3600)[0]
        # The trajectories part after some thousand steps: slopes agree within their own scatter.
        noise = 6 * max(one[1], spread) / 10_000
        assert abs(slope) <= 1.1 * abs(one[0]) + noise
