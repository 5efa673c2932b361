"""Comparing functions by what they do. Two ranks that differ are in ``test_ranks.py``."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from chemtrain_mpi.trainers import agreement
from distmd_protocol import AgreementError, LocalComm

PARAMS = {"a": jnp.arange(3.0), "b": jnp.asarray(2.0)}


class Second(LocalComm):
    """A second rank that answers with other numbers."""

    def __init__(self, change):
        self.change = change

    def allgather(self, obj):
        return [obj, {name: [self.change(float.fromhex(x)).hex() for x in numbers] for name, numbers in obj.items()}]


def probe(optimizer):
    return agreement.optimizer_probe(jax.jit(optimizer.update), PARAMS, optimizer.init(PARAMS))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (optax.sgd(0.1), optax.sgd(0.1001)),
        (optax.adam(0.1), optax.adam(0.1, b2=0.99)),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), optax.sgd(0.1)),
        # Alike at first.
        (optax.sgd(optax.linear_schedule(0.1, 0.0, 500)), optax.sgd(optax.linear_schedule(0.1, 0.0, 600))),
        (optax.sgd(optax.piecewise_constant_schedule(0.1, {900: 0.1})), optax.sgd(0.1)),
    ],
)
def test_optimisers_of_one_structure_are_told_apart_by_their_updates(one, other):
    assert probe(one) == probe(one)
    assert probe(one) != probe(other)


def test_counts_of_any_kind_of_state_can_be_advanced():
    for optimizer in (optax.MultiSteps(optax.adam(0.1), 4), optax.adamw(0.1), optax.lbfgs(0.1, linesearch=None)):
        assert all(np.isfinite(probe(optimizer)))


def test_settings_of_a_partial_are_its_numbers_and_words():
    def simulator(energy_fn, shift_fn, dt, kT):
        return energy_fn, shift_fn, dt, kT

    found = agreement.settings(partial(partial(simulator, shift_fn=print, dt=0.005), kT=np.float32(1.0)))
    assert found == {"shift_fn": [], "dt": [0.005], "kT": [1.0]}
    assert agreement.settings(simulator) == {}


def test_losses_and_criteria_are_called_around_their_targets():
    targets = {"g": {"target": jnp.ones((2, 4)), "gamma": jnp.ones(2)}}
    squared, absolute = (
        agreement.losses_probe({"g": lambda a, b, p=p: jnp.mean(jnp.abs(a - b) ** p)}, targets) for p in (2, 1)
    )
    assert squared[0] == absolute[0] == 0.0
    assert squared[1] != absolute[1]
    assert agreement.criterion_probe(None) == []
    assert agreement.criterion_probe(max) != agreement.criterion_probe(min)


def test_other_numbers_are_named_and_the_same_are_not():
    numbers = {"optimizer": [1.0, float("nan")], "loss_fn": [2.0]}
    agreement.check_behaviour(Second(lambda x: x), numbers, exact=True)
    with pytest.raises(AgreementError, match=r"optimizer \(ranks 1\); loss_fn \(ranks 1\)"):
        agreement.check_behaviour(Second(lambda x: np.nextafter(x, 9.0).item() + 1e-15), numbers, exact=True)
    agreement.check_behaviour(Second(lambda x: x * (1 + 1e-6)), numbers, exact=False)
    with pytest.raises(AgreementError):
        agreement.check_behaviour(Second(lambda x: x * 1.001), numbers, exact=False)


def test_projections_see_order_and_sign():
    base = agreement.projections([np.array([1.0, 2.0])])
    assert len(base) == 2
    assert base != agreement.projections([np.array([2.0, 1.0])])
    assert base != agreement.projections([np.array([-1.0, -2.0])])
