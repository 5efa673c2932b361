"""One evaluation on any grid of ranks equals a single process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, note, settings
from hypothesis import strategies as st
from systems import SIGMA, absolute_terms, fcc, lj, random_system, single

from distmd_protocol import RankError
from distmd_protocol.testkit import TOL, run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.dynamics import NVE
from nvalchemi_distributed.hooks import NeighborListHook

pytestmark = pytest.mark.gloo


def evaluate(comm, case):
    """Decomposed outputs against a single process at the same wrapped positions, relative to absolute pair terms."""
    dtype = getattr(torch, case.get("dtype", "float64"))
    cutoff, skin = case.get("cutoff", 5.0), case.get("skin", 0.5)
    if "fcc" in case:
        # Strongly jittered: on a perfect lattice a ghost region that is too thin may go unnoticed between two planes.
        data = [fcc(repeat=case["fcc"], jitter=0.8, dtype=dtype)]
    else:
        data = [random_system(**{**s, "dtype": dtype}) for s in case["systems"]]
    model = lj(cutoff)
    integrator = NVE(model, dt=1.0, hooks=[NeighborListHook(model.neighbor_config, skin=skin)])
    grid = tuple(case["grid"]) if "grid" in case else None
    with DomainParallel(integrator, DomainConfig(cutoff=cutoff, skin=skin, grid_dims=grid)) as parallel:
        owned = parallel.partition(Batch.from_data_list(data) if comm.rank == 0 else None)
        parallel.evaluate(owned)
        whole = parallel.gather(owned)
        counts = [owned.n_owned, owned.n_ghost, whole.num_nodes]
    reference = single(model, whole, skin)
    phi, force, work = absolute_terms(whole, cutoff)
    return {
        "energy": float((whole.energy - reference["energy"]).abs().max()) / phi,
        "forces": float(((whole.forces - reference["forces"]).double().norm(dim=-1) / force).max()),
        "virial": float((whole.virial - reference["virial"]).abs().max()) / work,
        "counts": counts,
        "ids": torch.equal(whole.atom_id, torch.arange(whole.num_nodes)),
    }


def check_drawn(results, dtype):
    """As :func:`check`; a failing example states owned and ghost counts."""
    note(f"owned, ghosts, atoms in all, by rank: {[r['counts'] for r in results]}")
    check(results, dtype)


def check(results, dtype="float64"):
    tolerance = TOL["decomposed-f64"] if dtype == "float64" else TOL["decomposed-f32"]
    total = sum(r["counts"][0] for r in results)
    for r in results:
        assert r["ids"]
        assert r["counts"][2] == total
        assert max(r["energy"], r["forces"], r["virial"]) <= tolerance, results


GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (4, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)]

system = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "sites": st.tuples(*[st.sampled_from([1, 2, 3, 5, 7])] * 3).map(list),
        "fill": st.sampled_from([0.0, 0.3, 1.0, 1.0]),
        "tilt": st.sampled_from([0.0, 0.25, 0.5]),
        "pbc": st.tuples(*[st.booleans()] * 3).map(list),
        "cells_away": st.sampled_from([0, 0, 4]),
        "corner": st.sampled_from([False, False, True]),
        "spacing": st.sampled_from([1.05, 1.15, 2.0]),
    }
)


# No shrinking: every failure costs new processes, and the drawn cases are small already.
@settings(
    max_examples=40,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
@given(
    grid=st.sampled_from(GRIDS),
    systems=st.lists(system, min_size=1, max_size=3),
    dtype=st.sampled_from(["float64", "float32"]),
    cutoff=st.sampled_from([4.0, 4.5, 8.5]),
    skin=st.sampled_from([0.0, 0.5]),
)
@example(  # cell smaller than the cutoff, one atom, more ranks than atoms
    grid=(2, 2, 1),
    systems=[{"seed": 1, "sites": [1, 1, 1], "fill": 1.0, "tilt": 0.25, "pbc": [True] * 3, "spacing": 1.15}],
    dtype="float64",
    cutoff=8.5,
    skin=0.5,
)
@example(  # all atoms in one corner of a vacuum, open axes, empty ranks
    grid=(4, 1, 1),
    systems=[{"seed": 2, "sites": [5, 4, 4], "pbc": [True, False, False], "corner": True, "fill": 1.0}],
    dtype="float32",
    cutoff=5.0,
    skin=0.5,
)
def test_equals_one_process_on_any_grid_and_cell(grid, systems, dtype, cutoff, skin):
    size = grid[0] * grid[1] * grid[2]
    case = {"grid": grid, "systems": systems, "dtype": dtype, "cutoff": cutoff, "skin": skin}
    check_drawn(run_ranks(evaluate, size, case, launcher="gloo"), dtype)


def test_every_kind_of_case_is_drawn():
    """The lists above hold what the property is about: a case that is never drawn is never tested."""
    assert {g[0] * g[1] * g[2] for g in GRIDS} == {1, 2, 3, 4}
    assert (2, 2, 1) in GRIDS
    one = {"seed": 1, "sites": [1, 1, 1], "fill": 0.0, "pbc": [True] * 3}
    assert random_system(**one).num_nodes == 1
    small = random_system(**{**one, "spacing": 1.05})
    assert float(small.cell[0].norm(dim=-1).min()) < 4.0, "a cell smaller than the smallest cutoff drawn"
    far = random_system(seed=3, sites=(3, 3, 3), cells_away=4)
    assert float((far.positions.abs() / far.cell[0].diagonal()).max()) > 3
    corner = random_system(seed=3, sites=(7, 7, 7), corner=True)
    assert 0 < corner.num_nodes < 0.15 * 343
    liquid = random_system(seed=3, sites=(7, 7, 7), spacing=1.05)
    assert liquid.num_nodes / float(liquid.cell[0].det()) * SIGMA**3 > 0.7
    tilted = random_system(seed=3, sites=(3, 3, 3), tilt=0.5).cell[0]
    assert float((tilted[1, 0] / tilted[0, 0]).abs()) > 0.05


@pytest.mark.parametrize(
    ("size", "grid", "cells"),
    [(2, (2, 1, 1), (6, 3, 3)), (3, (3, 1, 1), (9, 3, 3)), (4, (2, 2, 1), (6, 6, 3)), (8, (2, 2, 2), (6, 6, 6))],
)
def test_non_degenerate_grids(size, grid, cells):
    results = run_ranks(evaluate, size, {"grid": grid, "fcc": cells, "cutoff": 5.0, "skin": 0.5}, launcher="gloo")
    check(results)
    for r in results:
        owned, ghost, total = r["counts"]
        assert owned > 0
        assert owned + ghost < total


# A test of its own, and here: pools of 1 to 4 and of 8 ranks are not kept at the same time.
@settings(
    max_examples=6,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
@given(
    systems=st.lists(system, min_size=1, max_size=2),
    dtype=st.sampled_from(["float64", "float32"]),
    cutoff=st.sampled_from([4.0, 8.5]),
)
def test_equals_one_process_on_two_by_two_by_two(systems, dtype, cutoff):
    case = {"grid": (2, 2, 2), "systems": systems, "dtype": dtype, "cutoff": cutoff, "skin": 0.5}
    check_drawn(run_ranks(evaluate, 8, case, launcher="gloo"), dtype)


def test_domains_thinner_than_the_ghost_width():
    """D11: 4 slabs of 4.5 Å, cutoff 6 + skin 0.5."""
    case = {"grid": (4, 1, 1), "systems": [{"seed": 5, "sites": [5, 5, 5], "spacing": 18 / (5 * 3.4)}], "cutoff": 6.0}
    check(run_ranks(evaluate, 4, case, launcher="gloo"))


def test_left_handed_cell_is_refused():
    """D08."""
    message = run_ranks(left_handed, 2, launcher="gloo")
    assert all("left-handed" in m for m in message)


def left_handed(comm):
    data = fcc(2)
    data.cell[0] = data.cell[0][[1, 0, 2]]
    model = lj()
    integrator = NVE(model, dt=1.0, hooks=[NeighborListHook(model.neighbor_config)])
    try:
        DomainParallel(integrator, DomainConfig(cutoff=5.0)).partition(
            Batch.from_data_list([data]) if comm.rank == 0 else None
        )
    except RankError as error:
        return str(error)


@pytest.mark.parametrize("grid", [(1, 1, 4), (2, 1, 2), None])
def test_slab_in_vacuum_is_balanced(grid):
    """A slab in a fifth of the cell: equal boxes would leave ranks empty, the cuts follow the atoms."""
    slab = {"seed": 3, "sites": [7, 7, 20], "slab": True}
    case = {"systems": [slab], "cutoff": 5.0} | ({} if grid is None else {"grid": grid})
    results = run_ranks(evaluate, 4, case, launcher="gloo")
    check(results)
    owned = [r["counts"][0] for r in results]
    assert sum(owned) == 7 * 7 * 4
    assert max(owned) / (sum(owned) / 4) <= 1.1, owned


def own_ids(comm, folder):
    """Two systems whose ids interleave, so that their order is not that of the systems."""
    data = [fcc(repeat=(4, 3, 3)), fcc(2, a=5.5, seed=4)]
    batch = Batch.from_data_list(data)
    batch.atom_id = 1000 - 3 * torch.arange(batch.num_nodes)
    batch.velocities = 0.05 * torch.sin(batch.positions)
    model = lj()

    def make():
        integrator = NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.3)])
        return DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.3))

    parallel = make()
    owned = parallel.run(parallel.partition(batch if comm.rank == 0 else None), 30)
    path = parallel.save(f"{folder}/mid")
    again = make()
    again.restore(path)
    wholes = [parallel.gather(owned), again.gather()]
    alone = batch.clone()
    NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.3)]).run(alone, 30)
    order = torch.cat([alone.atom_id[:144].argsort(), 144 + alone.atom_id[144:].argsort()])
    out = [parallel.rebuilds, bool((owned.batch_idx.diff() >= 0).all())]
    for whole in wholes:
        same = torch.equal(whole.atom_id, alone.atom_id[order]) and torch.equal(whole.batch_idx, alone.batch_idx)
        parts = [whole.get_data(k).atom_id.tolist() for k in range(2)]
        kept = [sorted(p) for p in parts] == [sorted(batch.get_data(k).atom_id.tolist()) for k in range(2)]
        out.append(same and kept and float((whole.velocities - alone.velocities[order]).abs().max()) < 1e-12)
    return out


@pytest.mark.parametrize("size", [1, 2])
def test_own_ids_stay_in_their_systems(size, tmp_path):
    for rebuilds, ascending, partitioned, restored in run_ranks(own_ids, size, str(tmp_path), launcher="gloo"):
        assert rebuilds > 1
        assert ascending
        assert partitioned
        assert restored
