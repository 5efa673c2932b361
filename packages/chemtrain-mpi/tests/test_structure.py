"""Angles and coordination, against perfect lattices and plain loops."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from crystals import DIAMOND, FCC, crystal, neighbors, snapshot

from chemtrain_mpi import quantities
from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.observables import normalized_histogram

pytestmark = pytest.mark.once

DEGREES = np.deg2rad(np.arange(0.0, 181.0, 5.0) + np.array([0.0, *[0.5] * 35, 0.0]))


def counts(position, edge, cutoff, edges=DEGREES, reach=None):
    quantity = quantities.angular_distribution(edges, cutoff)
    neighbor = neighbors(jnp.asarray(position), edge, reach or 1.05 * cutoff, spare=2)
    return np.asarray(jax.jit(lambda r: quantity(snapshot(r), neighbor=neighbor, box=jnp.asarray(edge)))(position))


def test_angles_of_perfect_lattices():
    # Diamond: four bonds, six angles, all 109.47°. Fcc: twelve bonds, 66 angles, 24·60° 12·90° 24·120° 6·180°.
    diamond = counts(crystal(DIAMOND, 2), 4.0, 1.0)
    at = np.searchsorted(DEGREES, np.arccos(-1 / 3)) - 1
    assert diamond[at] == pytest.approx(6.0)
    assert diamond.sum() == pytest.approx(6.0)
    fcc = counts(crystal(FCC, 2), 4.0, 1.6)
    for degrees, number in ((60.0, 24.0), (90.0, 12.0), (120.0, 24.0), (179.9, 6.0)):
        assert fcc[np.searchsorted(DEGREES, np.deg2rad(degrees)) - 1] == pytest.approx(number)
    assert fcc.sum() == pytest.approx(66.0)


def test_angles_equal_a_loop_over_triplets_and_their_density_has_integral_one():
    rng = np.random.default_rng(0)
    position, edge, cutoff = rng.uniform(size=(40, 3)).astype(np.float32), 4.0, 1.3
    found = counts(position, edge, cutoff)
    angles = []
    for centre in range(40):
        d = position - position[centre]
        d = (d - np.round(d)) * edge
        r = np.linalg.norm(d, axis=1)
        near = [j for j in range(40) if j != centre and r[j] < cutoff]
        angles += [np.arccos(np.clip(d[j] @ d[k] / (r[j] * r[k]), -1, 1)) for j, k in combinations(near, 2)]
    expected = np.histogram(angles, DEGREES)[0] / 40
    np.testing.assert_allclose(found, expected, atol=1.5 / 40)
    assert found.sum() == pytest.approx(len(angles) / 40)
    density = normalized_histogram("adf", DEGREES)({"adf": jnp.stack([found, found])}, jnp.array([0.25, 0.75]))
    assert float(jnp.sum(density * np.diff(DEGREES))) == pytest.approx(1.0, abs=1e-5)


def test_density_weighs_snapshots_by_their_counts():
    values = {"adf": jnp.array([[1.0, 0.0], [0.0, 3.0]])}
    density = normalized_histogram("adf", [0.0, 1.0, 3.0])(values, jnp.array([0.5, 0.5]))
    np.testing.assert_allclose(density, [0.25, 0.375])


def test_a_list_that_is_too_short_gives_nan_and_no_wrong_number():
    position = crystal(FCC, 2)
    assert np.all(np.isnan(counts(position, 4.0, 1.6, reach=1.2)))


def test_coordination_of_perfect_lattices_and_of_an_ideal_gas():
    box = jnp.asarray(4.0)
    for basis, cutoff, number in ((DIAMOND, 1.0, 4), (DIAMOND, 1.5, 16), (FCC, 1.6, 12)):
        found = quantities.coordination_number(cutoff)(snapshot(crystal(basis, 2)), box=box)
        assert float(found) == pytest.approx(number)
    one = jax.jit(lambda r: quantities.coordination_number(1.5)(snapshot(r), box=box))
    gas = [float(one(jax.random.uniform(jax.random.PRNGKey(k), (60, 3)))) for k in range(100)]
    expected = 59 / 64 * 4 / 3 * np.pi * 1.5**3
    assert np.mean(gas) == pytest.approx(expected, abs=4 * np.std(gas) / 10)


def test_senseless_angles_and_cutoffs_are_refused():
    with pytest.raises(ArgumentError, match="between 0 and π"):
        quantities.angular_distribution([0.0, 4.0], 1.0)
    with pytest.raises(ArgumentError, match="increasing angles"):
        quantities.angular_distribution([1.0, 0.5], 1.0)
    with pytest.raises(ArgumentError, match="cutoff is -1"):
        quantities.coordination_number(-1.0)
