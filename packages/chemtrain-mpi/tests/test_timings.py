import pytest

from chemtrain_mpi import Timings, process_printouts
from chemtrain_mpi.errors import ArgumentError


def test_times_become_whole_steps():
    timings = process_printouts(0.002, 1.0, 0.2, 0.04)
    assert timings == Timings(0.002, 100, 20, 20)
    assert timings.total_steps == 500


def test_no_equilibration_is_allowed():
    assert process_printouts(1.0, 10.0, 0.0, 5.0).snapshots == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0.0, 1.0, 0.1, 0.1), "time_step is 0.0"),
        ((0.1, 1.0, 0.05, 0.1), "t_equilib 0.05 is no whole multiple"),
        ((0.1, 1.0, 0.9, 0.2), "lengthen total_time"),
        ((0.1, 1.0, 0.1, 0.2), "set total_time to 0.9"),
        ((0.1, float("nan"), 0.1, 0.2), "must be finite"),
        ((0.1, 1.0, -0.1, 0.1), "at least 0"),
        ((0.1, 1.0, 0.1, 0.0), "at least 1"),
    ],
)
def test_senseless_times_are_refused_with_the_remedy(arguments, says):
    with pytest.raises(ArgumentError, match=says):
        process_printouts(*arguments)
