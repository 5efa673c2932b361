from __future__ import annotations

import errno
import json
import os
import threading

import numpy as np
import pytest

from distmd_protocol import CheckpointError, LocalComm, latest, list_checkpoints, load_checkpoint, save_checkpoint
from distmd_protocol.checkpoint import commit, limits
from distmd_protocol.precision import PrecisionPolicy


def test_what_lies_on_the_disk(tmp_path, saved, arrays):
    assert sorted(os.listdir(tmp_path)) == ["step-5"]
    assert sorted(os.listdir(saved)) == ["manifest.json", "shard-00000-of-00001.safetensors"]
    manifest = json.loads((saved / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["version"], manifest["complete"]) == ("distmd-checkpoint", 1, True)
    assert (manifest["kind"], manifest["step"], manifest["world_size"]) == ("dynamics", 5, 1)
    assert manifest["meta"] == {"x": 1.5}
    assert manifest["precision"] == PrecisionPolicy.current().to_json()
    assert "distmd-protocol" in manifest["packages"]
    assert {entry["key"] for entry in manifest["arrays"]} == set(arrays)


def test_the_safetensors_library_reads_our_shard(saved, arrays):
    library = pytest.importorskip("safetensors.numpy")
    loaded = library.load_file(saved / "shard-00000-of-00001.safetensors")
    assert set(loaded) == set(arrays)
    for key, value in arrays.items():
        np.testing.assert_array_equal(loaded[key], value)
        assert loaded[key].dtype == value.dtype


def test_arrays_come_back(saved, arrays):
    loaded = load_checkpoint(saved, kind="dynamics")
    assert (loaded.kind, loaded.step, loaded.world_size, loaded.path) == ("dynamics", 5, 1, saved)
    assert dict(loaded.meta) == {"x": 1.5}
    assert loaded.precision == PrecisionPolicy.current()
    for key, value in arrays.items():
        np.testing.assert_array_equal(loaded.arrays[key], value)
        assert loaded.arrays[key].dtype == value.dtype


def test_no_arrays_at_all(tmp_path):
    path = save_checkpoint(tmp_path / "x", {}, kind="test", step=0).wait()
    assert load_checkpoint(path).arrays == {}


def test_data_is_aligned(tmp_path):
    arrays = {"a": np.ones(3, np.uint8), "b": np.ones(3), "c": np.ones(1, np.float16), "d": np.array(1.0)}
    path = save_checkpoint(tmp_path / "x", arrays, kind="test", step=0).wait()
    shard = (path / "shard-00000-of-00001.safetensors").read_bytes()
    length = int.from_bytes(shard[:8], "little")
    assert length % 8 == 0
    for key, entry in json.loads(shard[8 : 8 + length]).items():
        assert entry["data_offsets"][0] % arrays[key].itemsize == 0


def test_the_same_name_is_replaced(tmp_path, saved):
    for number in range(3):
        save_checkpoint(saved, {"a": np.array(number)}, kind="dynamics", step=5)
        assert load_checkpoint(saved).arrays["a"] == number
        assert os.listdir(tmp_path) == ["step-5"]


@pytest.mark.parametrize("content", ["file", "folder", "link"])
def test_what_is_not_a_checkpoint_is_never_replaced(tmp_path, arrays, content):
    target = tmp_path / "mine"
    if content == "file":
        target.write_text("precious")
    elif content == "folder":
        target.mkdir()
        (target / "precious").write_text("x")
    else:
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointError, match=r"choose another name|a name of its own"):
        save_checkpoint(target, arrays, kind="dynamics", step=0)
    assert sorted(os.listdir(tmp_path)) == before


def test_an_empty_folder_takes_the_checkpoint(tmp_path, arrays):
    (tmp_path / "x").mkdir()
    load_checkpoint(save_checkpoint(tmp_path / "x", arrays, kind="dynamics", step=0).wait())


def test_folders_are_made(tmp_path, arrays):
    load_checkpoint(save_checkpoint(tmp_path / "a" / "b" / "x", arrays, kind="dynamics", step=0).wait())


