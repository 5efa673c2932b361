"""The families of potentials: their parameters, what makes these legal, and their dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distmd_protocol.errors import ProtocolError

SMOOTHINGS = ("none", "shift")
RESERVED = ("stillinger_weber",)
"""Names that will have a meaning, and are refused until their test vectors exist."""

Parameters = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Parameter:
    """One parameter: its dimension (see ``Units.factor_to``) and whether it must be positive."""

    dimension: str
    positive: bool = True


@dataclass(frozen=True)
class Family:
    """A family. All parameters are pair parameters of shape ``(S, S)``."""

    name: str
    parameters: Mapping[str, Parameter]

    def check(self, values: Parameters, species: int, cutoff: float) -> None:
        """Refuse parameters that are not finite, symmetric and of the right shape and sign.

        Raises
        ------
        ProtocolError
        """
        for name, parameter in self.parameters.items():
            value = values[name]
            if value.shape != (species, species):
                raise ProtocolError(f"{name} has the shape {value.shape}, not {(species, species)}")
            if not np.all(np.isfinite(value)):
                raise ProtocolError(f"{name} is not finite everywhere")
            if not np.array_equal(value, value.T):
                raise ProtocolError(f"{name} is not symmetric: the pair (a, b) is the pair (b, a)")
            if parameter.positive and not np.all(value > 0):
                raise ProtocolError(f"{name} is not positive everywhere; its smallest value is {value.min()}")

    def check_tail(self, values: Parameters) -> None:
        """Refuse a tail correction that has no finite or no stated value.

        Raises
        ------
        ProtocolError
        """


class MieFamily(Family):
    """Mie: the exponents must differ, and a tail needs m > 3."""

    def check(self, values: Parameters, species: int, cutoff: float) -> None:
        """Also refuse n ≤ m."""
        super().check(values, species, cutoff)
        if not np.all(values["n"] > values["m"]):
            raise ProtocolError("the repulsive exponent n must exceed the attractive exponent m for every pair")

    def check_tail(self, values: Parameters) -> None:
        """Refuse m ≤ 3: the integral of r^(2 − m) to infinity diverges."""
        if not np.all(values["m"] > 3):
            raise ProtocolError(f"a tail correction needs m > 3, the smallest is {values['m'].min()}")


class TabulatedFamily(Family):
    """A natural cubic spline through common knots."""

    def check(self, values: Parameters, species: int, cutoff: float) -> None:
        """Refuse knots that do not increase, or end before the cutoff."""
        r, energy = values["r"], values["energy"]
        if r.ndim != 1 or r.size < 3 or not np.all(np.isfinite(r)) or not np.all(np.diff(r) > 0) or r[0] <= 0:
            raise ProtocolError(f"r of shape {r.shape}: give at least three positive increasing knots")
        if energy.shape != (species, species, r.size):
            raise ProtocolError(f"energy has the shape {energy.shape}, not {(species, species, r.size)}")
        if not np.all(np.isfinite(energy)) or not np.array_equal(energy, energy.transpose(1, 0, 2)):
            raise ProtocolError("energy is not finite everywhere, or not symmetric in the two species")
        if cutoff > r[-1]:
            raise ProtocolError(f"the cutoff {cutoff} lies beyond the last knot {r[-1]}")

    def check_tail(self, values: Parameters) -> None:
        """Refuse: nothing is known beyond the last knot."""
        raise ProtocolError("a tabulated_pair has no tail correction: nothing is known beyond its last knot")


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("lennard_jones", {"epsilon": Parameter("energy", False), "sigma": Parameter("length")}),
        MieFamily(
            "mie",
            {
                "epsilon": Parameter("energy", False),
                "sigma": Parameter("length"),
                "n": Parameter("1"),
                "m": Parameter("1"),
            },
        ),
        Family(
            "morse",
            {
                "epsilon": Parameter("energy", False),
                "r0": Parameter("length"),
                "alpha": Parameter("1/length"),
            },
        ),
        TabulatedFamily("tabulated_pair", {"r": Parameter("length"), "energy": Parameter("energy", False)}),
    )
}
