"""Trajectories do not depend on the number of ranks; ensembles are right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from systems import fcc, lj, random_system

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics import NVE, ConvergenceHook, HostMemory, NVTLangevin, maxwell_boltzmann
from nvalchemi_distributed.dynamics.base import BaseDynamics, DynamicsStage
from nvalchemi_distributed.dynamics.hooks import LoggingHook, SnapshotHook
from nvalchemi_distributed.dynamics.noise import normal, philox4x32
from nvalchemi_distributed.dynamics.steps import internal_time
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.observables import kinetic_energy, temperature
from nvalchemi_distributed.stages import HookScope
from nvalchemi_distributed.units import BOLTZMANN, FEMTOSECOND

gloo = pytest.mark.gloo


def fast_atoms(kelvin=600.0, repeat=(4, 4, 3)):
    batch = Batch.from_data_list([fcc(repeat=repeat, a=5.5)])
    maxwell_boltzmann(batch, kelvin, seed=7)
    return batch


class Watch:
    """Global energies, momentum and ids after every step."""

    stage = DynamicsStage.AFTER_STEP
    frequency = 1
    scope = HookScope.GLOBAL

    def __init__(self):
        self.energy, self.momentum, self.complete = [], [], True

    def __call__(self, ctx, stage):
        b = ctx.batch
        self.energy.append(float(b.energy + kinetic_energy(b)))
        p = b.atomic_masses.unsqueeze(-1) * b.velocities
        self.momentum.append(float(p.sum(0).norm() / p.norm(dim=-1).sum()))
        self.complete &= torch.equal(b.atom_id, torch.arange(b.num_nodes))


# Large enough that on every grid below no rank sees the whole system.
REPEAT = {"nve": (6, 6, 3), "nvt": (6, 6, 6)}


def trajectory(comm, kind, steps, grid, hooks=True):
    """Final positions and the watch of a run with much migration."""
    model = lj(smoothing="shift")
    common = {"model": model, "dt": 2.0, "hooks": [NeighborListHook(model.neighbor_config, skin=0.6)]}
    integrator = NVE(**common) if kind == "nve" else NVTLangevin(**common, temperature=600.0, friction=0.02, seed=11)
    watch = Watch()
    extra = [watch, SnapshotHook(HostMemory(steps), 7), LoggingHook(frequency=3)] if hooks else []
    parallel = DomainParallel(
        integrator, DomainConfig(cutoff=5.0, skin=0.6, grid_dims=tuple(grid)), n_steps=steps, hooks=extra
    )
    owned = parallel.partition(fast_atoms(repeat=REPEAT[kind]) if comm.rank == 0 else None)
    before = owned.atom_id.clone()
    parallel.run(owned)
    whole = parallel.gather(owned)
    migrated = int((~torch.isin(before, owned.atom_id)).sum())
    unwrapped = whole.positions + (whole.image.double().unsqueeze(1) @ whole.cell[whole.batch_idx]).squeeze(1)
    result = {
        "x": unwrapped.tolist(),
        "v": whole.velocities.tolist(),
        "energy": watch.energy,
        "momentum": watch.momentum,
        "complete": watch.complete,
        "migrated": migrated,
        "rebuilds": parallel.rebuilds,
        "counts": [owned.n_owned, owned.n_ghost, whole.num_nodes],
    }
    parallel.close()
    return result


def relative(a, b):
    a, b = np.array(a), np.array(b)
    return float(np.abs(a - b).max() / np.abs(b).max())


@gloo
def test_nve_with_migration_equals_one_rank():
    """200 steps on 1, 2, 4 and 2×2 ranks."""
    one = run_ranks(trajectory, 1, "nve", 200, (1, 1, 1), launcher="gloo")[0]
    drift = abs(one["energy"][-1] - one["energy"][0]) / abs(one["energy"][0])
    assert drift < 1e-3
    for size, grid in ((2, (2, 1, 1)), (4, (4, 1, 1)), (4, (2, 2, 1))):
        results = run_ranks(trajectory, size, "nve", 200, grid, launcher="gloo")
        assert sum(r["migrated"] for r in results) > 10
        assert results[0]["rebuilds"] > 10
        for r in results:
            assert sum(r["counts"][:2]) < r["counts"][2]
            assert r["complete"]
            assert relative(r["energy"][:50], one["energy"][:50]) <= 1e-9
            assert max(r["momentum"]) <= 1e-12


@gloo
def test_langevin_does_not_depend_on_the_number_of_ranks():
    """20 steps with migration, 1, 2, 4 and 8 ranks; D17: velocities do not vanish."""
    one = run_ranks(trajectory, 1, "nvt", 20, (1, 1, 1), launcher="gloo")[0]
    assert np.abs(np.array(one["v"])).min() > 0
    for size, grid in ((2, (1, 2, 1)), (4, (2, 2, 1)), (8, (2, 2, 2))):
        results = run_ranks(trajectory, size, "nvt", 20, grid, launcher="gloo")
        assert sum(r["migrated"] for r in results) > 0
        for r in results:
            assert sum(r["counts"][:2]) < r["counts"][2]
            assert relative(r["x"], one["x"]) <= 1e-12
            assert relative(r["v"], one["v"]) <= 1e-12


@gloo
def test_hooks_never_change_a_trajectory():
    """Bitwise."""
    with_hooks = run_ranks(trajectory, 2, "nvt", 30, (2, 1, 1), True, launcher="gloo")[0]
    without = run_ranks(trajectory, 2, "nvt", 30, (2, 1, 1), False, launcher="gloo")[0]
    assert with_hooks["x"] == without["x"]
    assert with_hooks["v"] == without["v"]


def test_one_process_without_domain_parallel_gives_the_same():
    model = lj(smoothing="shift")

    def integrator():
        return NVTLangevin(
            model, 2.0, 300.0, 0.02, seed=3, hooks=[NeighborListHook(model.neighbor_config, skin=0.6)], n_steps=25
        )

    plain = fast_atoms(300.0)
    integrator().run(plain)
    parallel = DomainParallel(integrator(), DomainConfig(cutoff=5.0, skin=0.6))
    owned = parallel.partition(fast_atoms(300.0))
    parallel.run(owned)
    assert torch.allclose(owned.unwrapped_positions(), plain.positions, rtol=0, atol=1e-10)
    assert torch.allclose(owned.energy, plain.energy, rtol=1e-11)


def test_philox_known_answers():
    """Test vectors of the Random123 distribution (kat_vectors, philox4x32 10)."""
    zero = philox4x32(torch.zeros(1, 4, dtype=torch.int64), (0, 0))[0].tolist()
    assert zero == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox4x32(torch.full((1, 4), 0xFFFFFFFF, dtype=torch.int64), (0xFFFFFFFF, 0xFFFFFFFF))[0].tolist()
    assert ones == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter = torch.tensor([[0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]])
    pi = philox4x32(counter, (0xA4093822, 0x299F31D0))[0].tolist()
    assert pi == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_noise_is_normal_and_no_two_atoms_steps_or_seeds_share_it():
    ids = torch.arange(20000)
    a = normal(1, 5, 0, ids)
    n = a.numel()
    assert abs(float(a.mean())) < 4 / math.sqrt(n)
    assert abs(float(a.var()) - 1) < 4 * math.sqrt(2 / n)
    assert abs(float((a**4).mean()) - 3) < 4 * math.sqrt(96 / n)
    for other in (normal(2, 5, 0, ids), normal(1, 6, 0, ids), normal(1, 5, 1, ids), normal(1, 5, 0, ids + 20000)):
        assert abs(float((a * other).mean())) < 5 / math.sqrt(n)
    # seed + 1 is not the same noise a step earlier
    assert not torch.isin(normal(2, 4, 0, ids[:100]), a).any()
    assert a.unique().numel() == n
    assert torch.equal(normal(1, 5, 0, ids.flip(0)), a.flip(0))


def test_langevin_temperature_and_kinetic_energy_distribution():
    """An ideal gas: chi-square of the kinetic energies of atoms, mean temperature within its error."""
    model = lj(0.1)
    n = 1500
    data = AtomicData(1e4 * torch.rand(n, 3, dtype=torch.float64), torch.full((n,), 18))
    batch = Batch.from_data_list([data])
    integrator = NVTLangevin(model, 5.0, 250.0, 0.05, hooks=[NeighborListHook(model.neighbor_config, skin=20.0)])
    integrator.run(batch, 60)
    energies, kelvins = [], []
    for _ in range(6):
        integrator.run(batch, 60)
        kelvins.append(float(temperature(batch)))
        energies.append(0.5 * batch.atomic_masses * batch.velocities.square().sum(-1) / (BOLTZMANN * 250.0))
    assert abs(np.mean(kelvins) / 250.0 - 1) < 4 * math.sqrt(2 / (3 * n * len(kelvins)))
    # E/kT of an atom is Gamma(3/2): equal-probability bins from its inverse, tested with chi-square.
    from scipy import stats

    edges = stats.gamma.ppf(np.linspace(0, 1, 21), 1.5)
    counts, _ = np.histogram(torch.cat(energies).numpy(), bins=edges)
    chi2 = ((counts - counts.sum() / 20) ** 2 / (counts.sum() / 20)).sum()
    assert stats.chi2.sf(chi2, 19) > 1e-4


def test_friction_zero_is_nve():
    model = lj()
    a, b = fast_atoms(100.0, (2, 2, 2)), fast_atoms(100.0, (2, 2, 2))
    NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)]).run(a, 10)
    NVTLangevin(model, 2.0, 100.0, 0.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)]).run(b, 10)
    assert torch.allclose(a.positions, b.positions, rtol=0, atol=1e-11)


def test_time_unit_is_the_fs_of_ase():
    from ase import units

    assert abs(FEMTOSECOND / units.fs - 1) < 1e-7
    assert abs(internal_time(2.0) / (2 * units.fs) - 1) < 1e-7


def test_verlet_is_of_second_order():
    errors = []
    for dt in (4.0, 2.0):
        model = lj(smoothing="shift")
        batch = fast_atoms(100.0, (2, 2, 2))
        integrator = NVE(model, dt, hooks=[NeighborListHook(model.neighbor_config, skin=0.8)])
        integrator.compute(batch)
        start = float(batch.energy + kinetic_energy(batch))
        worst = 0.0
        for _ in range(int(80 / dt)):
            integrator.step(batch)
            worst = max(worst, abs(float(batch.energy + kinetic_energy(batch)) - start))
        errors.append(worst)
    assert 2.5 < errors[0] / errors[1] < 6


class Descent(BaseDynamics):
    """Steepest descent written by a user, with no distributed code."""

    def pre_update(self, batch):
        batch.positions.add_(batch.forces, alpha=0.4)


def relax(comm, size):
    model = lj()
    data = fcc(repeat=(6, 2, 2), a=5.27, jitter=0.0)
    # One half is perfect already; one atom of the other half is out of place.
    data.positions[-1, 0] += 0.3
    integrator = Descent(
        model,
        hooks=[NeighborListHook(model.neighbor_config, skin=0.5)],
        convergence_hook=ConvergenceHook.from_fmax(0.02),
    )
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5, grid_dims=(size, 1, 1)), n_steps=400)
    owned = parallel.partition(Batch.from_data_list([data]) if comm.rank == 0 else None)
    perfect = float(parallel.evaluate(owned).forces.norm(dim=-1).max())
    parallel.run(owned)
    fmax = float(parallel.gather(owned).forces.norm(dim=-1).max())
    assert size == 1 or owned.n_owned + owned.n_ghost < data.num_nodes
    return [parallel.step_count, fmax, float(owned.forces.norm(dim=-1).max()), perfect]


@gloo
def test_convergence_is_decided_for_the_whole_mesh():
    """D02's form for a user's optimizer: all ranks stop at the same step, the same as one rank."""
    one = run_ranks(relax, 1, 1, launcher="gloo")[0]
    assert 0 < one[0] < 400
    assert one[1] <= 0.02
    two = run_ranks(relax, 2, 2, launcher="gloo")
    assert [r[0] for r in two] == [one[0], one[0]]
    # Left to themselves the ranks would have parted: one saw forces below the limit from the start, the other did not.
    assert min(r[3] for r in two) <= 0.02 < max(r[3] for r in two)


class GlobalKineticEnergyHook:
    """As printed in the guide."""

    stage = DynamicsStage.BEFORE_STEP
    scope = HookScope.GLOBAL
    frequency = 1

    def __init__(self, integrator):
        self._integrator = integrator

    def __call__(self, ctx, stage):
        b = ctx.batch
        ke = 0.5 * (b.atomic_masses * (b.velocities**2).sum(-1)).sum()
        self._integrator.global_kinetic_energy = ke


class Berendsen(NVE):
    """Reads the value that the hook left; and the same through ``self.reduce``."""

    def post_update(self, batch):
        super().post_update(batch)
        ours = kinetic_energy(batch, self.reduce)
        self.seen.append(float(ours))
        batch.velocities.mul_(1.0 - 0.01 * float(self.global_kinetic_energy > 0.1))


def rescale(comm):
    model = lj()
    integrator = Berendsen(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    integrator.seen = []
    parallel = DomainParallel(
        integrator, DomainConfig(cutoff=5.0, skin=0.5), n_steps=15, hooks=[GlobalKineticEnergyHook(integrator)]
    )
    parallel.run(parallel.partition(fast_atoms(300.0, (3, 3, 3)) if comm.rank == 0 else None))
    return [float(integrator.global_kinetic_energy), integrator.seen]


@gloo
def test_global_hook_of_the_guide_and_custom_reduction():
    one = run_ranks(rescale, 1, launcher="gloo")[0]
    for r in run_ranks(rescale, 2, launcher="gloo"):
        assert relative(r[0], one[0]) < 1e-11
        assert relative(r[1], one[1]) < 1e-11


def open_axis(comm, steps=100):
    """A slab of 40 Å with atoms in z < 8, one fast atom leaving along the open z axis."""
    data = random_system(5, sites=(4, 4, 2), pbc=(True, True, False))
    data.cell[0, 2, 2] = 40.0
    data.velocities[3] = torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64)
    watch = Watch()
    model = lj()
    integrator = NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    parallel = DomainParallel(
        integrator, DomainConfig(cutoff=5.0, skin=0.5, grid_dims=(1, 1, comm.size)), n_steps=steps, hooks=[watch]
    )
    owned = parallel.partition(Batch.from_data_list([data]) if comm.rank == 0 else None)
    parallel.run(owned)
    top = float(parallel.gather(owned).positions[:, 2].max())
    return [watch.complete, watch.energy[-1], top, owned.n_owned]


@gloo
def test_atom_that_flies_off_an_open_axis_stays_owned():
    """D13 and D14: open z axis, 4 ranks on z."""
    one = run_ranks(open_axis, 1, launcher="gloo")[0]
    assert one[2] > 9
    for r in run_ranks(open_axis, 4, launcher="gloo"):
        assert r[0]
        assert abs(r[1] / one[1] - 1) < 1e-9


def empty_rank(comm):
    """All atoms in one corner of a periodic cell; cuts are uniform, so ranks stay empty."""
    data = random_system(6, sites=(2, 2, 2))
    data.cell[0] = torch.eye(3, dtype=torch.float64) * 80.0
    model = lj()
    integrator = NVTLangevin(model, 2.0, 50.0, 0.01, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    config = DomainConfig(cutoff=5.0, skin=0.5, grid_dims=(1, 1, comm.size), rebalance_above=1e9)
    parallel = DomainParallel(integrator, config, n_steps=50)
    owned = parallel.partition(Batch.from_data_list([data]) if comm.rank == 0 else None)
    parallel.run(owned)
    return [owned.n_owned, float(owned.energy)]


@gloo
def test_empty_ranks_join_every_collective():
    """D13."""
    results = run_ranks(empty_rank, 4, launcher="gloo")
    assert sorted(r[0] for r in results) == [0, 0, 0, 8]
    assert len({r[1] for r in results}) == 1


def test_refusals():
    model = lj()
    with pytest.raises(ConfigError, match="dt="):
        NVE(model, 0.0)
    with pytest.raises(ConfigError, match="friction"):
        NVTLangevin(model, 1.0, 300.0, -1.0)
    with pytest.raises(ConfigError, match="temperature"):
        NVTLangevin(model, 1.0, float("nan"), 0.1)
    with pytest.raises(ConfigError, match="not a hook"):
        NVE(model, 1.0, hooks=[object()])
    with pytest.raises(ConfigError, match="n_steps"):
        NVE(model, 1.0).run(fast_atoms(1.0, (2, 2, 2)))
