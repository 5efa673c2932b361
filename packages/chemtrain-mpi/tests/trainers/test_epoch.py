"""What an epoch leaves behind, with updates whose losses are known."""

from types import SimpleNamespace

import jax
import pytest

from chemtrain_mpi.collectives import Collectives
from chemtrain_mpi.trainers.epoch import Epochs
from chemtrain_mpi.trainers.history import History
from chemtrain_mpi.trainers.state import TrainerState
from distmd_protocol import LocalComm

pytestmark = pytest.mark.once


def run(losses, points=5, batch=2):
    """Epochs of two updates, of 2 and 3 state points, that add one to the parameter each."""
    remaining = iter(losses)

    def update(state, members, epoch):
        state.params += 1
        return {"loss": next(remaining), "batch": members, "recomputed": []}

    history = History(None, False)
    about = SimpleNamespace(count=points, batch_key=jax.random.PRNGKey)
    rule = SimpleNamespace(update=update)
    epochs = Epochs(Collectives(LocalComm()), about, rule, None, history, batch, bucket=False)
    bar = SimpleNamespace(update=lambda: None, set_postfix_str=lambda text: None)
    state = TrainerState(params=0, opt_state=None, best_params=0)
    for _ in range(len(losses) // epochs.updates):
        epochs.run(state, bar)
    return state, history.entries


def test_the_loss_of_an_epoch_counts_every_state_point_once():
    state, entries = run([1.0, 2.0])
    assert [len(entry["batch"]) for entry in entries] == [2, 3]
    assert state.epoch_losses == [pytest.approx((2 * 1.0 + 3 * 2.0) / 5)]


def test_the_best_parameters_are_those_that_had_the_smallest_loss():
    # Losses belong to the parameters before an update, so those after the best epoch are of another loss.
    state, _ = run([3.0, 3.0, 1.0, 1.0, 2.0, 2.0])
    assert state.epoch == 3
    assert state.best_loss == 1.0
    assert state.best_params == 2
    assert not state.mid_epoch
