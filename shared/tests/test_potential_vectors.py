"""The committed vectors are what the brute-force reference gives, and the reference is right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import reference_potentials as reference

from distmd_protocol import Potential, Units
from distmd_protocol.families import FAMILIES

FOLDER = Path(__file__).parent / "vectors" / "potentials"


def read(family):
    return json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_vectors_that_the_reference_gives(family):
    content = read(family)
    assert len(content["configurations"]) == 5
    potential = content["potential"]
    for row in content["configurations"]:
        energy, shifted, forces, virial = reference.evaluate(potential, row["cell"], row["positions"], row["species"])
        assert row["energy"] == pytest.approx(energy, rel=1e-12)
        assert row["energy_shifted"] == pytest.approx(shifted, rel=1e-12)
        np.testing.assert_allclose(row["forces"], forces, rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(row["virial"], virial, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vectors_are_a_legal_potential(family):
    content = dict(read(family)["potential"])
    Potential(**(content | {"units": Units(**content["units"])}))


def test_the_configurations_are_what_they_are_for():
    rows = {row["name"]: row for row in read("lennard_jones")["configurations"]}
    cutoff = read("lennard_jones")["potential"]["cutoff"]
    assert any(abs(x) > 1e-9 for x in np.tril(rows["triclinic"]["cell"], -1).ravel())
    small = np.array(rows["smaller-than-two-cutoffs"]["cell"])
    # So thin that an atom interacts with its own images.
    assert np.linalg.norm(small, axis=1).min() < cutoff
    skewed = rows["skewed-and-unwrapped"]
    fractional = np.array(skewed["positions"]) @ np.linalg.inv(skewed["cell"])
    assert fractional.min() < -1
    assert fractional.max() > 2
    close = np.array(rows["close-and-at-the-cutoff"]["positions"])
    assert np.linalg.norm(close[0] - close[1]) < read("tabulated_pair")["potential"]["parameters"]["r"][0]
    assert 0 < cutoff - np.linalg.norm(close[0] - close[2]) < 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_slopes_are_derivatives(family):
    potential = read(family)["potential"]
    pair = reference.pair_function(potential, 0, 1)
    for r in (2.9, 3.3, 3.777, 4.6, 6.1):
        if family == "tabulated_pair":
            # The table's branches depend on r, so no complex step through them.
            h = 1e-5
            numeric = (pair(np.float64(r + h))[0] - pair(np.float64(r - h))[0]) / (2 * h)
            assert pair(np.float64(r))[1] == pytest.approx(numeric, rel=1e-6)
        else:
            numeric = pair(np.complex128(r + 1e-30j))[0].imag / 1e-30
            assert pair(np.float64(r))[1] == pytest.approx(numeric, rel=1e-13)


def test_the_spline_is_natural_smooth_and_hits_its_knots():
    potential = read("tabulated_pair")["potential"]
    r = np.array(potential["parameters"]["r"])
    energy = np.array(potential["parameters"]["energy"])[0, 1]
    second = reference.natural_spline(r, energy)
    assert second[0] == pytest.approx(0, abs=1e-12)
    assert second[-1] == pytest.approx(0, abs=1e-12)
    for knot, value in zip(r[1:-1], energy[1:-1], strict=True):
        below, above = (reference.tabulated_pair(np.float64(knot + s), r, energy) for s in (-1e-9, 1e-9))
        assert below[0] == pytest.approx(value, abs=1e-9)
        assert below[1] == pytest.approx(above[1], abs=1e-6)


def test_mie_12_6_is_lennard_jones():
    for r in (3.0, 3.9, 5.5):
        np.testing.assert_allclose(
            reference.mie(r, 0.0103, 3.4, 12.0, 6.0), reference.lennard_jones(r, 0.0103, 3.4), rtol=1e-13
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_forces_and_virial_are_derivatives_of_the_energy(family):
    potential = read(family)["potential"]
    row = read(family)["configurations"][2]
    cell, positions, species = np.array(row["cell"]), np.array(row["positions"]), row["species"]
    h = 1e-5
    for atom, axis in ((0, 0), (2, 1), (3, 2)):
        moved = [positions.copy(), positions.copy()]
        moved[0][atom, axis] += h
        moved[1][atom, axis] -= h
        # The shifted energy is continuous at the cutoff.
        up, down = (reference.evaluate(potential, cell, p, species)[1] for p in moved)
        assert row["forces"][atom][axis] == pytest.approx(-(up - down) / (2 * h), rel=1e-5, abs=1e-8)
    for a, b in ((0, 0), (1, 0), (2, 1)):
        strain = np.zeros((3, 3))
        strain[a, b] = h
        up, down = (
            reference.evaluate(potential, cell @ (np.eye(3) + s).T, positions @ (np.eye(3) + s).T, species)[1]
            for s in (strain, -strain)
        )
        # U((1 + ε) r): dU/dε_ab = −Ξ_ba, and Ξ is symmetric for pair forces.
        assert row["virial"][a][b] == pytest.approx(-(up - down) / (2 * h), rel=1e-5, abs=1e-8)


def test_tails_by_independent_quadrature():
    mpmath = pytest.importorskip("mpmath")
    for family in ("lennard_jones", "mie", "morse"):
        content = read(family)
        potential, row = content["potential"], content["configurations"][0]
        cutoff, count = potential["cutoff"], len(row["species"])
        density = count / abs(np.linalg.det(row["cell"]))
        pair = reference.pair_function(potential, 0, 0)
        value = mpmath.quad(lambda r, p=pair: float(p(float(r))[0]) * r**2, [cutoff, 15, 50, mpmath.inf])
        slope = mpmath.quad(lambda r, p=pair: float(p(float(r))[1]) * r**3, [cutoff, 15, 50, mpmath.inf])
        shift = float(pair(cutoff)[0]) * cutoff**3 / 3
        # float64 inside: mpmath's own precision is not reached.
        assert row["tail_energy"] == pytest.approx(float(2 * math.pi * count * density * value), rel=1e-8)
        assert row["tail_energy_shifted"] == pytest.approx(
            float(2 * math.pi * count * density * (value + shift)), rel=1e-8
        )
        assert row["tail_pressure"] == pytest.approx(float(-2 / 3 * math.pi * density**2 * slope), rel=1e-8)


def test_the_lennard_jones_tail_in_closed_form():
    content = read("lennard_jones")
    potential, row = content["potential"], content["configurations"][0]
    epsilon, sigma = (potential["parameters"][name][0][0] for name in ("epsilon", "sigma"))
    x = (sigma / potential["cutoff"]) ** 3
    count = len(row["species"])
    density = count / abs(np.linalg.det(row["cell"]))
    # Allen and Tildesley, Computer Simulation of Liquids, section 2.8.
    energy = 8 / 3 * math.pi * density * epsilon * sigma**3 * (x**3 / 3 - x) * count
    pressure = 16 / 3 * math.pi * density**2 * epsilon * sigma**3 * (2 / 3 * x**3 - x)
    assert row["tail_energy"] == pytest.approx(energy, rel=1e-12)
    assert row["tail_pressure"] == pytest.approx(pressure, rel=1e-12)
