"""Write the table of liquid-argon reference data that the demo trains on.

Source: Ch. Tegeler, R. Span, W. Wagner, "A New Equation of State for Argon Covering the Fluid Region for
Temperatures From the Melting Line to 700 K at Pressures up to 1000 MPa", J. Phys. Chem. Ref. Data 28, 779 (1999),
evaluated by CoolProp. The residual internal energy is u(T, rho) - u_ideal(T) = R T tau (d alpha_r / d tau), with the
gas constant of that equation (8.31451 J/mol/K).

    hatch run reference:write       # or: python tools/argon_reference.py [--out FILE]
"""

from __future__ import annotations

import argparse
import csv
import io
from dataclasses import dataclass
from pathlib import Path

import CoolProp

TABLE = Path(__file__).resolve().parent / "data" / "argon_reference.csv"

HEADER = """\
# Liquid argon: pressure and residual internal energy from a reference equation of state.
# source: Tegeler, Span, Wagner, J. Phys. Chem. Ref. Data 28, 779-850 (1999), doi:10.1063/1.556037
# evaluated by CoolProp (HEOS::Argon); written by tools/argon_reference.py
# temperature_K: kelvin, ITS-90
# density_mol_per_L: mol/L
# pressure_MPa: MPa
# residual_internal_energy_kJ_per_mol: u(T, rho) - u_ideal(T) at the same temperature, kJ/mol
# role: fit (training) or held-out (never shown to the training)
# state names: sat = saturated liquid; otherwise temperature and pressure
"""
COLUMNS = (
    "state",
    "temperature_K",
    "density_mol_per_L",
    "pressure_MPa",
    "residual_internal_energy_kJ_per_mol",
    "role",
)


@dataclass(frozen=True)
class StatePoint:
    """A state of the liquid. `pressure` is in MPa; None means the saturated liquid."""

    temperature: float
    pressure: float | None
    role: str

    @property
    def name(self) -> str:
        """Name of the state in the table."""
        return f"{self.temperature:g}K-" + ("sat" if self.pressure is None else f"{self.pressure:g}MPa")


STATES = (
    *(StatePoint(t, None, "fit") for t in (90.0, 100.0, 110.0, 120.0, 130.0)),
    StatePoint(100.0, 20.0, "fit"),
    StatePoint(120.0, 20.0, "fit"),
    StatePoint(140.0, 30.0, "fit"),
    StatePoint(115.0, 10.0, "held-out"),
)


def evaluate(state: StatePoint) -> tuple[float, float, float]:
    """Return density (mol/L), pressure (MPa) and residual internal energy (kJ/mol) of one state."""
    fluid = CoolProp.AbstractState("HEOS", "Argon")
    if state.pressure is None:
        fluid.update(CoolProp.QT_INPUTS, 0.0, state.temperature)
    else:
        fluid.update(CoolProp.PT_INPUTS, state.pressure * 1e6, state.temperature)
    residual = fluid.gas_constant() * state.temperature * fluid.tau() * fluid.dalphar_dTau()
    return fluid.rhomolar() / 1e3, fluid.p() / 1e6, residual / 1e3


def table() -> str:
    """Return the whole table as text: comment header, column names, one line a state."""
    text = io.StringIO()
    text.write(HEADER)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for state in STATES:
        density, pressure, energy = evaluate(state)
        # Seven digits: far below the uncertainty of the equation (0.02 % in density), and the same on every machine.
        writer.writerow(
            [state.name, f"{state.temperature:g}", f"{density:.6f}", f"{pressure:.6f}", f"{energy:.6f}", state.role]
        )
    return text.getvalue()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the liquid-argon reference table.")
    parser.add_argument("--out", type=Path, default=TABLE, help="file to write (default: tools/data)")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(table(), encoding="utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
