"""The argon example's target, checked by another road: an equation of state of the Lennard-Jones fluid."""

import csv
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import least_squares

from distmd_protocol import constants

teqp = pytest.importorskip("teqp")
TABLE = Path(__file__).parents[3] / "tools" / "data" / "argon_reference.csv"
KB = constants.BOLTZMANN_KJ_PER_MOL_K
NM3 = constants.AVOGADRO_PER_MOL * 1e-24


@pytest.fixture(scope="module")
def reference():
    if not TABLE.exists():
        pytest.skip(f"the reference table is not beside this package: {TABLE}")
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    rows = [row for row in csv.DictReader(lines) if row["role"] == "fit"]
    names = ("temperature_K", "density_mol_per_L", "pressure_MPa", "residual_internal_energy_kJ_per_mol")
    return np.array([[float(row[name]) for name in names] for row in rows]).T


def test_lennard_jones_fluid_fits_argon_where_the_training_must_end(reference):
    # Thol, Rutkai, Köster, Lustig, Span, Vrabec, J. Phys. Chem. Ref. Data 45, 023101 (2016).
    temperature, density, pressure, energy = reference
    assert len(temperature) == 8
    fluid = teqp.make_model({"kind": "LJ126_TholJPCRD2016", "model": {}})
    z = np.array([1.0])
    # mol/L · K · kJ/mol/K = MPa.
    ideal = density * KB * temperature

    def residuals(x):
        reduced = list(zip(temperature / np.exp(x[0]), density * NM3 * np.exp(3 * x[1]), strict=True))
        factor = np.array([1 + fluid.get_Ar01(t, rho, z) for t, rho in reduced])
        u = np.array([fluid.get_Ar10(t, rho, z) for t, rho in reduced])
        return np.concatenate([factor - pressure / ideal, u - energy / (KB * temperature)])

    solution = least_squares(residuals, [np.log(105.0), np.log(0.335)])
    epsilon, sigma = np.exp(solution.x)
    assert epsilon == pytest.approx(117.3, abs=0.05)
    assert sigma * 10 == pytest.approx(3.396, abs=0.0005)
    assert np.abs(solution.fun[:8] * ideal).max() < 0.9
    assert np.abs(solution.fun[8:] * KB * temperature).max() < 0.0125
