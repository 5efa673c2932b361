"""Systems, batches and files."""

from __future__ import annotations

import ase.build
import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from systems import fcc, lj, random_system

from nvalchemi_distributed.data import AtomicData, Batch, append_extxyz, read_extxyz
from nvalchemi_distributed.dynamics import ExtxyzSink, HostMemory
from nvalchemi_distributed.errors import ConfigError, InputError, SinkFullError
from nvalchemi_distributed.hooks import NeighborListHook


def water():
    return AtomicData(
        torch.tensor([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]], dtype=torch.float64),
        torch.tensor([8, 1, 1]),
        node_properties={"charge": torch.tensor([-0.8, 0.4, 0.4], dtype=torch.float64)},
        system_properties={"label": torch.tensor([7])},
    )


def test_defaults():
    data = water()
    assert data.num_nodes == 3
    assert data.atomic_masses.tolist() == pytest.approx([15.999, 1.008, 1.008])
    assert data.velocities.shape == (3, 3)
    assert data.energy is None
    assert data.pbc.tolist() == [[False, False, False]]
    with pytest.raises(AttributeError, match="no field"):
        _ = data.nonsense


def test_batch_selects_and_carries_user_fields():
    batch = Batch.from_data_list([water(), water(), water()])
    batch.add_key("feature", [torch.rand(3, 2) for _ in range(3)], level="node")
    assert (batch.num_graphs, batch.num_nodes, batch.num_nodes_list) == (3, 9, [3, 3, 3])
    assert batch.ptr.tolist() == [0, 3, 6, 9]
    assert batch["charge"].shape == (9,)
    assert torch.equal(batch[1].feature, batch.feature[3:6])
    assert batch[1:].num_graphs == 2
    assert batch[torch.tensor([2, 0])].label.tolist() == [7, 7]
    assert len(batch.to_data_list()) == 3
    copy = batch.clone()
    copy.positions[0] = 5.0
    assert float(batch.positions[0, 0]) == 0.0
    half = batch.to(dtype=torch.float32)
    assert half.charge.dtype is torch.float32
    assert half.atomic_numbers.dtype is torch.int64


def test_inverse_masses_follow_the_masses():
    batch = Batch.from_data_list([fcc(2)])
    assert torch.equal(batch.inverse_masses, (1 / batch.atomic_masses).unsqueeze(-1).expand(-1, 3))
    assert batch.inverse_masses is batch.inverse_masses
    before = batch.inverse_masses.clone()
    batch.atomic_masses[3] *= 4
    assert torch.equal(batch.inverse_masses[3], before[3] / 4)
    batch.atomic_masses = 2 * batch.atomic_masses
    assert torch.equal(batch.inverse_masses[3], before[3] / 8)


def test_wrong_shapes_and_fields_are_refused():
    batch = Batch.from_data_list([water()])
    with pytest.raises(InputError, match="3 rows"):
        batch.positions = torch.zeros(4, 3)
    with pytest.raises(AttributeError, match="add_key"):
        batch.surprise = torch.zeros(3)
    with pytest.raises(InputError, match="exists already"):
        batch.add_key("charge", torch.zeros(3))
    with pytest.raises(InputError, match="charge"):
        Batch.from_data_list([water(), fcc(1)])
    with pytest.raises(InputError, match="empty list"):
        Batch.from_data_list([])
    with pytest.raises(InputError, match="no cell"):
        AtomicData(torch.zeros(1, 3), torch.tensor([1]), pbc=True)


def test_ase_both_ways():
    atoms = ase.build.bulk("NaCl", "rocksalt", 5.6) * (2, 1, 1)
    atoms.set_velocities(np.random.default_rng(0).normal(size=(4, 3)) * 0.01)
    atoms.set_array("flag", np.array([1, 2, 3, 4]))
    data = AtomicData.from_atoms(atoms)
    back = data.to_atoms()
    assert np.allclose(back.positions, atoms.positions, atol=0)
    assert np.allclose(back.get_velocities(), atoms.get_velocities(), rtol=1e-14)
    assert (back.arrays["flag"] == atoms.arrays["flag"]).all()
    assert (back.pbc == atoms.pbc).all()
    kinetic = 0.5 * (data.atomic_masses * data.velocities.square().sum(-1)).sum()
    assert float(kinetic) == pytest.approx(atoms.get_kinetic_energy(), rel=1e-12)


