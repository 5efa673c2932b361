from __future__ import annotations

import os
import shutil

import pytest
from conftest import sample_arrays
from forge import change_manifest

from distmd_protocol import CheckpointError, latest, list_checkpoints, load_checkpoint, save_checkpoint
from distmd_protocol.checkpoint.layout import REPLACED, Writer, leftover_path


def save(folder, name, step, kind="dynamics"):
    return save_checkpoint(folder / name, sample_arrays(step), kind=kind, step=step).wait()


def test_nothing_there(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    assert list_checkpoints(tmp_path) == []


def test_the_newest_is_the_one_with_the_highest_step(tmp_path):
    paths = [save(tmp_path, name, step) for name, step in (("c", 30), ("a", 100), ("b", 9))]
    assert latest(tmp_path) == paths[1]
    assert list_checkpoints(str(tmp_path)) == [paths[2], paths[0], paths[1]]


def test_of_equal_steps_the_later_commit_is_newer(tmp_path):
    save(tmp_path, "z", 5)
    later = save(tmp_path, "a", 5)
    assert latest(tmp_path) == later


def test_kinds_are_kept_apart_and_error_states_never_resumed(tmp_path):
    run = save(tmp_path, "run", 5)
    failed = save(tmp_path, "failed", 9, kind="error-state")
    other = save(tmp_path, "other", 7, kind="trajectories")
    assert latest(tmp_path) == other
    assert latest(tmp_path, kind="dynamics") == run
    assert latest(tmp_path, kind="error-state") == failed
    assert latest(tmp_path, kind="potential") is None


def test_damaged_and_foreign_folders_are_passed_over_with_a_line_in_the_log(tmp_path, caplog):
    good = save(tmp_path, "good", 1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("x")
    (save(tmp_path, "truncated", 2) / "manifest.json").write_bytes(b"{")
    (save(tmp_path, "no-shard", 3) / "shard-00000-of-00001.safetensors").unlink()
    (save(tmp_path, "short-shard", 4) / "shard-00000-of-00001.safetensors").write_bytes(b"x")
    change_manifest(save(tmp_path, "incomplete", 5), lambda content: content.update(complete=False))
    change_manifest(save(tmp_path, "newer", 6), lambda content: content.update(version=2))
    assert latest(tmp_path) == good
    for name in ("truncated", "no-shard", "short-shard", "incomplete", "newer"):
        assert name in caplog.text


def test_partial_and_removed_folders_are_invisible(tmp_path):
    good = save(tmp_path, "step-1", 1)
    later = save(tmp_path, "step-2", 2)
    for role in ("partial", "removed"):
        shutil.copytree(later, leftover_path(tmp_path / "step-3", role, Writer.current()))
    shutil.rmtree(later)
    assert latest(tmp_path) == good


def test_a_symbolic_link_to_a_checkpoint_is_not_another_checkpoint(tmp_path):
    good = save(tmp_path, "step-1", 1)
    (tmp_path / "best").symlink_to(good)
    assert list_checkpoints(tmp_path) == [good]
    assert load_checkpoint(tmp_path / "best").step == 1


def test_a_replaced_checkpoint_counts_until_its_successor_is_there(tmp_path):
    path = save(tmp_path, "step-1", 1)
    aside = leftover_path(path, REPLACED, Writer.current())
    os.rename(path, aside)
    assert latest(tmp_path) == aside
    assert load_checkpoint(path).step == 1
    assert load_checkpoint(aside).step == 1
    again = save(tmp_path, "step-1", 2)
    assert list_checkpoints(tmp_path) == [again]
    assert load_checkpoint(path).step == 2
    shutil.rmtree(aside, ignore_errors=True)
    # Found as replaced, gone when it is read: the successor is read.
    assert load_checkpoint(aside).step == 2


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "x").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be read"):
        latest(tmp_path / "x")
