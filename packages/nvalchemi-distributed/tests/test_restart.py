"""Restart: bitwise on the same ranks, to rounding on others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from systems import EPSILON, SIGMA, fcc, lj, single

from distmd_protocol import RankError, latest, list_checkpoints, rank_zero
from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.dynamics import NVE, NVTLangevin, maxwell_boltzmann
from nvalchemi_distributed.dynamics.hooks import CheckpointHook
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import PairPotentialWrapper

pytestmark = pytest.mark.gloo


def start(kind="nvt"):
    model = lj(smoothing="shift", tail_correction=True)
    hooks = [NeighborListHook(model.neighbor_config, skin=0.6)]
    integrator = (
        NVE(model, 2.0, hooks=hooks) if kind == "nve" else NVTLangevin(model, 2.0, 500.0, 0.02, seed=5, hooks=hooks)
    )
    return DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.6))


def full():
    batch = Batch.from_data_list([fcc(repeat=(4, 3, 3), a=5.5), fcc(2, a=5.6, seed=9)])
    batch.add_key("tag", torch.arange(batch.num_nodes) % 7, level="node")
    maxwell_boltzmann(batch, 500.0, seed=1)
    return batch


def state(parallel):
    whole = parallel.gather()
    shift = torch.bmm(whole.image.double().unsqueeze(1), whole.cell[whole.batch_idx]).squeeze(1)
    return {
        "wrapped": whole.positions.tolist(),
        "x": (whole.positions + shift).tolist(),
        "v": whole.velocities.tolist(),
        "energy": whole.energy.tolist(),
        "image": whole.image.tolist(),
        "tag": whole.tag.tolist(),
        "step": parallel.step_count,
    }


def straight(comm, kind, folder, steps, at, save=True):
    """A run of ``steps``, saved at step ``at`` on its way."""
    parallel = start(kind)
    owned = parallel.partition(full() if comm.rank == 0 else None)
    parallel.run(owned, at)
    if save:
        parallel.save(f"{folder}/mid")
    # The split lies inside an epoch: atoms have moved since the list was built.
    assert not torch.equal(owned.positions, owned.epoch.reference)
    parallel.run(owned, steps - at)
    return [state(parallel), parallel.rebuilds]


def resumed(comm, kind, folder, steps):
    parallel = start(kind)
    owned = parallel.restore(f"{folder}/mid")
    parallel.run(owned, steps)
    return [state(parallel), parallel.rebuilds]


@pytest.mark.parametrize("kind", ["nve", "nvt"])
def test_split_run_equals_whole_run_bitwise(kind, tmp_path):
    """D21: 47 + 53 steps; the split lies inside an epoch."""
    for size in (1, 2):
        whole = run_ranks(straight, size, kind, str(tmp_path / str(size)), 100, 47, launcher="gloo")
        split = run_ranks(resumed, size, kind, str(tmp_path / str(size)), 53, launcher="gloo")
        assert whole == split
        # Saving changed nothing.
        assert whole == run_ranks(straight, size, kind, "", 100, 47, False, launcher="gloo")
        assert whole[0][1] > 3


@pytest.mark.parametrize(("written", "read"), [(2, (1, 4)), (4, (1,))])
def test_other_number_of_ranks_is_equal_to_rounding(written, read, tmp_path):
    """2 → 1 and 4, 4 → 1: the next 10 steps, relative to the largest value."""
    whole = run_ranks(straight, written, "nvt", str(tmp_path / "a"), 57, 47, launcher="gloo")[0][0]
    for size in read:
        other = run_ranks(resumed, size, "nvt", str(tmp_path / "a"), 10, launcher="gloo")[0][0]
        assert other["step"] == whole["step"]
        assert other["tag"] == whole["tag"]
        for name in ("x", "v", "energy"):
            a, b = torch.tensor(other[name]).double(), torch.tensor(whole[name]).double()
            assert float((a - b).abs().max() / b.abs().max()) <= 1e-12


def with_hook(comm, folder):
    parallel = start()
    parallel.hooks.append(CheckpointHook(folder, 5, keep_last=2))
    parallel.run(parallel.partition(full() if comm.rank == 0 else None), 21)
    return rank_zero(comm, lambda: [p.name for p in list_checkpoints(folder)])


def test_checkpoint_hook_keeps_the_last_two(tmp_path):
    names = run_ranks(with_hook, 2, str(tmp_path), launcher="gloo")[0]
    assert sorted(names) == ["step-0000000015", "step-0000000020"]
    assert latest(tmp_path, kind="dynamics").name == "step-0000000020"


def wrong(comm, folder):
    parallel = start("nvt")
    parallel.partition(full() if comm.rank == 0 else None)
    parallel.save(f"{folder}/mid")
    messages = []
    for other in (start("nve"), _other_skin()):
        try:
            other.restore(f"{folder}/mid")
        except (RankError, ConfigError) as error:
            messages.append(str(error))
    return messages


def _other_skin():
    model = lj()
    hooks = [NeighborListHook(model.neighbor_config, skin=0.3)]
    return DomainParallel(NVE(model, 2.0, hooks=hooks), DomainConfig(cutoff=5.0, skin=0.3))


def test_another_integrator_or_list_is_refused(tmp_path):
    for messages in run_ranks(wrong, 2, str(tmp_path), launcher="gloo"):
        assert "NVTLangevin" in messages[0]
        assert "list settings" in messages[1]


def small_type(comm, folder, write):
    model = lj()
    integrator = NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.3)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.3))
    batch = Batch.from_data_list([fcc(3)])
    batch.add_key("weight", torch.linspace(-1, 1, batch.num_nodes).to(torch.bfloat16))
    if write:
        parallel.partition(batch if comm.rank == 0 else None)
        parallel.save(f"{folder}/mid")
        return True
    parallel.restore(f"{folder}/mid")
    weight = parallel.gather().weight
    return weight.dtype is torch.bfloat16 and torch.equal(weight, batch.weight)


def test_bfloat16_fields_come_back(tmp_path):
    run_ranks(small_type, 2, str(tmp_path), True, launcher="gloo")
    for size in (1, 2):
        assert all(run_ranks(small_type, size, str(tmp_path), False, launcher="gloo"))


def mixture(species):
    """Argon and krypton with a tail; the tables follow ``species``."""
    size = np.array([1.0 if s == "Ar" else 1.1 for s in species])
    table = 0.5 * (size[:, None] + size[None, :])
    parameters = {"epsilon": EPSILON * table**2, "sigma": SIGMA * table}
    return PairPotentialWrapper("lennard_jones", parameters, 5.0, species=species, tail_correction=True)


def other_order(comm, folder):
    out = []
    for species in (("Ar", "Kr"), ("Kr", "Ar")):
        model = mixture(species)
        integrator = NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.3)])
        parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.3))
        if not out:
            batch = Batch.from_data_list([fcc(3)])
            batch.atomic_numbers[:20] = 36
            parallel.partition(batch if comm.rank == 0 else None)
            parallel.save(f"{folder}/mid")
        else:
            parallel.restore(f"{folder}/mid")
        parallel.evaluate(parallel._mine(None))
        whole = parallel.gather()
        out.append(float(whole.energy))
        whole.discard("species_counts")
        out.append(float(single(model, whole)["energy"]))
    return out


def test_a_restart_asks_the_present_model_for_its_fields(tmp_path):
    for first, *others in run_ranks(other_order, 2, str(tmp_path), launcher="gloo"):
        assert others == pytest.approx([first] * 3, rel=1e-12)
