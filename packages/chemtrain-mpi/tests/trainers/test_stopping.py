import numpy as np
import pytest

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.trainers import stopping


def test_criteria():
    falling = list(np.linspace(10.0, 1.0, 10))
    assert stopping.max_loss(falling) == falling[5]
    assert stopping.ave_loss(falling) == pytest.approx(np.mean(falling[5:]))
    assert stopping.window_median(falling) > 0.4
    assert stopping.window_median([2.0] * 10) == 0.0


@pytest.mark.parametrize("name", list(stopping.CRITERIA))
def test_no_decision_before_a_full_window(name):
    assert stopping.criterion(name)([1.0, 0.9]) == np.inf


def test_names_functions_and_nothing():
    assert stopping.criterion(None) is None
    assert stopping.criterion(min) is min
    with pytest.raises(ArgumentError, match="window_median"):
        stopping.criterion("luck")
