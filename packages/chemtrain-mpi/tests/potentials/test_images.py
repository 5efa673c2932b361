import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials import evaluate
from distmd_protocol import Potential, Units
from distmd_protocol.testkit import TOL

pytestmark = pytest.mark.once

VECTORS = Path(__file__).parents[4] / "shared" / "tests" / "vectors" / "potentials"
FAMILIES = ("lennard_jones", "mie", "morse", "tabulated_pair")


def vectors(family):
    path = VECTORS / f"{family}.json"
    if not path.exists():
        pytest.skip(f"the test vectors are not beside this package: {path}")
    stored = json.loads(path.read_text())
    p = stored["potential"]
    parameters = {name: np.array(value) for name, value in p["parameters"].items()}
    potential = Potential(
        p["family"], tuple(p["species"]), p["masses"], parameters, p["cutoff"], "none", False, Units(**p["units"])
    )
    return potential, stored["configurations"]


def close(found, expected, tolerance):
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_published_vectors_are_reproduced(family):
    potential, configurations = vectors(family)
    assert len(configurations) >= 5
    for c in configurations:
        found = evaluate(potential, c["positions"], c["cell"], c["species"])
        close(found.energy, c["energy"], TOL["energy-f64"])
        close(found.forces, c["forces"], TOL["force-f64"])
        close(found.virial, c["virial"], TOL["virial-f64"])


@pytest.mark.parametrize("family", FAMILIES)
def test_shift_and_tails_are_reproduced(family):
    potential, configurations = vectors(family)
    for c in configurations[:2]:
        arguments = c["positions"], c["cell"], c["species"]
        volume = abs(np.linalg.det(c["cell"]))
        shifted = evaluate(dataclasses.replace(potential, smoothing="shift"), *arguments)
        close(shifted.energy, c["energy_shifted"], TOL["energy-f64"])
        if family == "tabulated_pair":
            continue
        plain = evaluate(potential, *arguments)
        tailed = evaluate(dataclasses.replace(potential, tail_correction=True), *arguments)
        both = evaluate(dataclasses.replace(potential, tail_correction=True, smoothing="shift"), *arguments)
        close(tailed.energy - plain.energy, c["tail_energy"], TOL["energy-f64"])
        close(both.energy - shifted.energy, c["tail_energy_shifted"], TOL["energy-f64"])
        close(np.trace(tailed.virial - plain.virial) / 3 / volume, c["tail_pressure"], TOL["virial-f64"])


def test_lattice_shifts_wrapping_and_handedness_change_nothing():
    potential, configurations = vectors("mie")
    c = configurations[1]
    positions, cell = np.array(c["positions"]), np.array(c["cell"])
    moved = positions + np.random.default_rng(0).integers(-3, 4, positions.shape) @ cell
    left = cell[[1, 0, 2]]
    for other in (evaluate(potential, moved, cell, c["species"]), evaluate(potential, positions, left, c["species"])):
        close(other.energy, c["energy"], TOL["energy-f64"])
        close(other.forces, c["forces"], TOL["force-f64"])


def test_names_and_indices_of_species_mean_the_same():
    potential, configurations = vectors("morse")
    c = configurations[0]
    names = [potential.species[s] for s in c["species"]]
    assert evaluate(potential, c["positions"], c["cell"], names).energy == pytest.approx(c["energy"], rel=1e-10)


def test_flat_cell_is_refused():
    potential, configurations = vectors("morse")
    with pytest.raises(ArgumentError, match="no volume"):
        evaluate(potential, configurations[0]["positions"], np.ones((3, 3)), configurations[0]["species"])
