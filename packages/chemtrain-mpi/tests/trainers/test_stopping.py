import harmonic
import numpy as np
import pytest

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.trainers import stopping
from distmd_protocol import list_checkpoints


def test_criteria():
    falling = list(np.linspace(10.0, 1.0, 10))
    assert stopping.max_loss(falling) == falling[5]
    assert stopping.ave_loss(falling) == pytest.approx(np.mean(falling[5:]))
    assert stopping.window_median(falling) > 0.4
    assert stopping.window_median([2.0] * 10) == 0.0
    # One bad epoch moves a mean and no median.
    assert stopping.window_median([3.0] * 5 + [2.0, 2.0, 100.0, 2.0, 2.0]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", list(stopping.CRITERIA))
def test_no_decision_before_a_full_window(name):
    assert stopping.criterion(name)([1.0, 0.9]) == np.inf


def test_names_functions_and_nothing():
    assert stopping.criterion(None) is None
    assert stopping.criterion(min) is min
    with pytest.raises(ArgumentError, match="window_median"):
        stopping.criterion("luck")


def test_the_last_epoch_is_stored_whatever_the_frequency_and_however_it_ends(tmp_path):
    def criterion(losses):
        return 0.0 if len(losses) == 5 else 1.0

    trainer = harmonic.trainer(snapshots=8, checkpoint_path=tmp_path, convergence_criterion=criterion)
    trainer.initialize_trajstates()
    trainer.train(3, checkpoint_freq=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch-000002", "epoch-000003"]
    trainer.train(9, checkpoint_freq=9, threshold=0.5)
    assert trainer.epoch == 5
    assert (tmp_path / "epoch-000005").is_dir()