def test_keep_last_prunes_after_the_commit_and_only_its_kind(tmp_path, arrays):
    save_checkpoint(tmp_path / "other", arrays, kind="trajectories", step=0)
    (tmp_path / "notes").mkdir()
    for step in range(6):
        save_checkpoint(tmp_path / f"step-{step}", arrays, kind="dynamics", step=step, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["notes", "other", "step-4", "step-5"]


def test_keep_last_never_removes_what_was_just_written(tmp_path, arrays):
    for step in (10, 11, 3):
        save_checkpoint(tmp_path / f"step-{step}", arrays, kind="dynamics", step=step, keep_last=1)
        assert os.listdir(tmp_path) == [f"step-{step}"]


def test_nothing_is_pruned_when_the_write_fails(tmp_path, arrays):
    for step in range(3):
        save_checkpoint(tmp_path / f"step-{step}", arrays, kind="dynamics", step=step)
    with pytest.raises(CheckpointError):
        save_checkpoint(tmp_path / "step-3", {"bad": object()}, kind="dynamics", step=3, keep_last=1)
    assert len(list_checkpoints(tmp_path)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "Dynamics"}, "lower-case"),
        ({"kind": ""}, "lower-case"),
        ({"step": -1}, "integer from 0"),
        ({"step": 2**63}, "integer from 0"),
        ({"step": 1.0}, "give an integer"),
        ({"step": True}, "integer from 0"),
        ({"keep_last": 0}, "integer from 1"),
        ({"meta": {"x": float("nan")}}, "cannot be written"),
        ({"meta": {"x": object()}}, "cannot be written"),
        ({"meta": {1: 2}}, "strings as keys"),
        ({"packages": {"x": 3}}, "not a string"),
    ],
)
def test_bad_arguments_leave_nothing_behind(tmp_path, arrays, options, message):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "x", arrays, **({"kind": "dynamics", "step": 0} | options))
    assert os.listdir(tmp_path) == []


def test_integers_of_any_kind_are_steps(tmp_path, arrays):
    path = save_checkpoint(tmp_path / "x", arrays, kind="dynamics", step=np.int32(7)).wait()
    assert load_checkpoint(path).step == 7


@pytest.mark.parametrize("name", [".hidden", "x" * 129, "new\nline", "..", "."])
def test_bad_names(tmp_path, arrays, name):
    if name in ("..", "."):
        # The name is resolved first: these name folders that exist and are no checkpoints.
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "x").touch()
        with pytest.raises(CheckpointError):
            save_checkpoint(tmp_path / "sub" / name, arrays, kind="dynamics", step=0)
        return
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        save_checkpoint(tmp_path / name, arrays, kind="dynamics", step=0)


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "__metadata__", "a\0b", "\ud800", 3])
def test_bad_keys(tmp_path, key):
    with pytest.raises(CheckpointError, match="key"):
        save_checkpoint(tmp_path / "x", {key: np.ones(1)}, kind="test", step=0)


@pytest.mark.once
def test_limits_are_kept_when_writing(tmp_path, monkeypatch):
    def save(arrays, **options):
        save_checkpoint(tmp_path / "x", arrays, kind="test", step=0, **options)

    with pytest.raises(CheckpointError, match="1025 bytes, the limit is 1024"):
        save({"k" * 1025: 1})
    with pytest.raises(CheckpointError, match="65 segments, the limit is 64"):
        save({"/".join("k" * 65): 1})
    deep: dict = {}
    for _ in range(64):
        deep = {"x": deep}
    with pytest.raises(CheckpointError, match="deeper than 64"):
        save({}, meta=deep)
    one = np.ones(1)
    with pytest.raises(CheckpointError, match="100001 arrays in one shard, the limit is 100000"):
        save({str(number): one for number in range(limits.MAX_ARRAYS_PER_SHARD + 1)})
    long = {f"{number:06d}" + "k" * 1000: one for number in range(100_000)}
    with pytest.raises(CheckpointError, match=r"header has .* bytes, the limit is"):
        save(long)
    with pytest.raises(CheckpointError, match=r"manifest of .* bytes, the limit is"):
        save({}, meta={"x": "y" * limits.MAX_MANIFEST_BYTES})
    assert os.listdir(tmp_path) == []


