"""Explicit units of length, energy, mass and time, and factors between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from distmd_protocol import constants
from distmd_protocol.errors import UnitsError

_MOL = constants.AVOGADRO_PER_MOL

LENGTH_IN_M = {"angstrom": 1e-10, "nm": 1e-9, "bohr": constants.BOHR_M, "m": 1.0}
ENERGY_IN_J = {
    "eV": constants.ELEMENTARY_CHARGE_C,
    "kJ/mol": 1000.0 / _MOL,
    "kcal/mol": 1000.0 * constants.CALORIE_J / _MOL,
    "hartree": constants.HARTREE_J,
    "J": 1.0,
}
MASS_IN_KG = {"amu": constants.ATOMIC_MASS_KG, "g/mol": 1e-3 / _MOL, "kg": 1.0}
TIME_IN_S = {"fs": 1e-15, "ps": 1e-12, "s": 1.0}
NATURAL = "natural"
"""The time unit length·√(mass/energy) that the other three imply."""

_FACTOR = re.compile(r"(length|energy|mass|time)(?:\*\*(-?\d+))?")


@dataclass(frozen=True)
class Units:
    """A system of units.

    Parameters
    ----------
    length
        ``"angstrom"``, ``"nm"``, ``"bohr"`` or ``"m"``.
    energy
        ``"eV"``, ``"kJ/mol"``, ``"kcal/mol"``, ``"hartree"`` or ``"J"``. The energy is that of the system, not of a
        mole of systems: 1 kJ/mol is 1 kJ divided by Avogadro's number.
    mass
        ``"amu"``, ``"g/mol"`` or ``"kg"``.
    time
        ``"fs"``, ``"ps"``, ``"s"``, or ``"natural"`` for length·√(mass/energy).

    Raises
    ------
    UnitsError
        For an unknown name; the message lists the known ones.
    """

    length: str
    energy: str
    mass: str
    time: str

    METAL: ClassVar[Units]
    """Å, eV, amu, fs."""
    MOLAR: ClassVar[Units]
    """nm, kJ/mol, amu, ps: self-consistent."""

    def __post_init__(self) -> None:
        for dimension, table in _TABLES.items():
            name = getattr(self, dimension)
            known = [*table, NATURAL] if dimension == "time" else list(table)
            if name not in known:
                raise UnitsError(f"unknown unit of {dimension} {name!r}; use one of {', '.join(known)}")

    def in_si(self, dimension: str) -> float:
        """Return one unit of ``"length"``, ``"energy"``, ``"mass"`` or ``"time"`` in m, J, kg or s."""
        if dimension not in _TABLES:
            raise UnitsError(f"unknown dimension {dimension!r}; use one of {', '.join(_TABLES)}")
        name = getattr(self, dimension)
        if name == NATURAL:
            return float(self.in_si("length") * (self.in_si("mass") / self.in_si("energy")) ** 0.5)
        return _TABLES[dimension][name]

    def factor_to(self, other: Units, dimension: str) -> float:
        """Return the factor that turns a value in these units into ``other`` units.

        Parameters
        ----------
        other
            The wanted units.
        dimension
            A product of powers such as ``"length"``, ``"energy/length**3"``, ``"1/length"``,
            ``"mass*length**2/time**2"``.

        Raises
        ------
        UnitsError
            If the dimension cannot be read.
        """
        factor = 1.0
        for name, power in _parse(dimension).items():
            if getattr(self, name) != getattr(other, name) or NATURAL in (self.time, other.time):
                factor *= (self.in_si(name) / other.in_si(name)) ** power
        return factor

    def to_json(self) -> dict[str, str]:
        """Return the four names as a JSON-able dict."""
        return {dimension: getattr(self, dimension) for dimension in _TABLES}


_TABLES = {"length": LENGTH_IN_M, "energy": ENERGY_IN_J, "mass": MASS_IN_KG, "time": TIME_IN_S}

Units.METAL = Units("angstrom", "eV", "amu", "fs")
Units.MOLAR = Units("nm", "kJ/mol", "amu", "ps")


def _parse(dimension: str) -> dict[str, int]:
    powers: dict[str, int] = {}
    sign = 1
    for token in re.split(r"(?<!\*)([*/])(?!\*)", dimension.replace(" ", "")):
        if token in ("*", "/"):
            sign = 1 if token == "*" else -1
            continue
        match = _FACTOR.fullmatch(token)
        if match:
            powers[match[1]] = powers.get(match[1], 0) + sign * int(match[2] or 1)
        elif token != "1":
            raise UnitsError(
                f"cannot read {token!r} in the dimension {dimension!r}; write products and quotients of powers of "
                "length, energy, mass and time, such as 'energy/length**3'"
            )
    return powers
