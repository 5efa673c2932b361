"""One artefact, two readers: JAX and torch give the same energies, forces and virials."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from chemtrain_mpi.potentials import evaluate
from distmd_protocol import Potential, Units, load_potential, save_potential
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models.pair import PairPotentialWrapper

VECTORS = Path(__file__).resolve().parents[1] / "shared" / "tests" / "vectors" / "potentials"
FAMILIES = ["lennard_jones", "mie", "morse", "tabulated_pair"]
NUMBERS = {"Ar": 18, "Kr": 36}
LIMIT = 1e-10


def vectors(family):
    """The reference file of a family, and its potential."""
    data = json.loads((VECTORS / f"{family}.json").read_text(encoding="utf-8"))
    return data, data["potential"]


def potential_of(stored, smoothing, tail, units):
    """The potential of a reference file, in other units."""
    return Potential(
        family=stored["family"],
        species=tuple(stored["species"]),
        masses=np.array(stored["masses"]),
        parameters={name: np.array(value) for name, value in stored["parameters"].items()},
        cutoff=stored["cutoff"],
        smoothing=smoothing,
        tail_correction=tail,
        units=Units(**stored["units"]),
    ).to_units(units)


def with_torch(path, positions, cell, species):
    """Energy, forces, virial by torch on one process, in eV and Å."""
    model = PairPotentialWrapper.from_artefact(path)
    system = AtomicData(
        torch.tensor(positions, dtype=torch.float64),
        torch.tensor([NUMBERS[name] for name in species]),
        cell=torch.tensor(cell, dtype=torch.float64),
        pbc=True,
    )
    batch = Batch.from_data_list([system])
    NeighborListHook(model.neighbor_config).update(batch)
    out = model(batch)
    return out["energy"].item(), out["forces"].numpy(), out["virial"][0].numpy()


def deviation(first, second):
    """Largest deviation relative to the largest value."""
    first, second = np.asarray(first), np.asarray(second)
    return float(np.max(np.abs(first - second)) / np.max(np.abs(first)))


@pytest.mark.parametrize("smoothing", ["none", "shift"])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_packages_read_the_same_potential(family, smoothing, tmp_path):
    data, stored = vectors(family)
    tail = family != "tabulated_pair" and smoothing == "none"
    # Written in the units of the training, read in those of each reader.
    save_potential(tmp_path / "it", potential_of(stored, smoothing, tail, Units("nm", "kJ/mol", "amu", "ps")))
    ours = load_potential(tmp_path / "it", units=Units.METAL)
    configurations = data["configurations"]
    assert len(configurations) >= 5
    assert any(np.any(np.abs(np.triu(c["cell"], 1) + np.tril(c["cell"], -1)) > 0.1) for c in configurations), "no tilt"
    for configuration in configurations:
        positions, cell = np.array(configuration["positions"]), np.array(configuration["cell"])
        species = [stored["species"][index] for index in configuration["species"]]
        jax_side = evaluate(ours, positions, cell, species)
        energy, forces, virial = with_torch(tmp_path / "it", positions, cell, species)
        assert deviation(jax_side.energy, energy) <= LIMIT
        assert deviation(jax_side.forces, forces) <= LIMIT
        assert deviation(jax_side.virial, virial) <= LIMIT


def test_a_different_potential_is_noticed(tmp_path):
    # The comparison above must be able to fail: one part in 10^8 of epsilon is far above its limit.
    data, stored = vectors("lennard_jones")
    potential = potential_of(stored, "none", False, Units.METAL)
    save_potential(tmp_path / "it", potential)
    changed = {**potential.parameters, "epsilon": potential.parameters["epsilon"] * (1 + 1e-8)}
    other = Potential(**{**vars(potential), "parameters": changed})
    configuration = data["configurations"][0]
    species = [stored["species"][index] for index in configuration["species"]]
    positions, cell = np.array(configuration["positions"]), np.array(configuration["cell"])
    energy, _, _ = with_torch(tmp_path / "it", positions, cell, species)
    assert deviation(evaluate(other, positions, cell, species).energy, energy) > LIMIT
