"""Energy, forces and virial by brute force over all pairs and images, in numpy, for the test vectors.

Written from the formulas in ``docs/protocol/potentials.md`` alone, and independent of both backends. Axis letters:
``N`` atoms, ``S`` species, ``M`` knots.
"""

from __future__ import annotations

import itertools
import math

import numpy as np


def lennard_jones(r, epsilon, sigma):
    """Return φ(r) and φ'(r)."""
    s6 = (sigma / r) ** 6
    return 4 * epsilon * (s6 * s6 - s6), 4 * epsilon * (-12 * s6 * s6 + 6 * s6) / r


def mie(r, epsilon, sigma, n, m):
    """Return φ(r) and φ'(r)."""
    prefactor = n / (n - m) * (n / m) ** (m / (n - m)) * epsilon
    repulsive, attractive = (sigma / r) ** n, (sigma / r) ** m
    return prefactor * (repulsive - attractive), prefactor * (-n * repulsive + m * attractive) / r


def morse(r, epsilon, r0, alpha):
    """Return φ(r) and φ'(r)."""
    e = np.exp(-alpha * (r - r0))
    return epsilon * ((1 - e) ** 2 - 1), 2 * epsilon * alpha * (1 - e) * e


def natural_spline(x, y):
    """Return the second derivatives at the knots of the natural cubic spline, by a dense solve."""
    h = np.diff(x)
    matrix, right = np.eye(len(x)), np.zeros(len(x))
    for k in range(1, len(x) - 1):
        matrix[k, k - 1 : k + 2] = h[k - 1] / 6, (h[k - 1] + h[k]) / 3, h[k] / 6
        right[k] = (y[k + 1] - y[k]) / h[k] - (y[k] - y[k - 1]) / h[k - 1]
    return np.linalg.solve(matrix, right)


def tabulated_pair(r, knots, energy):
    """Return φ(r) and φ'(r); linear below the first knot."""
    second = natural_spline(knots, energy)
    k = int(np.clip(np.searchsorted(knots, r.real, side="right") - 1, 0, len(knots) - 2))
    h = knots[k + 1] - knots[k]

    def at(x):
        a, b = (knots[k + 1] - x) / h, (x - knots[k]) / h
        value = a * energy[k] + b * energy[k + 1]
        value += ((a**3 - a) * second[k] + (b**3 - b) * second[k + 1]) * h * h / 6
        slope = (energy[k + 1] - energy[k]) / h
        slope += (-(3 * a * a - 1) * second[k] + (3 * b * b - 1) * second[k + 1]) * h / 6
        return value, slope

    if r.real < knots[0]:
        value, slope = at(knots[0])
        return value + slope * (r - knots[0]), slope
    return at(r)


PAIR = {"lennard_jones": lennard_jones, "mie": mie, "morse": morse, "tabulated_pair": tabulated_pair}


def pair_function(potential, a, b):
    """Return the pair function of species ``a`` and ``b`` for a potential as it stands in a vector file."""
    parameters = {name: np.asarray(value) for name, value in potential["parameters"].items()}
    if potential["family"] == "tabulated_pair":
        return lambda r: tabulated_pair(np.asarray(r), parameters["r"], parameters["energy"][a, b])
    chosen = {name: value[a, b] for name, value in parameters.items()}
    return lambda r: PAIR[potential["family"]](r, **chosen)


def image_range(cell, cutoff):
    """Return how many images to look at along each lattice vector, for displacements reduced to half a cell."""
    heights = abs(np.linalg.det(cell)) / np.array(
        [np.linalg.norm(np.cross(cell[(k + 1) % 3], cell[(k + 2) % 3])) for k in range(3)]
    )
    return [range(-n, n + 1) for n in (np.ceil(cutoff / heights).astype(int) + 1)]


def pairs(potential, cell, positions, species):
    """Yield ``(i, j, r_ij, a, b)`` for every ordered pair and image within the cutoff, self-images included."""
    shifts = np.array(list(itertools.product(*image_range(cell, potential["cutoff"]))), dtype=float)
    inverse = np.linalg.inv(cell)
    for i, j in itertools.product(range(len(positions)), repeat=2):
        reduced = (positions[i] - positions[j]) @ inverse
        vectors = (reduced - np.round(reduced) + shifts) @ cell
        for vector in vectors:
            r = math.sqrt(vector @ vector)
            if 1e-9 < r < potential["cutoff"]:
                yield i, j, vector, species[i], species[j]


def evaluate(potential, cell, positions, species):
    """Return energy, energy with the shift, forces ``(N, 3)`` and virial ``(3, 3)``."""
    cell, positions = np.asarray(cell), np.asarray(positions)
    energies, shifts = [], []
    forces, virial = np.zeros_like(positions), np.zeros((3, 3))
    for i, _, vector, a, b in pairs(potential, cell, positions, species):
        pair = pair_function(potential, a, b)
        r = math.sqrt(vector @ vector)
        value, slope = pair(np.float64(r))
        force = -slope * vector / r
        energies.append(value / 2)
        shifts.append(-pair(np.float64(potential["cutoff"]))[0] / 2)
        forces[i] += force
        virial += np.outer(vector, force) / 2
    return math.fsum(energies), math.fsum([*energies, *shifts]), forces, virial


def tail(potential, cell, species):
    """Return the tail's energy, its energy with the shift given back, and its pressure; by quadrature in 1/r."""
    cutoff = potential["cutoff"]
    count = len(species)
    volume = abs(np.linalg.det(np.asarray(cell)))
    density = count / volume
    nodes, weights = np.polynomial.legendre.leggauss(400)
    u, w = (nodes + 1) / 2, weights / 2
    r = cutoff / u
    # dr = cutoff du / u²
    measure = w * cutoff / u**2
    energy = shifted = pressure = 0.0
    kinds = len(potential["species"])
    for a, b in itertools.product(range(kinds), repeat=2):
        fraction = species.count(a) * species.count(b) / count**2
        pair = pair_function(potential, a, b)
        value, slope = pair(r)
        integral = math.fsum(measure * value * r**2)
        energy += 2 * math.pi * density * fraction * integral
        shifted += 2 * math.pi * density * fraction * (integral + pair(cutoff)[0] * cutoff**3 / 3)
        pressure -= 2 / 3 * math.pi * density**2 * fraction * math.fsum(measure * slope * r**3)
    return count * energy, count * shifted, pressure
