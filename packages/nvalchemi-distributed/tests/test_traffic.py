"""What a step costs in messages: counted, and compared with the model of the documentation."""

from __future__ import annotations

import pytest
import torch
from systems import fcc

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.domain.scaling import step_traffic
from nvalchemi_distributed.dynamics import NVE, maxwell_boltzmann
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import LennardJonesModelWrapper

CUTOFF, SKIN, STEPS, LATTICE = 5.0, 1.0, 4, 5.3


def count_steps(comm, repeat, grid):
    """Counters of a few steps without a rebuild on one rank, with the sizes they belong to."""
    edges = LATTICE * torch.tensor(repeat, dtype=torch.float64)
    n_atoms = 4 * repeat[0] * repeat[1] * repeat[2]
    # An ideal gas of points: a uniform density, which a crystal's planes are not.
    x = torch.rand(n_atoms, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * edges
    batch = Batch.from_data_list([AtomicData(x, torch.full((n_atoms,), 18), cell=torch.diag(edges), pbc=True)])
    model = LennardJonesModelWrapper(1.0e-9, 1.0e-3, CUTOFF)
    model.restrict({"energy", "forces"})
    integrator = NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config, skin=SKIN)])
    with DomainParallel(integrator, DomainConfig(cutoff=CUTOFF, skin=SKIN, grid_dims=tuple(grid))) as parallel:
        owned = parallel.partition(batch if comm.rank == 0 else None)
        parallel.evaluate(owned)
        t = parallel.traffic
        before = (t.exchanges + t.reductions, t.messages, t.bytes_sent, dict(t.by_peer))
        parallel.run(owned, STEPS)
        assert parallel.rebuilds == 1
        return {
            "collectives": (t.exchanges + t.reductions - before[0]) / STEPS,
            "messages": (t.messages - before[1]) / STEPS,
            "bytes": (t.bytes_sent - before[2]) / STEPS,
            "peers": sorted(p for p, n in t.by_peer.items() if n != before[3].get(p, 0)),
            "owned": owned.n_owned,
            "ghosts": owned.n_ghost,
        }


GRIDS = {
    "2": ((8, 4, 4), (2, 1, 1)),
    "2x2": ((6, 6, 3), (2, 2, 1)),
    "1x8": ((3, 3, 14), (1, 1, 8)),
    "2x2x2": ((6, 6, 6), (2, 2, 2)),
}


@pytest.mark.gloo
@pytest.mark.parametrize("name", GRIDS)
def test_counters_of_a_step_agree_with_the_model(name):
    """Three collectives a step; messages exactly as on paper; ghosts and bytes, mean over ranks, within 10 %.

    The band is three times the scatter of the number of random points in a ghost region of some 250.
    """
    repeat, grid = GRIDS[name]
    size = grid[0] * grid[1] * grid[2]
    n_atoms = 4 * repeat[0] * repeat[1] * repeat[2]
    edges = tuple(r * LATTICE for r in repeat)
    model = step_traffic(n_atoms, edges, grid, CUTOFF + SKIN)
    results = run_ranks(count_steps, size, repeat, grid, launcher="gloo")
    for r in results:
        assert r["collectives"] == 1 + model.reductions <= 4
        assert r["messages"] == model.messages == len(r["peers"])
        assert r["bytes"] > 0
        assert r["owned"] + r["ghosts"] < n_atoms
    assert sum(r["owned"] for r in results) == n_atoms
    # What is sent is what is received.
    assert sum(r["bytes"] for r in results) == 24 * sum(r["ghosts"] for r in results)
    assert sum(r["ghosts"] for r in results) / size == pytest.approx(model.ghosts, rel=0.1)
    assert sum(r["bytes"] for r in results) / size == pytest.approx(model.bytes_sent, rel=0.1)
    if name == "1x8":
        # Along a line only the two neighbours share a halo.
        for rank, r in enumerate(results):
            assert r["peers"] == sorted({(rank - 1) % 8, (rank + 1) % 8})


def test_model_of_an_undivided_box_sends_nothing():
    alone = step_traffic(1000, (30.0, 30.0, 30.0), (1, 1, 1), 9.5)
    assert (alone.ghosts, alone.messages, alone.bytes_sent) == (0, 0, 0)
    # A width beyond half the box: everything is a ghost once, never twice.
    thick = step_traffic(1000, (30.0, 30.0, 30.0), (2, 1, 1), 20.0)
    assert thick.ghosts == pytest.approx(500)
    assert thick.messages == 1


def test_argon_at_94_kelvin_goes_fifteen_steps_without_a_rebuild():
    """The benchmark's crystal, 500 atoms of it: skin 1 Å, 2 fs."""
    batch = Batch.from_data_list([fcc(5, a=5.74)])
    maxwell_boltzmann(batch, 94.4, seed=1)
    model = LennardJonesModelWrapper(0.010323, 3.405, 8.5)
    model.restrict({"forces"})
    integrator = NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=1.0)])
    with DomainParallel(integrator, DomainConfig(cutoff=8.5, skin=1.0)) as parallel:
        owned = parallel.partition(batch)
        parallel.run(owned, 15)
        assert parallel.rebuilds == 1
        assert owned.energy is None
        moved = (owned.positions - owned.epoch.reference).norm(dim=-1).max()
        assert 0.05 < float(moved) < 0.5
        assert bool(torch.isfinite(owned.forces).all())