def test_ase_gets_energy_forces_and_stress():
    model = lj()
    batch = Batch.from_data_list([random_system(3, tilt=0.3)])
    NeighborListHook(model.neighbor_config).update(batch)
    out = model(batch)
    batch.forces = out["forces"]
    batch.add_key("energy", out["energy"], level="system")
    batch.add_key("stress", out["stress"], level="system")
    atoms = batch.get_data(0).to_atoms()
    assert atoms.get_potential_energy() == pytest.approx(float(out["energy"]))
    from ase.calculators.lj import LennardJones

    atoms.calc = LennardJones(epsilon=0.0101, sigma=3.4, rc=5.0, smooth=False)
    shift = 4 * 0.0101 * ((3.4 / 5) ** 12 - (3.4 / 5) ** 6)
    assert shift != 0
    assert np.allclose(atoms.get_forces(), out["forces"].numpy(), atol=1e-12)
    assert np.allclose(atoms.get_stress(voigt=False), out["stress"][0].numpy(), atol=1e-12)


@pytest.mark.parametrize("pbc", [(True, True, True), (True, False, False), (False, False, False)])
def test_extxyz_is_exact_and_ase_opens_it(pbc, tmp_path):
    path = tmp_path / "t.extxyz"
    data = random_system(1, tilt=0.3, pbc=pbc)
    data.add_node_property("atom_id", torch.arange(data.num_nodes))
    data.add_node_property("mark", torch.arange(data.num_nodes) % 2 == 0)
    data.add_system_property("energy", torch.tensor([[-1.25]], dtype=torch.float64))
    for step in range(3):
        append_extxyz(path, data, info={"step": step})
    frames = list(read_extxyz(path))
    assert len(frames) == 3
    back = frames[2]
    assert torch.equal(back.positions, data.positions)
    assert torch.allclose(back.velocities, data.velocities, rtol=1e-14)
    assert torch.equal(back.cell, data.cell)
    assert torch.equal(back.atom_id, data.atom_id)
    assert torch.equal(back.mark, data.mark)
    assert back.pbc[0].tolist() == list(pbc)
    assert float(back.energy) == -1.25
    atoms = ase.io.read(path, index=":")
    assert len(atoms) == 3
    assert np.array_equal(atoms[1].positions, data.positions.numpy())
    assert np.array_equal(atoms[1].arrays["atom_id"], data.atom_id.numpy())
    assert np.allclose(atoms[1].get_velocities(), data.velocities.numpy(), rtol=1e-12)
    assert atoms[1].info["step"] == 1


def test_reads_what_ase_writes_and_stops_at_a_torn_frame(tmp_path):
    path = tmp_path / "ase.extxyz"
    atoms = Atoms("ArKr", positions=[[0, 0, 0], [1.5, 2, 3]], cell=[9, 9, 9], pbc=True)
    atoms.calc = SinglePointCalculator(atoms, energy=1.5, forces=np.ones((2, 3)))
    ase.io.write(path, [atoms, atoms], format="extxyz")
    text = path.read_text()
    assert [d.num_nodes for d in read_extxyz(path)] == [2, 2]
    assert float(next(read_extxyz(path)).energy) == 1.5
    path.write_text(text[:-5])
    assert [d.num_nodes for d in read_extxyz(path)] == [2]


def test_sinks(tmp_path):
    batch = Batch.from_data_list([fcc(1), fcc(2)])
    memory = HostMemory(2)
    memory.write(batch, step=1)
    batch.positions[0] = 99.0
    memory.write(batch, step=2)
    assert float(memory[0].positions[0, 0]) != 99.0
    assert memory.steps == [1, 2]
    with pytest.raises(SinkFullError, match="capacity"):
        memory.write(batch)
    sink = ExtxyzSink(tmp_path / "sub" / "a.extxyz")
    sink.write(batch, step=1)
    sink.write(batch, step=2)
    frames = ase.io.read(sink.path, index=":")
    assert [(len(f), f.info["system"], f.info["step"]) for f in frames] == [
        (4, 0, 1),
        (32, 1, 1),
        (4, 0, 2),
        (32, 1, 2),
    ]
    ExtxyzSink(sink.path, append=True).write(batch)
    assert len(list(read_extxyz(sink.path))) == 6
    with pytest.raises(ConfigError, match="capacity"):
        HostMemory(0)


def test_extxyz_of_no_atoms_and_of_invented_species(tmp_path):
    path = tmp_path / "t.extxyz"
    empty = AtomicData(torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    data = fcc(1)
    append_extxyz(path, empty)
    append_extxyz(path, data)
    assert [f.num_nodes for f in read_extxyz(path)] == [0, 4]
    for number in (-1, 119):
        strange = AtomicData(data.positions, torch.full((4,), number), atomic_masses=torch.ones(4))
        with pytest.raises(InputError, match=str(number)):
            append_extxyz(path, strange)
    append_extxyz(path, AtomicData(data.positions, torch.zeros(4, dtype=torch.int64), atomic_masses=torch.ones(4)))
    text = path.read_text(encoding="utf-8")
    assert "X " in text
    path.write_text(text.replace("X ", "Qq "), encoding="utf-8")
    with pytest.raises(InputError, match="Qq"):
        list(read_extxyz(path))
