"""Several ranks write and read one checkpoint. The bodies take a communicator, so they run over any launcher."""

from __future__ import annotations

import os

import numpy as np
import pytest

from distmd_protocol import (
    AgreementError,
    CheckpointError,
    RankError,
    latest,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from distmd_protocol.testkit import run_ranks


def own(comm, step=0):
    """Return the arrays of a rank: another shape on each, one rank with none at all."""
    if comm.size > 2 and comm.rank == 1:
        return {}
    return {"x": np.full((comm.rank + 1, 3), comm.rank + 10 * step), "common": np.array(step)}


def sharded(comm, folder, wait):
    """Every rank writes its shard and reads it back; then each reads the next rank's."""
    pending = save_checkpoint(
        f"{folder}/s", own(comm, 4), kind="dynamics", step=4, comm=comm, replicated=False, wait=wait
    )
    path = pending.wait()
    mine = load_checkpoint(path, comm=comm, shard=comm.rank, template=own(comm, 4))
    other = load_checkpoint(path, comm=comm, shard=(comm.rank + 1) % comm.size)
    if "x" in mine.arrays:
        np.testing.assert_array_equal(mine.arrays["x"], own(comm, 4)["x"])
    return {
        "path": str(path),
        "world_size": mine.world_size,
        "shards": len(mine.manifest.shards),
        "other": sorted(other.arrays),
        "left": sorted(os.listdir(folder)),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("wait", [True, False])
def test_each_rank_its_shard(tmp_path, size, wait):
    results = run_ranks(sharded, size, str(tmp_path), wait)
    for rank, result in enumerate(results):
        assert result["path"] == str(tmp_path / "s")
        assert result["world_size"] == result["shards"] == size
        assert result["left"] == ["s"]
        assert result["other"] == ([] if size > 2 and (rank + 1) % size == 1 else ["common", "x"])
    assert sorted(os.listdir(tmp_path / "s")) == [
        "manifest.json", *(f"shard-{rank:05d}-of-{size:05d}.safetensors" for rank in range(size)),
    ]  # fmt: skip
    if size > 1:
        with pytest.raises(CheckpointError, match=f"has {size} shards, one a rank; pass shard=0"):
            load_checkpoint(tmp_path / "s")


def replicated(comm, folder, wait):
    """Rank zero writes; the others' arrays, which differ here, are not looked at."""
    arrays = {"a": np.arange(5.0)} if comm.rank == 0 else {"never": object()}
    path = save_checkpoint(f"{folder}/r", arrays, kind="test", step=1, comm=comm, wait=wait).wait()
    loaded = load_checkpoint(path, comm=comm)
    return [loaded.arrays["a"].tolist(), loaded.world_size, sorted(os.listdir(path))]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("wait", [True, False])
def test_rank_zero_writes_for_all(tmp_path, size, wait):
    for result in run_ranks(replicated, size, str(tmp_path), wait):
        assert result == [list(range(5)), size, ["manifest.json", "shard-00000-of-00001.safetensors"]]


def series(comm, folder):
    """Write several steps, pruning; every rank sees the same newest one."""
    for step in range(5):
        save_checkpoint(
            f"{folder}/step-{step}",
            own(comm, step),
            kind="dynamics",
            step=step,
            comm=comm,
            replicated=False,
            keep_last=2,
        )
    comm.barrier()
    return [path.name for path in list_checkpoints(folder)]


def test_pruning_with_several_ranks(tmp_path):
    assert run_ranks(series, 2, str(tmp_path)) == [["step-3", "step-4"]] * 2


def failing(comm, folder, where, bad):
    """Fail on one rank at one point of a save; return what each rank got."""
    arrays = own(comm)
    if where == "arrays" and comm.rank == bad:
        arrays = {"bad": object()}
    if where == "write" and comm.rank == bad:
        # Each rank writes shard "its rank"; a folder of that name is in its way.
        real = os.open

        def full(path, flags, *rest, **options):
            if str(path).startswith("shard-"):
                raise OSError(28, "No space left on device")
            return real(path, flags, *rest, **options)

        os.open = full
    try:
        save_checkpoint(f"{folder}/f", arrays, kind="test", step=0, comm=comm, replicated=False)
    except CheckpointError as error:
        return {
            "class": isinstance(error, RankError),
            "text": str(error),
            "ranks": [failure.rank for failure in error.failures],
            "types": [failure.type for failure in error.failures],
            "left": sorted(os.listdir(folder)) if comm.allgather(0) else None,
        }
    finally:
        if where == "write" and comm.rank == bad:
            os.open = real
    return "no error"


@pytest.mark.parametrize("where", ["arrays", "write"])
@pytest.mark.parametrize(("size", "bad"), [(2, 0), (2, 1), (4, 3)])
def test_a_failure_on_any_rank_reaches_all_and_leaves_nothing(tmp_path, where, size, bad):
    results = run_ranks(failing, size, str(tmp_path), where, bad)
    for result in results:
        assert result["ranks"] == [bad]
        assert result["types"] == ["CheckpointError"]
        assert result["class"]
        assert result["text"] == results[0]["text"]
    assert os.listdir(tmp_path) == []
    assert ("disk is full" if where == "write" else "not an array") in results[0]["text"]


def unwritable(comm, folder, replicated):
    """Save to a place that rank zero cannot make."""
    try:
        save_checkpoint(f"{folder}/file/f", own(comm), kind="test", step=0, comm=comm, replicated=replicated)
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("replicated", [True, False])
def test_an_unwritable_place_is_an_error_on_all_ranks(tmp_path, replicated):
    (tmp_path / "file").write_text("x")
    results = run_ranks(unwritable, 2, str(tmp_path), replicated)
    assert results[0] == results[1]
    assert "cannot be written" in results[0]
    assert "rank 0" in results[0]


def loading(comm, folder):
    """Load what is damaged in one shard."""
    try:
        load_checkpoint(f"{folder}/s", comm=comm, shard=comm.rank)
    except CheckpointError as error:
        return [failure.rank for failure in error.failures]
    return "no error"


def test_a_damaged_shard_is_an_error_on_all_ranks(tmp_path):
    run_ranks(sharded, 2, str(tmp_path), True)
    shard = tmp_path / "s" / "shard-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert run_ranks(loading, 2, str(tmp_path)) == [[1], [1]]


def elsewhere(comm, folder):
    """Each rank reads another checkpoint."""
    try:
        load_checkpoint(f"{folder}/r{comm.rank}", comm=comm)
    except AgreementError as error:
        return str(error)
    return "no error"


def test_ranks_that_see_different_checkpoints_say_so(tmp_path):
    for rank in range(2):
        save_checkpoint(tmp_path / f"r{rank}", {"a": np.array(rank)}, kind="test", step=0)
    first, second = run_ranks(elsewhere, 2, str(tmp_path))
    assert first.startswith("ranks [1] read another checkpoint at")
    assert second.startswith("ranks [1] read another checkpoint at")


def not_shared(comm, folder):
    """Save from ranks that see different file systems: rank one looks below another root."""
    from distmd_protocol.checkpoint import save as module

    real = module.see_partial
    if comm.rank == 1:
        module.see_partial = lambda partial: real(partial.parent / "other" / partial.name, 0.2)
    try:
        save_checkpoint(f"{folder}/n", own(comm), kind="test", step=0, comm=comm, replicated=False)
    except CheckpointError as error:
        return str(error)
    finally:
        module.see_partial = real
    return "no error"


def test_a_file_system_that_is_not_shared_is_an_error_on_all_ranks(tmp_path):
    results = run_ranks(not_shared, 2, str(tmp_path))
    assert results[0] == results[1]
    assert "rank 1: CheckpointError: this rank does not see" in results[0]
    assert "not on a file system that all ranks share" in results[0]
    assert os.listdir(tmp_path) == []
    assert latest(tmp_path) is None
