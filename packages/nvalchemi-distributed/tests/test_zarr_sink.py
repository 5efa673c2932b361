"""Snapshots in a Zarr group read back as they were."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from systems import fcc, lj

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel, HookScope
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.dynamics import NVE
from nvalchemi_distributed.dynamics.hooks import SnapshotHook
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.hooks import NeighborListHook

zarr_sink = pytest.importorskip("nvalchemi_distributed.dynamics.zarr_sink", reason="the zarr extra is not installed")


def test_round_trip_of_growing_snapshots(tmp_path):
    sink = zarr_sink.ZarrData(tmp_path / "t.zarr")
    batches = [Batch.from_data_list([fcc(1, seed=k), fcc(n, seed=k)]) for k, n in enumerate((1, 2, 1))]
    for k, batch in enumerate(batches):
        batch.add_key("tag", torch.arange(batch.num_nodes) % 2 == 0)
        sink.write(batch, step=10 * k if k else None)
        batch.positions[0] = 77.0
    again = zarr_sink.ZarrData(tmp_path / "t.zarr", append=True)
    assert len(again) == 3
    assert again.steps == [None, 10, 20]
    for stored, batch in zip(again, batches, strict=True):
        assert torch.equal(stored.positions[1:], batch.positions[1:])
        assert float(stored.positions[0, 0]) != 77.0
        assert torch.equal(stored.batch_idx, batch.batch_idx)
        assert torch.equal(stored.tag, batch.tag)
        assert torch.equal(stored.cell, batch.cell)
        assert stored.num_nodes_list == batch.num_nodes_list
    assert torch.equal(again[-1].velocities, batches[-1].velocities)


def test_refusals(tmp_path):
    sink = zarr_sink.ZarrData(tmp_path / "t.zarr")
    batch = Batch.from_data_list([fcc(1)])
    sink.write(batch)
    batch.add_key("more", torch.zeros(4))
    with pytest.raises(ConfigError, match="node/more"):
        sink.write(batch)
    with pytest.raises(ConfigError, match="append=True"):
        zarr_sink.ZarrData(tmp_path / "t.zarr")
    with pytest.raises(IndexError):
        sink[5]


def whole_system(comm, path):
    model = lj()
    integrator = NVE(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    sink = zarr_sink.ZarrData(path)
    hooks = [SnapshotHook(sink, 2, scope=HookScope.GLOBAL)]
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5), hooks=hooks)
    parallel.run(parallel.partition(Batch.from_data_list([fcc(3)]) if comm.rank == 0 else None), 6)
    comm.barrier()
    return [sink.steps, sink[-1].num_nodes]


@pytest.mark.gloo
def test_rank_zero_writes_the_whole_system(tmp_path):
    for steps, atoms in run_ranks(whole_system, 2, str(tmp_path / "t.zarr"), launcher="gloo"):
        assert steps == [2, 4, 6]
        assert atoms == 108


def test_a_sink_touches_nothing_before_its_first_snapshot(tmp_path):
    sink = zarr_sink.ZarrData(tmp_path / "t.zarr")
    assert (len(sink), sink.steps, list(sink)) == (0, [], [])
    assert not (tmp_path / "t.zarr").exists()


@pytest.mark.parametrize("before", [0, 2])
def test_a_pointer_that_was_grown_and_not_written_does_not_count(before, tmp_path):
    """As a run leaves it that was killed between the two; the next one goes on after the last whole snapshot."""
    path = tmp_path / "t.zarr"
    sink = zarr_sink.ZarrData(path)
    batches = [Batch.from_data_list([fcc(1, seed=k)]) for k in range(3)]
    for k in range(before):
        sink.write(batches[k], step=k)
    sink._make()
    sink._append("batch_idx", batches[2].batch_idx, 4 * before, 64)
    sink._group["ptr"].resize((before + 2,))
    again = zarr_sink.ZarrData(path, append=True)
    assert len(again) == before
    again.write(batches[2], step=9)
    assert again.steps == [*range(before), 9]
    for stored, batch in zip(again, [*batches[:before], batches[2]], strict=True):
        assert torch.equal(stored.positions, batch.positions)


WRITER = """
import os, resource, signal, sys
import torch
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics.zarr_sink import ZarrData

def frame(k, n=3000):
    x = torch.rand(n, 3, generator=torch.Generator().manual_seed(k))
    return Batch.from_data_list([AtomicData(x, torch.full((n,), 18))])

for trial, limit in enumerate(map(int, sys.argv[2:])):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        if limit:
            # The system ends the process inside the write that would make a file larger, with a part of it written.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        sink = ZarrData(f"{sys.argv[1]}/{trial}.zarr")
        for k in range(8):
            sink.write(frame(k), step=k)
            os.write(write, b".")
        os._exit(0)
    if not limit:
        os.read(read, 3)
        os.read(read, 3)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == (signal.SIGXFSZ if limit else signal.SIGKILL), status
    os.close(read)
    os.close(write)
"""


def test_a_killed_writer_leaves_whole_snapshots(tmp_path):
    """Ended in the middle of replacing a chunk that holds earlier snapshots, at three sizes; and killed with −9."""
    limits = (50_000, 80_000, 110_000, 0)
    done = subprocess.run(
        [sys.executable, "-c", WRITER, tmp_path, *map(str, limits)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for trial, limit in enumerate(limits):
        path = tmp_path / f"{trial}.zarr"
        sink = zarr_sink.ZarrData(path, append=True)
        # 36 kB of positions a snapshot, which do not compress much.
        assert len(sink) == limit // 30_000 if limit else len(sink) >= 1
        for k, stored in enumerate(sink):
            expected = torch.rand(3000, 3, generator=torch.Generator().manual_seed(k))
            assert torch.equal(stored.positions, expected)
        assert sink.steps == list(range(len(sink)))
        # The next run goes on behind the last whole snapshot.
        sink.write(sink[0], step=99)
        assert torch.equal(zarr_sink.ZarrData(path, append=True)[-1].positions, sink[0].positions)
