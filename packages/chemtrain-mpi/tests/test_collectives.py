import json

import numpy as np
import pytest

from chemtrain_mpi.collectives import Collectives
from chemtrain_mpi.errors import OrderError
from distmd_protocol import LocalComm


class Scripted:
    """Two ranks, of which the other's answers are given."""

    rank, size = 0, 2

    def __init__(self, other):
        self.other = other

    def allgather(self, obj):
        return json.loads(json.dumps([obj, self.other]))

    def broadcast(self, obj, root=0):
        return obj


def test_one_rank_gets_its_own():
    comm = Collectives(LocalComm())
    assert (comm.rank, comm.size, comm.mpi) == (0, 1, None)
    assert comm.allgather([1]) == [[1]]
    assert comm.broadcast("x") == "x"
    bundle = [np.arange(3)]
    assert comm.share({4: bundle}, {4: 0})[4] is bundle
    np.testing.assert_array_equal(comm.sum(np.arange(3)), np.arange(3))


@pytest.mark.parametrize("other", [[1, "train: allgather"], [2, "train: broadcast"]])
def test_another_name_or_number_is_an_error_naming_both(other):
    comm = Collectives(Scripted(other))
    with comm.named("train"), pytest.raises(OrderError, match=r"rank 0: number 1, 'train: broadcast'; rank 1"):
        comm.broadcast(1)


def test_same_operation_passes():
    comm = Collectives(Scripted([1, "train: broadcast"]))
    with comm.named("train"):
        assert comm.broadcast(7) == 7
