from __future__ import annotations

import itertools

import pytest

from distmd_protocol import Units, UnitsError, constants
from distmd_protocol.testkit import TOL
from distmd_protocol.units import ENERGY_IN_J, LENGTH_IN_M, MASS_IN_KG, TIME_IN_S

EVERY = [Units(*names) for names in itertools.product(LENGTH_IN_M, ENERGY_IN_J, MASS_IN_KG, [*TIME_IN_S, "natural"])]


@pytest.mark.parametrize(
    ("first", "second", "dimension", "factor"),
    [
        (Units.METAL, Units.MOLAR, "energy", 96.48533212331),
        (Units.METAL, Units.MOLAR, "length", 0.1),
        (Units.METAL, Units.MOLAR, "1/length", 10.0),
        (Units.METAL, Units.MOLAR, "energy/length**3", 96485.33212331),
        (Units.METAL, Units.MOLAR, "time", 1e-3),
        (Units("bohr", "hartree", "amu", "fs"), Units.METAL, "length", 0.529177210903),
        (Units("bohr", "hartree", "amu", "fs"), Units.METAL, "energy", 27.211386245988),
        (Units("bohr", "kcal/mol", "amu", "fs"), Units.MOLAR, "energy", 4.184),
        # ASE's unit of time: 10.1805 fs.
        (Units("angstrom", "eV", "amu", "natural"), Units.METAL, "time", 10.180505710759),
        # nm, kJ/mol and amu imply ps, up to the difference between amu and g/mol.
        (Units("nm", "kJ/mol", "g/mol", "natural"), Units.MOLAR, "time", 1.0),
        (Units.METAL, Units.METAL, "mass*length**2/time**2", 1.0),
        # 1 eV/Å³ in GPa.
        (Units.METAL, Units("m", "J", "kg", "s"), "energy/length**3", 160.2176634e9),
    ],
)
def test_factors(first, second, dimension, factor):
    assert first.factor_to(second, dimension) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("dimension", ["length", "energy", "mass", "time", "energy/length**3", "1/length", "1"])
def test_there_and_back_is_one(dimension):
    for units in EVERY:
        there = Units.METAL.factor_to(units, dimension)
        assert there * units.factor_to(Units.METAL, dimension) == pytest.approx(1.0, rel=TOL["units-f64"])


def test_the_same_unit_gives_exactly_one():
    for units in EVERY:
        assert units.factor_to(units, "energy") == 1.0
        assert units.factor_to(units, "time") == 1.0


@pytest.mark.parametrize("names", [("inch", "eV", "amu", "fs"), ("nm", "erg", "amu", "fs"), ("nm", "eV", "u", "fs")])
def test_unknown_units_are_refused_with_the_known_ones(names):
    with pytest.raises(UnitsError, match=r"unknown unit of .*; use one of"):
        Units(*names)


@pytest.mark.parametrize("dimension", ["charge", "energy/charge", "energy**0.5", "energy length", ""])
def test_unreadable_dimensions_are_refused(dimension):
    with pytest.raises(UnitsError):
        Units.METAL.factor_to(Units.MOLAR, dimension)


def test_constants_agree_with_each_other():
    assert pytest.approx(0.00831446261815324, rel=1e-15) == constants.BOLTZMANN_KJ_PER_MOL_K
    assert pytest.approx(8.617333262145179e-5, rel=1e-12) == constants.BOLTZMANN_EV_PER_K
    assert pytest.approx(96.48533212331, rel=1e-12) == constants.EV_IN_KJ_PER_MOL
    assert pytest.approx(27.211386245988, rel=1e-12) == constants.HARTREE_J / constants.ELEMENTARY_CHARGE_C
