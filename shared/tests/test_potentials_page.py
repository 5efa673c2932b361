"""The page on potentials: its code runs, and its closed forms are the tails of the vectors."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from distmd_protocol.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "protocol" / "potentials.md"
VECTORS = Path(__file__).parent / "vectors" / "potentials"


@pytest.fixture
def page():
    if not PAGE.exists():
        pytest.skip("the page is not beside this package")
    return PAGE.read_text(encoding="utf-8")


def test_its_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), {})


def test_it_names_every_family_and_parameter(page):
    for name, family in FAMILIES.items():
        section = page.partition(f"### `{name}`")[2].partition("\n###")[0]
        assert all(f"`{parameter}`" in section for parameter in family.parameters)


def integrals(family, p, rc):
    """Return ∫ φ r² dr and φ(r_c), as the page has them."""
    if family == "morse":

        def g(k):
            return math.exp(-k * (rc - p["r0"])) * (rc**2 / k + 2 * rc / k**2 + 2 / k**3)

        at_cutoff = p["epsilon"] * ((1 - math.exp(-p["alpha"] * (rc - p["r0"]))) ** 2 - 1)
        return p["epsilon"] * (g(2 * p["alpha"]) - 2 * g(p["alpha"])), at_cutoff
    n, m = p.get("n", 12.0), p.get("m", 6.0)
    c = n / (n - m) * (n / m) ** (m / (n - m)) * p["epsilon"]
    x = p["sigma"] / rc
    value = c * p["sigma"] ** 3 * (x ** (n - 3) / (n - 3) - x ** (m - 3) / (m - 3))
    return value, c * (x**n - x**m)


@pytest.mark.parametrize("family", ["lennard_jones", "mie", "morse"])
def test_the_closed_forms_of_the_tails(family):
    content = json.loads((VECTORS / f"{family}.json").read_text(encoding="utf-8"))
    rc = content["potential"]["cutoff"]
    for row in content["configurations"]:
        count, species = len(row["species"]), row["species"]
        density = count / abs(np.linalg.det(row["cell"]))
        energy = shifted = pressure = 0.0
        for a in range(2):
            for b in range(2):
                weight = species.count(a) * species.count(b) / count**2
                p = {name: value[a][b] for name, value in content["potential"]["parameters"].items()}
                integral, at_cutoff = integrals(family, p, rc)
                energy += 2 * math.pi * count * density * weight * integral
                shifted += 2 * math.pi * count * density * weight * (integral + at_cutoff * rc**3 / 3)
                pressure -= 2 / 3 * math.pi * density**2 * weight * (-3 * integral - at_cutoff * rc**3)
        assert row["tail_energy"] == pytest.approx(energy, rel=1e-11)
        assert row["tail_energy_shifted"] == pytest.approx(shifted, rel=1e-11)
        assert row["tail_pressure"] == pytest.approx(pressure, rel=1e-11)
