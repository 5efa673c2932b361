"""Pair potentials: the shared vectors, species, tails, derivatives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from systems import fcc, lj, random_system, single

from distmd_protocol import LocalComm, Potential, Units, save_potential
from distmd_protocol.testkit import TOL
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.errors import InputError, ModelError
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import LennardJonesModelWrapper, PairPotentialWrapper
from nvalchemi_distributed.observables import volume

VECTORS = Path(__file__).parents[3] / "shared" / "tests" / "vectors" / "potentials"
FAMILIES = ("lennard_jones", "mie", "morse", "tabulated_pair")


def load(family):
    path = VECTORS / f"{family}.json"
    if not path.exists():
        pytest.skip(f"{path} is not there: the shared vectors come with the repository, not with this package")
    document = json.loads(path.read_text())
    p = document["potential"]
    potential = Potential(
        family=p["family"],
        species=tuple(p["species"]),
        masses=np.array(p["masses"]),
        parameters={k: np.array(v) for k, v in p["parameters"].items()},
        cutoff=p["cutoff"],
        smoothing=p["smoothing"],
        tail_correction=p["tail_correction"],
        units=Units(**p["units"]),
    )
    return potential, document["configurations"]


def run(model, config, numbers):
    data = AtomicData(
        torch.tensor(config["positions"], dtype=torch.float64),
        torch.tensor([numbers[s] for s in config["species"]]),
        cell=torch.tensor(config["cell"], dtype=torch.float64),
        pbc=torch.tensor(config["pbc"]),
    )
    batch = Batch.from_data_list([data])
    NeighborListHook(model.neighbor_config, skin=0.3).update(batch)
    return batch, model(batch)


def numbers_of(species):
    from nvalchemi_distributed.data.masses import CHEMICAL_SYMBOLS

    return [CHEMICAL_SYMBOLS.index(s) for s in species]


def close(value, expected, tol):
    expected = torch.tensor(expected, dtype=torch.float64)
    return float((value - expected).abs().max()) <= tol * float(expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("units", [Units.METAL, Units.MOLAR])
def test_reproduces_the_shared_vectors(family, units, tmp_path):
    """Through an artefact on disk, also one written in other units."""
    potential, configurations = load(family)
    save_potential(tmp_path / "p", potential.to_units(units), comm=LocalComm())
    model = PairPotentialWrapper.from_artefact(tmp_path / "p")
    assert len(configurations) == 5
    for config in configurations:
        _, out = run(model, config, numbers_of(potential.species))
        assert close(out["energy"][0, 0], config["energy"], TOL["energy-f64"]), config["name"]
        assert close(out["forces"], config["forces"], TOL["force-f64"]), config["name"]
        assert close(out["virial"][0], config["virial"], TOL["virial-f64"]), config["name"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("smoothing", ["none", "shift"])
def test_shift_and_tail_follow_the_vectors(family, smoothing):
    import dataclasses

    potential, configurations = load(family)
    tail = family != "tabulated_pair"
    potential = dataclasses.replace(potential, smoothing=smoothing, tail_correction=tail)
    model = PairPotentialWrapper.from_potential(potential)
    key = "_shifted" if smoothing == "shift" else ""
    checked = 0
    for config in configurations:
        if tail and not all(config["pbc"]):
            continue
        batch, out = run(model, config, numbers_of(potential.species))
        energy = config["energy" + key] + (config["tail_energy" + key] if tail else 0.0)
        virial = torch.tensor(config["virial"], dtype=torch.float64)
        if tail:
            virial += config["tail_pressure"] * float(volume(batch)) * torch.eye(3, dtype=torch.float64)
        assert close(out["energy"][0, 0], energy, TOL["energy-f64"]), config["name"]
        assert float((out["virial"][0] - virial).abs().max()) <= TOL["virial-f64"] * float(virial.abs().max())
        assert torch.allclose(out["stress"][0] * volume(batch), -out["virial"][0], rtol=1e-12)
        checked += 1
    assert checked >= 3


def test_forces_and_virial_are_derivatives_of_the_energy():
    """Off equilibrium, by central differences (D27)."""
    data = random_system(4, sites=(3, 3, 3), tilt=0.4)
    for family, parameters in {
        "lennard_jones": {"epsilon": [[0.01]], "sigma": [[3.4]]},
        "mie": {"epsilon": [[0.01]], "sigma": [[3.4]], "n": [[13.2]], "m": [[5.7]]},
        "morse": {"epsilon": [[0.02]], "r0": [[3.8]], "alpha": [[1.4]]},
    }.items():
        model = PairPotentialWrapper(family, {k: np.array(v) for k, v in parameters.items()}, 5.0, smoothing="shift")

        def energy(x, cell, model=model):
            batch = Batch.from_data_list([AtomicData(x, data.atomic_numbers, cell=cell, pbc=True)])
            NeighborListHook(model.neighbor_config).update(batch)
            return float(model(batch)["energy"]), model(batch)

        _, out = energy(data.positions, data.cell)
        assert float(out["forces"].abs().max()) > 1e-3
        h = 1e-5
        for i, a in ((0, 0), (5, 1), (11, 2)):
            step = torch.zeros_like(data.positions)
            step[i, a] = h
            slope = (energy(data.positions + step, data.cell)[0] - energy(data.positions - step, data.cell)[0]) / (
                2 * h
            )
            assert abs(slope + float(out["forces"][i, a])) < TOL["finite-difference-f64"] * max(1.0, abs(slope))
        for a, b in ((0, 0), (1, 2), (2, 0)):
            strain = torch.zeros(3, 3, dtype=torch.float64)
            strain[a, b] = strain[b, a] = h if a == b else h / 2
            up = energy(
                data.positions @ (torch.eye(3) + strain).double(), data.cell @ (torch.eye(3) + strain).double()
            )[0]
            down = energy(
                data.positions @ (torch.eye(3) - strain).double(), data.cell @ (torch.eye(3) - strain).double()
            )[0]
            assert abs((up - down) / (2 * h) + float(out["virial"][0, a, b])) < 1e-5


def test_one_species_and_many_equal():
    """Two species with the same parameters are one."""
    data = fcc(3)
    data.atomic_numbers[::2] = 36
    same = {"epsilon": np.full((2, 2), 0.01), "sigma": np.full((2, 2), 3.4)}
    two = PairPotentialWrapper("lennard_jones", same, 5.0, species=("Ar", "Kr"), tail_correction=True)
    one = LennardJonesModelWrapper(0.01, 3.4, 5.0, tail_correction=True)
    batch = Batch.from_data_list([data])
    NeighborListHook(one.neighbor_config).update(batch)
    a, b = one(batch), two(batch)
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-12, atol=1e-15), name


def test_float32_is_close_to_float64():
    batch = Batch.from_data_list([fcc(3)])
    model = lj()
    NeighborListHook(model.neighbor_config).update(batch)
    single = batch.to(dtype=torch.float32)
    NeighborListHook(model.neighbor_config).update(single)
    a, b = model(batch), model(single)
    assert b["forces"].dtype is torch.float32
    assert float((a["forces"] - b["forces"]).abs().max()) < TOL["force-f32"] * float(a["forces"].abs().max())
    assert abs(float(a["energy"] - b["energy"])) < TOL["energy-f32"] * abs(float(a["energy"]))


def test_lone_atom_has_zero_force_and_no_nan():
    """D27: an isolated atom has nothing but padding."""
    model = lj()
    batch = Batch.from_data_list([AtomicData(torch.zeros(1, 3), torch.tensor([18])), fcc(2, dtype=torch.float32)])
    NeighborListHook(model.neighbor_config).update(batch)
    out = model(batch)
    assert torch.isfinite(out["forces"]).all()
    assert float(out["forces"][0].abs().max()) == 0
    assert float(out["stress"][0].abs().max()) == 0


def test_nan_positions_are_not_masked_away():
    model = lj()
    batch = Batch.from_data_list([fcc(2)])
    NeighborListHook(model.neighbor_config).update(batch)
    batch.positions[3, 1] = float("nan")
    assert not torch.isfinite(model(batch)["energy"]).all()


def test_unknown_species_is_named():
    model = PairPotentialWrapper(
        "lennard_jones", {"epsilon": np.array([[0.01]]), "sigma": np.array([[3.4]])}, 5.0, species=("Kr",)
    )
    batch = Batch.from_data_list([fcc(2)])
    with pytest.raises(InputError, match="Ar"):
        model.system_fields(batch)


def test_tail_needs_full_periodicity():
    model = lj(tail_correction=True)
    batch = Batch.from_data_list([random_system(1, pbc=(True, True, False))])
    with pytest.raises(InputError, match="periodic along all axes"):
        model.system_fields(batch)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"family": "buckingham"}, "no torch form"),
        ({"smoothing": "switch"}, "smoothing"),
        ({"parameters": {"epsilon": np.array([[0.01]])}}, "needs the parameters"),
        ({"parameters": {"epsilon": np.array([[0.01]]), "sigma": np.array([[-3.4]])}}, "must be positive"),
        ({"parameters": {"epsilon": np.array([[0.01, 0.02], [0.03, 0.01]]), "sigma": np.ones((2, 2))}}, "symmetric"),
    ],
)
def test_bad_parameters_are_refused(change, words):
    good = {
        "family": "lennard_jones",
        "parameters": {"epsilon": np.array([[0.01]]), "sigma": np.array([[3.4]])},
        "cutoff": 5.0,
    }
    with pytest.raises(InputError, match=words):
        PairPotentialWrapper(**{**good, **change})


def test_needs_a_list():
    with pytest.raises(ModelError, match="NeighborListHook"):
        lj()(Batch.from_data_list([fcc(2)]))


@pytest.mark.slow
# torch's compiler warns about its own use of torch.jit.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_kernel_equals_eager():
    batch = Batch.from_data_list([fcc(3)])
    eager, compiled = lj(), lj(compile=True)
    NeighborListHook(eager.neighbor_config).update(batch)
    a, b = eager(batch), compiled(batch)
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-12, atol=1e-14), name


def test_one_species_is_not_applied_to_another_element():
    parameters = {"epsilon": np.array([[0.0101]]), "sigma": np.array([[3.4]])}
    model = PairPotentialWrapper("lennard_jones", parameters, 5.0, species=("Ar",))
    batch = Batch.from_data_list([fcc(2)])
    single(model, batch)
    batch.atomic_numbers[3] = 36
    with pytest.raises(InputError, match="Kr"):
        single(model, batch)
