import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_md import partition, space

from chemtrain_mpi.potentials import PairTerms, evaluate, export_potential, load
from distmd_protocol import CheckpointError, ProtocolError, Units

NM = Units("nm", "kJ/mol", "amu", "ps")
ARGON = {"epsilon": jnp.float32(0.9754), "sigma": jnp.float32(0.33996)}


def test_export_and_load_keep_every_bit_and_the_units(tmp_path):
    terms = PairTerms("lennard_jones", 0.85, "shift")
    written = export_potential(
        tmp_path / "p",
        terms,
        ARGON,
        species=("Ar",),
        masses=(39.948,),
        units=NM,
        tail_correction=True,
        smoothing="none",
        meta={"fitted_to": "x"},
    )
    loaded = load(tmp_path / "p")
    assert loaded.potential.parameters["epsilon"] == np.float64(np.float32(0.9754))
    assert loaded.terms == PairTerms("lennard_jones", 0.85, "none")
    assert loaded.potential.tail_correction
    assert written.units == loaded.potential.units == NM
    assert load(tmp_path / "p", units=Units.METAL).potential.cutoff == pytest.approx(8.5, rel=1e-14)


@pytest.mark.usefixtures("x64")
def test_loaded_artefact_is_an_energy_function_for_jax_md(tmp_path):
    pairs = np.array([[0.9, 0.8], [0.8, 1.1]])
    params = {"epsilon": pairs, "r0": 0.38 * pairs**0.1, "alpha": 15.0 + pairs}
    terms = PairTerms("morse", 0.9, "shift")
    export_potential(
        tmp_path / "p", terms, params, species=("A", "B"), masses=(1.0, 2.0), units=NM, tail_correction=False
    )
    loaded = load(tmp_path / "p", units=Units.METAL)
    rng, edge, names = np.random.default_rng(0), 19.0, ["B", "A"] * 10
    position = jnp.asarray(rng.uniform(size=(20, 3)))
    displacement, _ = space.periodic_general(edge, fractional_coordinates=True)
    neighbor = partition.neighbor_list(
        displacement, edge, 9.0, fractional_coordinates=True, disable_cell_list=True
    ).allocate(position)
    energy = jax.jit(loaded.energy_fn(species=names))(position, neighbor, box=jnp.asarray(edge))
    expected = evaluate(loaded.potential, np.asarray(position) * edge, np.eye(3) * edge, names).energy
    assert float(energy) == pytest.approx(expected, rel=1e-10)


def test_tabulated_pair_goes_out_and_in(tmp_path):
    knots = np.linspace(0.3, 0.9, 12)
    terms = PairTerms("tabulated_pair", 0.9)
    params = {"r": knots, "energy": np.cos(knots)}
    export_potential(tmp_path / "p", terms, params, species=("W",), masses=(18.0,), units=NM, tail_correction=False)
    np.testing.assert_array_equal(load(tmp_path / "p").potential.parameters["energy"], np.cos(knots)[None, None])


def test_a_float32_table_that_ends_at_the_cutoff_goes_out_and_one_that_ends_before_it_does_not(tmp_path):
    terms, rest = PairTerms("tabulated_pair", 0.9), {"species": ("W",), "masses": (18.0,), "units": NM}
    knots = np.linspace(0.3, 0.9, 12, dtype=np.float32)
    for last in (knots[-1], np.nextafter(knots[-1], np.float32(0))):
        assert float(last) < 0.9
        params = {"r": jnp.asarray([*knots[:-1], last]), "energy": jnp.cos(knots)}
        export_potential(tmp_path / "p", terms, params, tail_correction=False, **rest)
        written = load(tmp_path / "p").potential.parameters["r"]
        assert written[-1] == 0.9
        np.testing.assert_array_equal(written[:-1], knots[:-1])
    knots[-1] *= 1 - 1e-6
    with pytest.raises(ProtocolError, match="beyond the last knot"):
        export_potential(tmp_path / "q", terms, {"r": knots, "energy": np.cos(knots)}, tail_correction=False, **rest)


def test_senseless_artefacts_are_refused(tmp_path):
    with pytest.raises(ProtocolError):
        export_potential(
            tmp_path / "p",
            PairTerms("lennard_jones", 0.85),
            {"epsilon": jnp.nan, "sigma": 0.3},
            species=("Ar",),
            masses=(39.948,),
            units=NM,
            tail_correction=False,
        )
    with pytest.raises(CheckpointError):
        load(tmp_path / "nothing")
