"""Debug mode: ranks that enter different operations are told apart, with the names of both, instead of waiting."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from systems import fcc, lj

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel, collectives
from nvalchemi_distributed.collectives import RollCall
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.dynamics import NVE, HostMemory, maxwell_boltzmann
from nvalchemi_distributed.dynamics.hooks import LoggingHook, SnapshotHook
from nvalchemi_distributed.errors import TransportError
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.stages import HookScope

pytestmark = pytest.mark.gloo


class LocalDecision(NVE):
    """What the guide forbids: a branch taken from this rank's atoms alone, with a reduction inside it."""

    def post_update(self, batch):
        super().post_update(batch)
        if self.step_count == 3 and bool((batch.atom_id == 0).any()):
            self.reduce.sum(batch.velocities.sum(0), "heat_flux")


def start(integrator, comm, hooks=(), debug=True):
    batch = Batch.from_data_list([fcc(repeat=(6, 3, 3), a=5.5)])
    maxwell_boltzmann(batch, 500.0, seed=2)
    config = DomainConfig(cutoff=5.0, skin=0.5, debug_collectives=debug)
    parallel = DomainParallel(integrator, config, hooks=hooks)
    owned = parallel.partition(batch if comm.rank == 0 else None)
    assert owned.n_owned + owned.n_ghost < batch.num_nodes or comm.size == 1
    return parallel, owned


def nve(kind=NVE):
    model = lj(smoothing="shift")
    return kind(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])


def different_operations(comm):
    """Message and seconds of a run in which rank 0 reduces and rank 1 goes on; then of two plain mismatches."""
    out = []
    begin = time.perf_counter()
    parallel, owned = start(nve(LocalDecision), comm)
    try:
        parallel.run(owned, 10)
    except TransportError as error:
        out.append(str(error))
    for attempt in (
        lambda p: p.reduce.max(torch.zeros(2), "pressure") if comm.rank else p.reduce.sum(torch.zeros(2), "kinetic"),
        lambda p: p.comm.barrier() if comm.rank else p.gather(),
        lambda p: p.reduce.sum(torch.zeros(1), "same name"),
    ):
        parallel, owned = start(nve(), comm)
        try:
            attempt(parallel)
            out.append("no error")
        except TransportError as error:
            out.append(str(error))
    return [out, time.perf_counter() - begin]


def test_ranks_in_different_operations_are_an_error_that_names_both():
    results = run_ranks(different_operations, 2, launcher="gloo")
    assert results[0][0] == results[1][0]
    for (decision, kinds, objects, agreeing), seconds in results:
        assert "'heat_flux'" in decision
        assert "rank 0: operation" in decision
        assert "rank 1: operation" in decision
        assert "'kinetic'" in kinds
        assert "'pressure'" in kinds
        assert "'gather'" in objects
        assert "'comm.barrier'" in objects
        assert agreeing == "no error"
        assert seconds < 30


def behind(comm):
    """The same operation, but one rank has left one out: the numbers tell."""
    call = RollCall(None, comm.size)
    if comm.rank == 1:
        call.number += 1
    try:
        call("vote")
    except TransportError as error:
        return str(error)


def test_a_rank_that_left_one_operation_out_is_told_by_the_number():
    for message in run_ranks(behind, 2, launcher="gloo"):
        assert "rank 0: operation 1 'vote'" in message
        assert "rank 1: operation 2 'vote'" in message


def test_a_rank_that_never_answers_is_named_by_the_operation_that_waited():
    with (
        mock.patch.object(collectives, "all_gather_equal", side_effect=RuntimeError("Connection closed by peer")),
        pytest.raises(TransportError, match=r"operation 1 'vote' found no answer.*closed by peer"),
    ):
        RollCall(None, 2)("vote")


def plain_and_debug(comm):
    """Migration, rebuilds, local and global hooks, a checkpoint-like gather: every operation is entered by all."""
    runs = []
    for debug in (False, True):
        hooks = [SnapshotHook(HostMemory(20), 10, scope=HookScope.GLOBAL), LoggingHook(frequency=5)]
        parallel, owned = start(nve(), comm, hooks, debug)
        parallel.run(owned, 40)
        whole = parallel.gather()
        runs.append([whole.positions.tolist(), parallel.rebuilds, parallel.traffic.by_name])
    return [runs[0] == runs[1], runs[0][1]]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_debug_mode_changes_no_bit_and_no_operation(size):
    for same, rebuilds in run_ranks(plain_and_debug, size, launcher="gloo"):
        assert same
        assert rebuilds > 3
