from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from distmd_protocol import (
    CheckpointError,
    Potential,
    ProtocolError,
    Units,
    load_potential,
    read_manifest,
    save_checkpoint,
    save_potential,
)
from distmd_protocol.families import FAMILIES
from distmd_protocol.testkit import TOL, run_ranks

KNOTS = np.linspace(3.0, 9.0, 8)


def parameters(family, species=2):
    """Return legal parameters."""
    full = {
        "epsilon": 0.0103, "sigma": 3.4, "n": 12.0, "m": 6.0, "r0": 3.8, "alpha": 1.5,
    }  # fmt: skip
    if family == "tabulated_pair":
        energy = np.sin(KNOTS) * np.ones((species, species, 1))
        return {"r": KNOTS, "energy": energy}
    return {name: np.full((species, species), full[name]) for name in FAMILIES[family].parameters}


def make(family="lennard_jones", **changes):
    content = {
        "family": family,
        "species": ("Ar", "Kr"),
        "masses": [39.948, 83.798],
        "parameters": parameters(family if family in FAMILIES else "lennard_jones"),
        "cutoff": 8.5,
        "smoothing": "none",
        "tail_correction": family != "tabulated_pair",
        "units": Units.METAL,
        "meta": {"fitted": "by hand"},
    }
    return Potential(**(content | changes))


def assert_equal(first, second, rel=0.0):
    for field in dataclasses.fields(Potential):
        one, other = getattr(first, field.name), getattr(second, field.name)
        if field.name == "parameters":
            assert list(one) == list(other)
            for name in one:
                np.testing.assert_allclose(one[name], other[name], rtol=rel, atol=0)
        elif field.name == "masses":
            np.testing.assert_allclose(one, other, rtol=rel, atol=0)
        elif field.name == "cutoff":
            assert one == pytest.approx(other, rel=rel, abs=0)
        else:
            assert one == other


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_exact(tmp_path, family):
    potential = make(family)
    save_potential(tmp_path / "p", potential)
    assert_equal(load_potential(tmp_path / "p"), potential)
    assert read_manifest(tmp_path / "p").kind == "potential"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("units", [Units.MOLAR, Units("bohr", "hartree", "kg", "s"), Units("m", "J", "kg", "s")])
def test_units_there_and_back(tmp_path, family, units):
    potential = make(family)
    save_potential(tmp_path / "p", potential)
    there = load_potential(tmp_path / "p", units=units)
    assert there.units == units
    assert there.cutoff == pytest.approx(potential.cutoff * Units.METAL.factor_to(units, "length"))
    assert_equal(there.to_units(Units.METAL), potential, TOL["units-f64"])


