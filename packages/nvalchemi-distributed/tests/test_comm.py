"""Control data over gloo, and what happens when a rank fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from systems import fcc, lj

from distmd_protocol import Comm, RankError, agree, rank_zero
from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.comm import GroupComm, check_backend
from nvalchemi_distributed.data import Batch, read_extxyz
from nvalchemi_distributed.domain import gloo_threads
from nvalchemi_distributed.domain.gloo_threads import keep_behind_the_ranks
from nvalchemi_distributed.domain.transport import Transport
from nvalchemi_distributed.dynamics import NVE, ExtxyzSink
from nvalchemi_distributed.dynamics.base import DynamicsStage
from nvalchemi_distributed.dynamics.hooks import SnapshotHook
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.stages import HookScope

gloo = pytest.mark.gloo


def control(comm):
    assert isinstance(comm, Comm)
    out = [comm.broadcast({"a": [1, None, "ü"]} if comm.rank == 1 else None, root=1)]
    out.append(comm.broadcast(b"\x00\xff" * 1000 if comm.rank == 0 else None).hex()[:8])
    out.append(comm.allgather({"rank": comm.rank, "long": "x" * comm.rank}))
    out.append(comm.allgather(None))
    out.append([len(b) for b in comm.allgather(b"z" * (comm.rank * 3))])
    comm.barrier()
    return out


@gloo
@pytest.mark.parametrize("size", [2, 4])
def test_control_objects_travel(size):
    for got in run_ranks(control, size, launcher="gloo"):
        assert got[0] == {"a": [1, None, "ü"]}
        assert got[1] == "00ff00ff"
        assert got[2] == [{"rank": r, "long": "x" * r} for r in range(size)]
        assert got[3] == [None] * size
        assert got[4] == [3 * r for r in range(size)]


def raising(comm, who, how):
    def bad():
        raise ValueError("no such thing")

    start = time.perf_counter()
    try:
        if how == "rank_zero":
            rank_zero(comm, bad)
        else:
            with agree(comm, "the work"):
                if comm.rank == who:
                    bad()
    except RankError as error:
        return [str(error), [f.rank for f in error.failures], time.perf_counter() - start]


@gloo
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("how", ["rank_zero", "agree"])
def test_a_failure_reaches_every_rank(size, how):
    """D24."""
    for who in range(size) if how == "agree" else [0]:
        results = run_ranks(raising, size, who, how, launcher="gloo")
        assert len({r[0] for r in results}) == 1
        for message, ranks, seconds in results:
            assert "no such thing" in message
            assert ranks == [who]
            assert seconds < 10


class Trouble:
    """On one rank, in step 4: raises, or is killed."""

    stage = DynamicsStage.AFTER_STEP
    frequency = 1

    def __init__(self, how, who):
        self.how, self.who = how, who

    def __call__(self, ctx, stage):
        if ctx.global_rank == self.who and ctx.step_count == 4:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"trouble on rank {self.who}")


def troubled(comm, how, who, path):
    model = lj()
    integrator = NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    hooks = [SnapshotHook(ExtxyzSink(path), scope=HookScope.GLOBAL), Trouble(how, who)]
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5), n_steps=2000, hooks=hooks)
    parallel.run(parallel.partition(Batch.from_data_list([fcc(3)]) if comm.rank == 0 else None))


@gloo
@pytest.mark.parametrize(
    ("how", "who"),
    [
        ("raise", 1),
        ("kill", 1),
        # The one that writes the trajectory and keeps the store through which the ranks met.
        pytest.param("kill", 0, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_all_within_ten_seconds(how, who, tmp_path):
    """D24; the trajectory stays readable up to the last full frame."""
    path = tmp_path / "t.extxyz"
    outcomes = run_ranks(troubled, 3, how, who, str(path), launcher="gloo", fresh=True, timeout=60)
    assert all(o.exit_code != 0 for o in outcomes)
    # Counted from the start of the function: the run up to the failure takes about a second of it.
    assert max(o.seconds for o in outcomes) < 12
    frames = list(read_extxyz(path))
    assert len(frames) == 4
    assert all(f.num_nodes == 108 for f in frames)


END = """
import atexit
import torch.distributed as dist
from nvalchemi_distributed.comm import world_comm
# Registered first, so called last.
atexit.register(lambda: print("left:", not dist.is_initialized()))
world_comm()
"""


@gloo
def test_a_program_that_ends_without_destroying_the_group_leaves_it():
    """Else gloo's threads meet the end of the interpreter, and now and then a run that was done exits as failed."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", END], env=os.environ | alone, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "left: True\n"), done.stderr


def classes(comm):
    before = os.sched_getscheduler(0)
    transport = Transport(torch.distributed.group.WORLD)
    names = {int(t.name): (t / "comm").read_text().strip() for t in Path("/proc/self/task").iterdir()}
    loops = [os.sched_getscheduler(t) for t, name in names.items() if name == "gloo_tcp_loop"]
    # Those that are in another class already stay there.
    again = keep_behind_the_ranks()
    transport.close()
    return before, os.sched_getscheduler(0), loops, again


@gloo
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling classes are Linux's")
def test_gloos_threads_take_no_core_from_a_rank_that_computes():
    for before, after, loops, again in run_ranks(classes, 2, launcher="gloo"):
        if not loops:
            pytest.skip("this torch does not name gloo's threads")
        assert set(loops) == {os.SCHED_BATCH}
        assert (after, again) == (before, 0)


def test_a_thread_of_another_class_and_forbidden_changes_are_left(monkeypatch, caplog):
    threads = {7: os.SCHED_OTHER, 8: os.SCHED_FIFO, 9: os.SCHED_OTHER, 10: os.SCHED_OTHER}
    asked = []
    monkeypatch.setattr(gloo_threads, "_threads", lambda: [7, 8, 9, 10])
    monkeypatch.setattr(os, "sched_getscheduler", threads.__getitem__)

    def change(thread, policy, parameters):
        asked.append(thread)
        if thread == 7:
            raise ProcessLookupError
        if thread == 10:
            raise PermissionError("not here")
        threads[thread] = policy

    monkeypatch.setattr(os, "sched_setscheduler", change)
    with caplog.at_level("INFO"):
        assert keep_behind_the_ranks() == 1
    assert asked == [7, 9, 10]
    assert threads == {7: os.SCHED_OTHER, 8: os.SCHED_FIFO, 9: os.SCHED_BATCH, 10: os.SCHED_OTHER}
    assert "not here" in caplog.text


def test_group_comm_needs_a_group():
    if not torch.distributed.is_initialized():
        with pytest.raises(ConfigError, match="world_comm"):
            GroupComm()


def test_a_group_without_the_cpu_is_refused():
    with pytest.raises(ConfigError, match="gloo"):
        check_backend("cuda:nccl")
    for config in ("cpu:gloo", "cpu:gloo,cuda:nccl", "cuda:gloo,cpu:gloo"):
        check_backend(config)
