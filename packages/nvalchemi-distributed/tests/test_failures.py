"""D24: what fails on one rank alone is an error on all of them, wherever in a run it happens; none is left waiting."""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from systems import fcc, lj

from distmd_protocol import RankError
from distmd_protocol.errors import ProtocolError
from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.domain import rebuild
from nvalchemi_distributed.dynamics import NVE
from nvalchemi_distributed.dynamics.hooks import CheckpointHook
from nvalchemi_distributed.errors import InputError
from nvalchemi_distributed.hooks import NeighborListHook

pytestmark = pytest.mark.gloo


def make():
    model = lj()
    integrator = NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.3)])
    return DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.3))


def moving():
    batch = Batch.from_data_list([fcc(repeat=(6, 3, 3))])
    batch.velocities = 0.05 * torch.sin(3.0 * batch.positions)
    return batch


@contextlib.contextmanager
def full_disk(here):
    """Files of this process may not grow, as on a full disk or over a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def broken_list(here):
    """The neighbour list cannot be built."""
    if not here:
        return contextlib.nullcontext()
    return mock.patch.object(rebuild, "make_neighbors", side_effect=InputError("no list today"))


def attempts(comm, folder):
    """Message and seconds of each failure that only rank 1 has."""
    second = comm.rank == 1
    out = {}

    def attempt(name, work):
        begin = time.perf_counter()
        try:
            work()
            out[name] = ["no error", 0.0]
        except (RankError, ProtocolError) as error:
            out[name] = [str(error), time.perf_counter() - begin]
        comm.barrier()

    parallel = make()
    owned = parallel.partition(moving() if comm.rank == 0 else None)
    path = parallel.save(f"{folder}/good")
    if comm.rank == 0:
        shard = sorted(Path(path).glob("*00001-of-00002*"))[0]
        shard.write_bytes(shard.read_bytes()[:-100])
    comm.barrier()

    def list_at_start():
        fresh = make()
        with broken_list(second):
            fresh.partition(moving() if comm.rank == 0 else None)

    def list_in_a_run():
        with broken_list(second):
            parallel.run(owned, 30)

    def saved():
        with full_disk(second):
            again.save(f"{folder}/bad")

    def saved_by_hook():
        again.hooks.append(CheckpointHook(f"{folder}/series", 2))
        with full_disk(second):
            again.run(kept, 4)

    attempt("list at the start", list_at_start)
    attempt("list in a run", list_in_a_run)
    again = make()
    kept = again.partition(moving() if comm.rank == 0 else None)
    attempt("save", saved)
    attempt("save by a hook", saved_by_hook)
    attempt("load", lambda: make().restore(path))
    return out


def test_a_failure_on_rank_one_alone_is_an_error_on_both(tmp_path):
    results = run_ranks(attempts, 2, str(tmp_path), launcher="gloo")
    words = {
        "list at the start": "no list today",
        "list in a run": "no list today",
        "save": "rank 1",
        "save by a hook": "rank 1",
        "load": "rank 1",
    }
    for result in results:
        assert set(result) == set(words)
        for name, (message, seconds) in result.items():
            assert words[name] in message, (name, message)
            assert "rank 1" in message, (name, message)
            assert seconds < 10
    assert [result["save"][0] for result in results] == [results[0]["save"][0]] * 2
    assert not (tmp_path / "bad" / "manifest.json").exists()
