"""What a file holds of a trajectory. Whole trainings that resume are in ``test_difftre.py``."""

import jax.numpy as jnp
import numpy as np
import pytest

from chemtrain_mpi.capacity import Capacity
from chemtrain_mpi.trainers.checkpoints import restore_trajectories, trajectory_arrays
from chemtrain_mpi.trajectories import Trajectory

pytestmark = pytest.mark.once


def test_both_sizes_of_a_list_come_back():
    # Without the cells' the restored run would have to overflow to the same size again, with a program for each try.
    kwargs = {"kT": jnp.ones(())}
    stored = trajectory_arrays([Trajectory((), Capacity(13, cells), None, np.ones(4), kwargs) for cells in (0, 7)])
    assert [t.capacity for t in restore_trajectories(stored)] == [Capacity(13), Capacity(13, 7)]
