"""The committed argon table: it says what its generator says, and it agrees with its published anchors."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
TABLE = TOOLS / "data" / "argon_reference.csv"


def rows() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def test_table_equals_what_the_generator_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("CoolProp", reason="CoolProp lives in the `reference` and `cross` environments")
    monkeypatch.syspath_prepend(str(TOOLS))
    import argon_reference

    assert argon_reference.table() == TABLE.read_text(encoding="utf-8")
    sys.modules.pop("argon_reference")


def test_table_names_its_source_and_units() -> None:
    header = "".join(line for line in TABLE.read_text(encoding="utf-8").splitlines(True) if line.startswith("#"))
    for words in ("Tegeler, Span, Wagner", "kJ/mol", "mol/L", "MPa", "kelvin"):
        assert words in header


def test_table_holds_eight_fit_states_and_one_held_out() -> None:
    roles = [row["role"] for row in rows()]
    assert roles.count("fit") == 8
    assert roles.count("held-out") == 1
    held_out = next(row for row in rows() if row["role"] == "held-out")
    assert float(held_out["temperature_K"]) == 115.0
    assert float(held_out["pressure_MPa"]) == pytest.approx(10.0)
    assert float(held_out["density_mol_per_L"]) == pytest.approx(31.437, abs=5e-4)


def test_saturation_pressures_follow_the_published_table() -> None:
    # Vapour pressures printed in Tegeler, Span and Wagner (1999), table of the saturation states, in MPa.
    published = {"90K-sat": 0.13351, "100K-sat": 0.32377, "110K-sat": 0.66526, "120K-sat": 1.2130, "130K-sat": 2.0255}
    found = {row["state"]: float(row["pressure_MPa"]) for row in rows()}
    for state, pressure in published.items():
        assert found[state] == pytest.approx(pressure, rel=2e-4)
