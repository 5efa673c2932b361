"""NequIP, Allegro, ORB and SevenNet decomposed equal themselves alone, and that equals their own calculators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decomposed import check_equal, check_parameter_gradients, check_trajectory, compare, crystal, every, with_vacancies
from networks import (
    LAYERS,
    THIRD_PARTY_WARNINGS,
    allegro_network,
    building,
    needs,
    nequip_network,
    orb_network,
    wrapper,
)
from systems import single

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.errors import ModelError

pytestmark = [needs("nequip"), needs("sevenn"), *THIRD_PARTY_WARNINGS]
gloo = pytest.mark.gloo


def agree(outputs, energy, forces, stress, tolerance=1e-10):
    assert abs(float(outputs["energy"]) - energy) <= tolerance * abs(energy)
    assert np.abs(outputs["forces"].numpy() - forces).max() <= tolerance * np.abs(forces).max()
    assert np.abs(outputs["stress"][0].numpy() - stress).max() <= tolerance * np.abs(stress).max()


@pytest.mark.parametrize(("kind", "network"), [("nequip", nequip_network), ("allegro", allegro_network)])
def test_equals_its_own_calculator(kind, network):
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
    from nequip.integrations.ase import NequIPCalculator

    data = crystal((3, 3, 3))
    outputs = single(wrapper(kind), Batch.from_data_list([data]), skin=0.5)
    names = {"Si": "Si", "Ge": "Ge"}
    mapper = ChemicalSpeciesToAtomTypeMapper(model_type_names=list(names), chemical_species_to_atom_type_map=names)
    atoms = data.to_atoms()
    # The calculator takes the default dtype for its input.
    with building(torch.float64, 0):
        atoms.calc = NequIPCalculator(network(), device="cpu", transforms=[mapper, NeighborListTransform(r_max=4.0)])
        agree(outputs, atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress(voigt=False))


@needs("orb_models")
def test_orb_equals_its_own_calculator():
    from orb_models.forcefield.calculator import ORBCalculator

    data = crystal((3, 3, 3))
    outputs = single(wrapper("orb"), Batch.from_data_list([data]), skin=0.5)
    atoms = data.to_atoms()
    with building(torch.float64, 0):
        atoms.calc = ORBCalculator(orb_network(), device="cpu")
        agree(outputs, atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress(voigt=False))


def test_sevennet_equals_its_own_calculator():
    """Shipped weights. The calculator works in float32; the network itself, in float64, is compared exactly."""
    from sevenn.calculator import SevenNetCalculator
    from sevenn.util import model_from_checkpoint

    data = with_vacancies("rock salt", (2, 2, 2))
    batch = Batch.from_data_list([data])
    outputs = single(wrapper("sevennet"), batch, skin=0.5)
    with building(torch.float32, 0):
        calculator = SevenNetCalculator("7net-0", device="cpu")
        network, _ = model_from_checkpoint("7net-0")
    atoms = data.to_atoms()
    atoms.calc = calculator
    agree(outputs, atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress(voigt=False), 2e-5)
    energy, forces = sevennet_in_float64(network.double(), data)
    assert abs(float(outputs["energy"]) - energy) <= 1e-10 * abs(energy)
    assert np.abs(outputs["forces"].numpy() - forces).max() <= 1e-10 * np.abs(forces).max()


def sevennet_in_float64(network, data):
    """Energy and forces of the whole network on its own graph."""
    import sevenn._keys as KEY
    from sevenn.train.dataload import unlabeled_atoms_to_graph

    def to_double(module, args, out):
        for key in ("x", "node_attr"):
            out[key] = out[key].double()

    graph = {
        k: torch.as_tensor(np.asarray(v))
        for k, v in unlabeled_atoms_to_graph(data.to_atoms(), network.cutoff).items()
        if not isinstance(v, (str, dict, type(None)))
    }
    graph = {k: v.double() if v.is_floating_point() else v for k, v in graph.items()}
    graph[KEY.NUM_ATOMS] = torch.tensor(data.num_nodes)
    graph[KEY.BATCH] = torch.zeros(0)
    graph[KEY.EDGE_VEC].requires_grad_(True)
    # SevenNet makes one-hot rows in float32 whatever the dtype of the network is.
    network.onehot_idx_to_onehot.register_forward_hook(to_double)
    network.set_is_batch_data(False)
    out = network(graph)
    return float(out[KEY.PRED_TOTAL_ENERGY].detach()), out[KEY.PRED_FORCE].detach().numpy()[: data.num_nodes]


def test_sevennet_knows_silicon():
    """−5.4008 eV an atom in the perfect crystal, with the shipped weights."""
    perfect = with_vacancies("silicon", (2, 2, 2), every=0, jitter=0.0)
    outputs = single(wrapper("sevennet"), Batch.from_data_list([perfect]), skin=0.0)
    assert abs(float(outputs["energy"]) / perfect.num_nodes + 5.4008) < 2e-3


@gloo
@pytest.mark.parametrize(
    ("kind", "ranks", "dtype"),
    [
        *every("nequip", ["2 float64", "2x2 float64", "2 float32"]),
        *every("allegro", ["2 float64", "2x2 float64", "2 float32"]),
        *every("orb", ["4 float64", "4 float32"], needs("orb_models")),
        *every("sevennet", []),
    ],
)
def test_decomposed_equals_one_process(kind, ranks, dtype):
    check_equal(kind, ranks, LAYERS[kind], dtype)


@gloo
@pytest.mark.parametrize(
    ("name", "repeat", "dtype"),
    [
        ("silicon", (5, 2, 2), "float64"),
        pytest.param("silicon", (5, 2, 2), "float32", marks=pytest.mark.slow),
        pytest.param("rock salt", (5, 3, 3), "float64", marks=pytest.mark.slow),
    ],
)
def test_sevennet_on_crystals_with_vacancies(name, repeat, dtype):
    """Cells smaller than twice the cutoff across: integer images cover them."""
    check_equal("sevennet", "2", LAYERS["sevennet"], dtype, crystal=name, repeat=repeat)


@gloo
@pytest.mark.parametrize(
    "kind",
    [
        "nequip",
        pytest.param("allegro", marks=pytest.mark.slow),
        pytest.param("orb", marks=[needs("orb_models"), pytest.mark.slow]),
    ],
)
def test_fifty_steps_with_migration(kind):
    check_trajectory(kind)


@gloo
@pytest.mark.parametrize("kind", ["nequip", "allegro", pytest.param("orb", marks=needs("orb_models"))])
def test_gradients_of_parameters(kind):
    """Double backward through the exchanges, and through ORB's mean over ranks."""
    check_parameter_gradients(kind)


