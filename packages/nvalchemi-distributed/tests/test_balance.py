"""Fields of DomainConfig that shape the decomposition: what each of them does, seen on the ranks."""

from __future__ import annotations

import pytest
import torch
from systems import fcc, lj, single

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel, StrategyKind
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.domain.transport import Transport
from nvalchemi_distributed.dynamics import NVE
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.observables import kinetic_energy

pytestmark = pytest.mark.gloo


def drifting_slab():
    """A crystal slab in a fifth of a cell of vacuum, all atoms on their way along z."""
    data = fcc(repeat=(4, 4, 2), a=5.5, jitter=0.1)
    cell = data.cell.clone()
    cell[0, 2, 2] = 5 * 11.0
    v = torch.zeros_like(data.positions)
    v[:, 2] = 0.6
    return AtomicData(data.positions, data.atomic_numbers, cell=cell, pbc=True, velocities=v)


def drift(comm, above):
    """Balance, at the start and after the slab has moved farther than its own thickness; energy."""
    model = lj(smoothing="shift")
    integrator = NVE(model, 4.0, hooks=[NeighborListHook(model.neighbor_config, skin=1.5)])
    config = DomainConfig(cutoff=5.0, skin=1.5, grid_dims=(1, 1, comm.size), rebalance_above=above)
    parallel = DomainParallel(integrator, config)
    owned = parallel.partition(Batch.from_data_list([drifting_slab()]) if comm.rank == 0 else None)
    most = [owned.n_owned]
    for _ in range(10):
        parallel.run(owned, 6)
        most.append(owned.n_owned)
    whole = parallel.gather()
    moved = float((whole.velocities[:, 2].mean()) * 60 * 4.0 / 10.1805)
    reference = single(model, whole, 1.5)
    return {
        "owned": most,
        "moved": moved,
        "energy": float(whole.energy + kinetic_energy(whole)),
        "forces": float((whole.forces - reference["forces"]).abs().max()),
        "ids": torch.equal(whole.atom_id, torch.arange(128)),
    }


def test_cuts_follow_a_slab_that_drifts_and_without_the_threshold_they_do_not():
    """max/mean of owned atoms stays at most 1.1 on 4 ranks while a slab crosses a fifth of the cell."""
    one = run_ranks(drift, 1, 1.1, launcher="gloo")[0]
    assert one["moved"] > 11.0
    followed, left = (run_ranks(drift, 4, above, launcher="gloo") for above in (1.1, 1e9))
    for results in (followed, left):
        for r in results:
            assert r["ids"]
            assert abs(r["energy"] / one["energy"] - 1) < 1e-9
            assert r["forces"] < 1e-12

    def worst(results):
        return [max(r["owned"][k] for r in results) / 32 for k in range(11)]

    assert max(worst(followed)) <= 1.1, worst(followed)
    assert max(worst(left)) > 2.0, worst(left)


def shapes(comm):
    """Ghosts at two widths and two cutoffs, owners on a given grid, and a mesh that was left out."""
    batch = Batch.from_data_list([fcc(repeat=(10, 3, 3))])
    model = lj()
    counts, forces = [], []
    for cutoff, width in ((5.0, None), (5.0, 11.5), (8.0, None)):
        hooks = [NeighborListHook(model.neighbor_config, skin=0.5)]
        config = DomainConfig(
            cutoff, 0.5, mesh=None, strategy=StrategyKind.HALO, ghost_width=width, grid_dims=(comm.size, 1, 1)
        )
        parallel = DomainParallel(NVE(model, 1.0, hooks=hooks), config)
        owned = parallel.evaluate(parallel.partition(batch if comm.rank == 0 else None))
        counts.append([owned.n_owned, owned.n_ghost])
        forces.append(parallel.gather().forces)
    slab = (owned.positions[:, 0] / (10 * 5.3) * comm.size).floor()
    agree = max(float((forces[0] - other).abs().max()) for other in forces[1:])
    return [counts, bool((slab == comm.rank).all()), agree, parallel.comm.size]


def test_grid_dims_ghost_width_and_the_default_mesh():
    for counts, in_slab, difference, size in run_ranks(shapes, 2, launcher="gloo"):
        assert in_slab
        assert size == 2
        assert difference < 1e-14
        (owned, ghosts), (same, more), (again, farther) = counts
        assert owned == same == again
        assert ghosts < farther < more
        # Ghosts lie in two layers as wide as the configuration says.
        assert ghosts == pytest.approx(360 * 2 * 5.5 / 53.0, rel=0.35)
        assert owned + more < 360


def rebuilds(comm, skin):
    model = lj(smoothing="shift")
    batch = Batch.from_data_list([fcc(repeat=(7, 4, 4), a=5.5)])
    batch.velocities = 0.05 * torch.sin(7.0 * batch.positions)
    hooks = [NeighborListHook(model.neighbor_config, skin=skin)]
    parallel = DomainParallel(NVE(model, 2.0, hooks=hooks), DomainConfig(cutoff=5.0, skin=skin), n_steps=20)
    owned = parallel.run(parallel.partition(batch if comm.rank == 0 else None))
    return [parallel.rebuilds, owned.n_ghost, float(owned.energy)]


def test_skin_trades_ghosts_for_rebuilds():
    """Skin 0 rebuilds whenever an atom has moved; the trajectory is the same."""
    none, some, wide = (run_ranks(rebuilds, 2, skin, launcher="gloo")[0] for skin in (0.0, 0.3, 1.0))
    assert none[0] == 21
    assert none[0] > some[0] > wide[0] >= 1
    assert none[1] < wide[1]
    assert max(none[2], some[2], wide[2]) - min(none[2], some[2], wide[2]) < 1e-10


class FakeMesh:
    """A mesh that claims more ranks than its group has, as one built by hand may."""

    ndim, mesh_dim_names = 1, ("domain",)

    def size(self):
        return 3

    def get_coordinate(self):
        return [0]

    def get_group(self):
        return torch.distributed.group.WORLD


def wrong_mesh(comm):
    from nvalchemi_distributed.errors import ConfigError

    model = lj()
    try:
        DomainParallel(
            NVE(model, 1.0, hooks=[NeighborListHook(model.neighbor_config)]), DomainConfig(5.0, mesh=FakeMesh())
        )
    except ConfigError as error:
        return str(error)


def test_a_mesh_of_another_size_than_its_group_is_refused():
    for message in run_ranks(wrong_mesh, 2, launcher="gloo"):
        assert "the mesh has 3 ranks, its group 2" in message


def test_a_transport_of_one_rank_sends_nothing():
    transport = Transport(None)
    assert transport.all_gather(torch.ones(2, 3), "x").shape == (2, 3)
    assert transport.traffic.exchanges == 0
