"""Write the test vectors of the potentials: ``python make_potential_vectors.py`` in this folder's parent's place.

Lengths in Å, energies in eV. The results are committed; a test shows that this script still gives them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import reference_potentials as reference

FOLDER = Path(__file__).parent / "potentials"
CUTOFF = 6.5
UNITS = {"length": "angstrom", "energy": "eV", "mass": "amu", "time": "fs"}
PAIR_PARAMETERS = {
    "lennard_jones": {"epsilon": [[0.0103, 0.0125], [0.0125, 0.0141]], "sigma": [[3.405, 3.52], [3.52, 3.65]]},
    "mie": {
        "epsilon": [[0.0103, 0.0125], [0.0125, 0.0141]],
        "sigma": [[3.405, 3.52], [3.52, 3.65]],
        "n": [[12.26, 13.0], [13.0, 14.5]],
        "m": [[6.0, 6.2], [6.2, 6.7]],
    },
    "morse": {
        "epsilon": [[0.0103, 0.0125], [0.0125, 0.0141]],
        "r0": [[3.82, 3.95], [3.95, 4.1]],
        "alpha": [[1.55, 1.5], [1.5, 1.42]],
    },
}


def table():
    """Return uneven knots and energies that no simple formula gives; some pairs of the vectors lie below the first."""
    rng = np.random.default_rng(7)
    r = np.round(np.linspace(3.15, 6.8, 24) + rng.uniform(-0.04, 0.04, 24), 3)
    energy = np.zeros((2, 2, 24))
    for a, b, sigma, epsilon in ((0, 0, 3.4, 0.0103), (0, 1, 3.5, 0.0125), (1, 1, 3.65, 0.0141)):
        x = (sigma / r) ** 6
        value = np.round(4 * epsilon * (x * x - x) + 0.0004 * np.sin(3 * r + a + b), 6)
        energy[a, b] = energy[b, a] = value
    return {"r": r.tolist(), "energy": energy.tolist()}


def scatter(rng, cell, count, distance):
    """Return positions in a cell, no two images nearer than ``distance``."""
    cell = np.asarray(cell, dtype=float)
    placed: list[np.ndarray] = []
    shifts = np.array([(i, j, k) for i in range(-2, 3) for j in range(-2, 3) for k in range(-2, 3)])
    while len(placed) < count:
        trial = rng.uniform(0, 1, 3)
        nearest = [np.linalg.norm((trial - other + shifts) @ cell, axis=1).min() for other in placed]
        if not nearest or min(nearest) > distance:
            placed.append(trial)
    return np.round(np.array(placed) @ cell, 6)


def configurations():
    """Return the five configurations: name, cell (rows are lattice vectors), positions, species."""
    rng = np.random.default_rng(20)
    ortho = [[13.5, 0.0, 0.0], [0.0, 14.2, 0.0], [0.0, 0.0, 15.1]]
    triclinic = [[14.0, 0.0, 0.0], [3.1, 13.6, 0.0], [-2.2, 4.0, 14.2]]
    small = [[6.1, 0.0, 0.0], [0.4, 6.6, 0.0], [0.0, -0.7, 7.3]]
    skewed = [[9.0, 0.0, 0.0], [4.3, 9.5, 0.0], [-4.1, 3.9, 10.0]]
    wide = [[18.0, 0.0, 0.0], [0.0, 18.0, 0.0], [0.0, 0.0, 18.0]]
    unwrapped = scatter(rng, skewed, 10, 3.1)
    unwrapped += rng.integers(-3, 4, unwrapped.shape) @ np.array(skewed)
    few = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 3.9], [7.4985, 1.0, 1.0], [17.0, 9.0, 9.0], [2.3, 9.4, 9.0]])
    return [
        ("orthorhombic", ortho, scatter(rng, ortho, 24, 3.0), [0] * 24),
        ("triclinic", triclinic, scatter(rng, triclinic, 24, 3.0), [0, 1] * 12),
        ("smaller-than-two-cutoffs", small, scatter(rng, small, 4, 3.1), [0, 1, 0, 0]),
        ("skewed-and-unwrapped", skewed, np.round(unwrapped, 6), [0, 0, 1, 0, 1, 1, 0, 0, 0, 1]),
        ("close-and-at-the-cutoff", wide, few, [0, 1, 0, 1, 0]),
    ]


def build(family):
    """Return the content of a family's vector file."""
    parameters = table() if family == "tabulated_pair" else PAIR_PARAMETERS[family]
    potential = {
        "family": family,
        "species": ["Ar", "Kr"],
        "masses": [39.948, 83.798],
        "parameters": parameters,
        "cutoff": CUTOFF,
        "smoothing": "none",
        "tail_correction": False,
        "units": UNITS,
    }
    rows = []
    for name, cell, positions, species in configurations():
        energy, shifted, forces, virial = reference.evaluate(potential, cell, positions, species)
        row = {
            "name": name,
            "cell": cell,
            "pbc": [True, True, True],
            "positions": positions.tolist(),
            "species": species,
            "energy": energy,
            "energy_shifted": shifted,
            "forces": forces.tolist(),
            "virial": virial.tolist(),
        }
        if family != "tabulated_pair":
            names = ("tail_energy", "tail_energy_shifted", "tail_pressure")
            row |= dict(zip(names, map(float, reference.tail(potential, cell, species)), strict=True))
        rows.append(row)
    return {
        "format": "distmd-potential-vectors",
        "version": 1,
        "description": "Brute force over all pairs and images in float64. cell: rows are lattice vectors; species: "
        "index into potential.species; energy: smoothing 'none'; energy_shifted: smoothing 'shift'; virial: sum over "
        "pairs of r_ij F_ij, positive for repulsion; tail_*: what tail_correction adds for the whole system.",
        "potential": potential,
        "configurations": rows,
    }


def main():
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for family in reference.PAIR:
        with open(FOLDER / f"{family}.json", "w", encoding="utf-8") as file:
            json.dump(build(family), file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