@pytest.mark.once
def test_as_many_arrays_as_are_allowed(tmp_path):
    arrays = {f"k/{number}": number for number in range(20_000)}
    path = save_checkpoint(tmp_path / "x", arrays, kind="test", step=0).wait()
    assert load_checkpoint(path).restore(arrays) == arrays


def order_of_system_calls(monkeypatch):
    """Record what happens to which file, in order."""
    events = []
    names: dict[int, str] = {}
    real = {name: getattr(os, name) for name in ("open", "fsync", "rename", "close")}

    def opened(path, flags, *rest, **options):
        descriptor = real["open"](path, flags, *rest, **options)
        names[descriptor] = os.path.basename(path)
        return descriptor

    def synced(descriptor):
        events.append(("fsync", names.get(descriptor, "?")))
        return real["fsync"](descriptor)

    def renamed(source, target):
        events.append(("rename", os.path.basename(source), os.path.basename(target)))
        return real["rename"](source, target)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    return events


def test_everything_is_on_the_disk_before_the_name_is_taken(tmp_path, saved, monkeypatch):
    with monkeypatch.context() as patch:
        events = order_of_system_calls(patch)
        save_checkpoint(saved, {"a": np.ones(3)}, kind="dynamics", step=5)
    short = [(event[0], *(part.split("-")[0] for part in event[1:])) for event in events]
    assert short == [
        ("fsync", "shard"),
        ("fsync", "manifest.json"),
        ("fsync", ".step"),
        ("rename", "step", ".step"),
        ("rename", ".step", "step"),
        ("fsync", tmp_path.name.split("-")[0]),
    ]
    assert ".replaced-" in events[3][2]
    assert ".partial-" in events[4][1]


def test_the_old_one_gets_its_name_back_when_the_new_one_cannot_take_it(tmp_path, saved, monkeypatch):
    real = os.rename

    def rename(source, target):
        if ".partial-" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        return real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_checkpoint(saved, {"a": np.ones(3)}, kind="dynamics", step=5)
    assert os.listdir(tmp_path) == ["step-5"]
    assert "params/w" in load_checkpoint(saved).arrays


def test_a_reader_never_fails_while_the_checkpoint_is_rewritten(tmp_path):
    path = tmp_path / "x"

    # Two arrays that must belong together, large enough that reading takes a while.
    def write(number):
        save_checkpoint(path, {"a": np.full(20_000, number), "b": np.full(20_000, -number)}, kind="test", step=number)

    write(0)
    stop = threading.Event()

    def keep_writing():
        number = 0
        while not stop.is_set():
            number += 1
            write(number)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    seen = []
    try:
        for _ in range(150):
            loaded = load_checkpoint(path)
            assert loaded.arrays["a"][0] == -loaded.arrays["b"][-1] == loaded.step
            assert latest(tmp_path) is not None
            seen.append(loaded.step)
    finally:
        stop.set()
        writer.join()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


class Elsewhere(LocalComm):
    """Rank 1 of two, whose rank zero made a folder that is not here."""

    rank = 1
    size = 2

    def __init__(self, partial):
        self.partial = partial

    def allgather(self, obj):
        return [None, obj]

    def broadcast(self, obj, root=0):
        from distmd_protocol import encode

        return b"P" + encode(str(self.partial))


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path, arrays, monkeypatch):
    monkeypatch.setattr(commit.see_partial, "__defaults__", (0.2,))
    with pytest.raises(
        CheckpointError, match=r"rank 1: .*is not on a file system that all ranks share.*replicated=True"
    ):
        save_checkpoint(
            tmp_path / "x", arrays, kind="test", step=0, comm=Elsewhere(tmp_path / ".x.partial-1"), replicated=False
        )
