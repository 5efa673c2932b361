"""Direct ORB models decomposed equal themselves alone, and that equals ORB's own calculator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decomposed import check_equal, check_parameter_gradients, check_trajectory, compare, crystal, every
from networks import LAYERS, building, needs, orb_direct_network, orb_network, wrapper
from systems import single

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.errors import ModelError

pytestmark = needs("orb_models")
gloo = pytest.mark.gloo
CLOSE = 1.6
"""Å, a jitter with which some pairs are near enough for the pair repulsion."""


def own_calculator(network, data):
    """Energy, forces and stress (3 × 3) as ORB gives them."""
    from orb_models.forcefield.calculator import ORBCalculator

    atoms = data.to_atoms()
    with building(torch.float64, 0):
        atoms.calc = ORBCalculator(network, device="cpu")
        stress = atoms.get_stress(voigt=False) if all(data.pbc[0]) else None
        return atoms.get_potential_energy(), atoms.get_forces(), stress


def error(value, expected):
    return np.abs(value.numpy() - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(("kind", "jitter"), [("orb-direct", 0.6), ("orb-direct", CLOSE), ("orb", CLOSE)])
def test_equals_its_own_calculator(kind, jitter):
    data = crystal((3, 3, 3), jitter=jitter)
    network = (orb_direct_network if kind == "orb-direct" else orb_network)()
    energy, forces, stress = own_calculator(network, data)
    outputs = single(wrapper(kind), Batch.from_data_list([data]), skin=0.5)
    assert abs(float(outputs["energy"]) - energy) <= 1e-10 * abs(energy)
    assert error(outputs["forces"], forces) <= 1e-10
    assert error(outputs["stress"][0], stress) <= 1e-10
    volume = float(data.cell[0].det().abs())
    assert error(outputs["virial"][0], -volume * stress) <= 1e-10
    network.pair_repulsion = False
    # The mean over atoms in a conservative model, hence smaller there.
    visible = np.abs(own_calculator(network, data)[1] - forces).max() > 1e-4 * np.abs(forces).max()
    assert visible == (jitter == CLOSE)


def test_the_older_architecture_equals_its_own_calculator():
    """Another head for the stress, other radial functions and activations, and no pair repulsion."""
    from nvalchemi_distributed.models.orb_direct import ORBDirectWrapper

    with building(torch.float64, 0):
        from orb_models.forcefield.atomic_system import SystemConfig
        from orb_models.forcefield.pretrained import orb_v2_architecture

        config = SystemConfig(radius=6.0, max_num_neighbors=300)
        network = orb_v2_architecture(num_message_passing_steps=2, device="cpu", system_config=config).eval()
    data = crystal((3, 3, 3))
    energy, forces, stress = own_calculator(network, data)
    outputs = single(ORBDirectWrapper(network), Batch.from_data_list([data]), skin=0.5)
    assert abs(float(outputs["energy"]) - energy) <= 1e-10 * abs(energy)
    assert error(outputs["forces"], forces) <= 1e-10
    assert error(outputs["stress"][0], stress) <= 1e-10


@pytest.mark.parametrize("repeat", [(2, 2, 2), (2, 1, 1)])
def test_a_cluster_has_no_torque_and_no_stress(repeat):
    data = crystal(repeat, jitter=CLOSE)
    data = AtomicData(data.positions + 7.0, data.atomic_numbers)
    network = orb_direct_network()
    energy, forces, _ = own_calculator(network, data)
    outputs = single(wrapper("orb-direct"), Batch.from_data_list([data]), skin=0.5)
    assert abs(float(outputs["energy"]) - energy) <= 1e-10 * abs(energy)
    assert error(outputs["forces"], forces) <= 1e-10
    assert not outputs["stress"].any()
    assert not outputs["virial"].any()
    network.heads["forces"].remove_torque_for_nonpbc_systems = False
    assert error(outputs["forces"], own_calculator(network, data)[1]) > 1e-3


def test_two_atoms_turn_about_two_axes_only():
    """On a line the equations for the torque are singular; what is left is along the line."""
    from nvalchemi_distributed.models.orb_direct import ORBDirectWrapper

    x = torch.tensor([[3.0, 4.0, 5.0], [4.1, 5.3, 5.9]], dtype=torch.float64)
    network = orb_direct_network()
    # ORB adds it after the net force was taken out.
    network.heads["forces"].normalizer.bn.running_mean.fill_(0.0)
    outputs = single(ORBDirectWrapper(network), Batch.from_data_list([AtomicData(x, torch.tensor([14, 32]))]), 0.0)
    forces = outputs["forces"]
    assert forces.abs().max() > 1e-3
    assert forces.sum(0).abs().max() < 1e-12
    assert torch.linalg.cross(x[1] - x[0], forces[0]).abs().max() < 1e-10 * forces.abs().max()


@gloo
@pytest.mark.parametrize(
    ("kind", "ranks", "dtype"),
    [
        *every("orb-direct", ["2 float64", "2 float32"]),
        ("orb", "2", "float64"),
    ],
)
def test_decomposed_equals_one_process(kind, ranks, dtype):
    """With pairs near enough for the pair repulsion."""
    check_equal(kind, ranks, LAYERS[kind], dtype, jitter=CLOSE)


@gloo
def test_a_decomposed_cluster_equals_one_process():
    """Net force and torque are those of the whole system."""
    check_equal("orb-direct", "2", LAYERS["orb-direct"], jitter=CLOSE, open=True)


@gloo
def test_fifty_steps_with_migration():
    check_trajectory("orb-direct")


@gloo
@pytest.mark.slow
def test_gradients_of_parameters():
    """Back through the exchanges and the sums over ranks."""
    check_parameter_gradients("orb-direct")


@gloo
def test_ranks_without_atoms():
    """A slab in vacuum and cuts that do not follow it."""
    case = {"kind": "orb-direct", "grid": (4, 1, 1), "repeat": (2, 2, 2), "corner": True, "rebalance_above": 1e9}
    results = run_ranks(compare, 4, case, launcher="gloo", timeout=180)
    assert max(results[0]["errors"].values()) <= 1e-10, results
    assert [r["counts"][0] == 0 for r in results].count(True) >= 2, results


def test_several_systems():
    """Means, net forces and torques are those of each system."""
    parts = [crystal((3, 3, 3)), crystal((4, 3, 2), jitter=CLOSE)]
    parts.append(AtomicData(parts[1].positions, parts[1].atomic_numbers, cell=torch.zeros(3, 3), pbc=False))
    together = single(wrapper("orb-direct"), Batch.from_data_list(parts), 0.3)
    at = 0
    for k, part in enumerate(parts):
        alone = single(wrapper("orb-direct"), Batch.from_data_list([part]), 0.3)
        forces = together["forces"][at : at + part.num_nodes]
        at += part.num_nodes
        assert abs(float(together["energy"][k] - alone["energy"])) < 1e-10 * abs(float(alone["energy"]))
        assert (forces - alone["forces"]).abs().max() < 1e-10 * alone["forces"].abs().max()
        assert (together["stress"][k] - alone["stress"][0]).abs().max() <= 1e-10 * alone["stress"].abs().max()


@pytest.mark.parametrize("kind", ["orb", "orb-direct"])
def test_an_atom_without_neighbours(kind):
    """Alone it has no edge, and two stand-ins take part; beside others it has none, and they do not."""
    atom = AtomicData(torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64), torch.tensor([14]))
    pair = AtomicData(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 5.0]], dtype=torch.float64), torch.tensor([14, 32]))
    alone = single(wrapper(kind), Batch.from_data_list([atom]))
    beside = single(wrapper(kind), Batch.from_data_list([atom, pair]))
    assert abs(float(alone["energy"][0] - beside["energy"][0])) < 1e-12
    assert (alone["forces"] - beside["forces"][:1]).abs().max() < 1e-12


def test_a_model_without_stress():
    from nvalchemi_distributed.models.orb_direct import ORBDirectWrapper

    model = ORBDirectWrapper(orb_direct_network(has_stress=False))
    batch = Batch.from_data_list([crystal((3, 3, 3))])
    assert set(single(model, batch)) == model.model_config.outputs == {"energy", "forces"}
    model.restrict(["forces"])
    assert set(single(model, batch)) == {"forces"}


def test_the_other_kind_of_model_is_refused():
    from nvalchemi_distributed.models import ORBDirectWrapper, ORBWrapper

    with pytest.raises(ModelError, match=r"DirectForcefieldRegressor is no conservative .* ORBDirectWrapper"):
        ORBWrapper(orb_direct_network())
    with pytest.raises(ModelError, match=r"ConservativeForcefieldRegressor is a conservative .* ORBWrapper"):
        ORBDirectWrapper(orb_network())
    with pytest.raises(ModelError, match=r"Linear has the heads \[\]"):
        ORBDirectWrapper(torch.nn.Linear(2, 2))
    batch = Batch.from_data_list([crystal((3, 3, 3))])
    with pytest.raises(ModelError, match=r"this ORB model keeps the nearest 20, which is not decomposed"):
        single(ORBDirectWrapper(orb_direct_network(most_neighbors=20)), batch)