@gloo
@pytest.mark.slow
@pytest.mark.parametrize(("name", "repeat"), [("silicon", (6, 2, 2)), ("rock salt", (6, 2, 2))])
def test_sevennet_fifty_steps_at_300_kelvin(name, repeat):
    check_trajectory("sevennet", timeout=1200, crystal=name, repeat=repeat, temperature=300.0, dt=4.0)


@gloo
@pytest.mark.parametrize(
    "kind",
    [
        "nequip",
        pytest.param("orb", marks=needs("orb_models")),
        pytest.param("sevennet", marks=pytest.mark.slow),
    ],
)
def test_ranks_without_atoms(kind):
    """A slab in vacuum and cuts that do not follow it."""
    case = {"kind": kind, "grid": (4, 1, 1), "repeat": (2, 2, 2), "corner": True, "rebalance_above": 1e9}
    results = run_ranks(compare, 4, case, launcher="gloo", timeout=180)
    assert max(results[0]["errors"].values()) <= 1e-10
    assert [r["counts"][0] == 0 for r in results].count(True) >= 2, results


def test_what_a_network_does_not_know_is_refused():
    from nvalchemi_distributed.models.nequip import NequIPWrapper
    from nvalchemi_distributed.models.sevennet import SevenNetWrapper

    data = crystal((3, 3, 3))
    strange = AtomicData(data.positions, torch.full((data.num_nodes,), 26), cell=data.cell[0], pbc=True)
    with pytest.raises(ModelError, match=r"knows the atomic numbers \[14, 32\], but the system holds \[26\]"):
        single(wrapper("nequip"), Batch.from_data_list([strange]), 0.0)
    with pytest.raises(ModelError, match="a nequip GraphModel is needed"):
        NequIPWrapper(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="Nothing is downloaded here"):
        SevenNetWrapper.from_checkpoint("7net-omni")
    with pytest.raises(ModelError, match="modal='mpa', but the model's modalities are"):
        SevenNetWrapper.from_checkpoint("SevenNet-0", modal="mpa")


@needs("orb_models")
def test_an_orb_model_that_drops_neighbours_is_refused():
    from nvalchemi_distributed.models.orb import ORBWrapper

    batch = Batch.from_data_list([crystal((3, 3, 3))])
    with pytest.raises(ModelError, match=r"this ORB model keeps the nearest 20, which is not decomposed"):
        single(ORBWrapper(orb_network(most_neighbors=20)), batch, 0.0)
    with pytest.raises(ModelError, match="Linear is no conservative ORB model"):
        ORBWrapper(torch.nn.Linear(2, 2))


@needs("orb_models")
def test_orb_with_several_systems():
    """The mean is taken over each system's atoms."""
    parts = [crystal((3, 3, 3)), crystal((4, 3, 2), jitter=0.3)]
    together = single(wrapper("orb"), Batch.from_data_list(parts), 0.3)
    for k, part in enumerate(parts):
        alone = single(wrapper("orb"), Batch.from_data_list([part]), 0.3)
        assert abs(float(together["energy"][k] - alone["energy"])) < 1e-9 * abs(float(alone["energy"]))
        assert (together["stress"][k] - alone["stress"][0]).abs().max() < 1e-10 * alone["stress"].abs().max()