def test_each_parameter_is_converted_by_its_dimension():
    molar = make("morse").to_units(Units.MOLAR)
    assert molar.parameters["epsilon"][0, 0] == pytest.approx(0.0103 * 96.48533212331)
    assert molar.parameters["r0"][0, 0] == pytest.approx(0.38)
    assert molar.parameters["alpha"][0, 0] == pytest.approx(15.0)
    mie = make("mie").to_units(Units.MOLAR)
    assert mie.parameters["n"][0, 0] == 12.0
    table = make("tabulated_pair").to_units(Units.MOLAR)
    np.testing.assert_allclose(table.parameters["r"], KNOTS / 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "buckingham"}, "unknown family 'buckingham'; use one of lennard_jones"),
        ({"family": "stillinger_weber"}, "reserved: it has no test vectors yet"),
        ({"species": ()}, "at least one name"),
        ({"species": ("Ar", "Ar")}, "each once"),
        ({"masses": [1.0]}, "2 positive finite masses"),
        ({"masses": [1.0, 0.0]}, "2 positive finite masses"),
        ({"masses": [1.0, np.nan]}, "2 positive finite masses"),
        ({"cutoff": 0.0}, "positive length"),
        ({"cutoff": float("inf")}, "positive length"),
        ({"smoothing": "switch"}, "unknown smoothing 'switch'; use one of none, shift"),
        ({"units": {"length": "nm"}}, "units must be a Units"),
        ({"tail_correction": 1}, "tail_correction a bool"),
        ({"parameters": {"epsilon": np.ones((2, 2))}}, "has the parameters epsilon, sigma, not epsilon"),
        ({"parameters": parameters("mie")}, "has the parameters epsilon, sigma, not"),
    ],
)
def test_what_is_no_potential_is_refused_when_it_is_built(changes, message):
    with pytest.raises(ProtocolError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("family", "name", "value", "message"),
    [
        ("lennard_jones", "sigma", np.ones(2), r"sigma has the shape \(2,\), not \(2, 2\)"),
        ("lennard_jones", "sigma", [[1.0, 2.0], [3.0, 1.0]], "not symmetric"),
        ("lennard_jones", "sigma", [[1.0, 0.0], [0.0, 1.0]], "sigma is not positive everywhere"),
        ("lennard_jones", "epsilon", [[1.0, np.nan], [np.nan, 1.0]], "not finite"),
        ("lennard_jones", "epsilon", [["a", "b"], ["b", "a"]], "give real numbers"),
        ("morse", "alpha", -np.ones((2, 2)), "alpha is not positive"),
        ("mie", "m", np.full((2, 2), 12.0), "n must exceed"),
        ("mie", "m", np.full((2, 2), 3.0), "needs m > 3"),
        ("tabulated_pair", "r", KNOTS[::-1], "increasing knots"),
        ("tabulated_pair", "r", KNOTS - 3.0, "positive increasing knots"),
        ("tabulated_pair", "r", KNOTS * 0.5, "beyond the last knot"),
        ("tabulated_pair", "energy", np.zeros((2, 2, 7)), "energy has the shape"),
    ],
)
def test_illegal_parameters_are_refused(family, name, value, message):
    with pytest.raises(ProtocolError, match=message):
        make(family, parameters=parameters(family) | {name: value})


def test_the_tail_of_a_table_is_refused():
    with pytest.raises(ProtocolError, match="nothing is known beyond its last knot"):
        make("tabulated_pair", tail_correction=True)


def test_arrays_are_copied_and_float64():
    masses = np.array([1, 2])
    potential = make(masses=masses)
    masses[:] = 0
    assert potential.masses.tolist() == [1.0, 2.0]
    assert potential.masses.dtype == np.float64


def collective(comm, folder):
    """Save and load on every rank."""
    save_potential(f"{folder}/p", make(), comm=comm)
    assert_equal(load_potential(f"{folder}/p", comm=comm), make())
    return comm.rank


@pytest.mark.parametrize("size", [1, 2])
def test_collective(tmp_path, size):
    assert run_ranks(collective, size, str(tmp_path)) == list(range(size))


def test_another_kind_is_refused(tmp_path, arrays):
    save_checkpoint(tmp_path / "x", arrays, kind="dynamics", step=0)
    with pytest.raises(CheckpointError, match="is of kind 'dynamics', expected was 'potential'"):
        load_potential(tmp_path / "x")


@pytest.mark.parametrize(
    "change",
    [
        {"family": "buckingham"}, {"species": 3}, {"cutoff": "far"}, {"cutoff": None}, {"units": {"length": "nm"}},
        {"units": {"length": "inch", "energy": "eV", "mass": "amu", "time": "fs"}}, {"smoothing": []}, {"meta": 7},
        {"species": ["Ar", 5]},
    ],
)  # fmt: skip
def test_a_file_that_holds_no_potential_is_a_checkpoint_error(tmp_path, change):
    save_potential(tmp_path / "good", make())
    manifest = read_manifest(tmp_path / "good")
    arrays = {"masses": make().masses} | {f"parameters/{k}": v for k, v in make().parameters.items()}
    meta = json.loads(json.dumps(dict(manifest.meta))) | change
    save_checkpoint(tmp_path / "bad", arrays, kind="potential", step=0, meta=meta)
    with pytest.raises(CheckpointError, match="does not hold one"):
        load_potential(tmp_path / "bad")
