from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import pytest
from conftest import sample_arrays

from distmd_protocol import latest, load_checkpoint, save_checkpoint
from distmd_protocol.checkpoint import layout
from distmd_protocol.checkpoint.layout import PARTIAL, REMOVED, REPLACED, Writer, leftover_path, parse_leftover
from distmd_protocol.checkpoint.limits import STALE_AFTER_S
from distmd_protocol.checkpoint.sweep import sweep


@pytest.fixture(scope="module")
def dead():
    """A writer that has ended."""
    code = "from distmd_protocol.checkpoint.layout import Writer; print(Writer.current())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return Writer.parse(done.stdout.strip())


def leave(tmp_path, role, writer, age=0.0):
    """Leave a folder with one file behind."""
    folder = leftover_path(tmp_path / "step-7", role, writer)
    folder.mkdir()
    (folder / "shard").write_text("x")
    then = time.time() - age
    for path in (folder / "shard", folder):
        os.utime(path, (then, then))
    return folder


def test_names_are_read_back(dead):
    path = leftover_path(layout.Path("/a/run.v2-1"), PARTIAL, dead)
    leftover = parse_leftover(path)
    assert (leftover.name, leftover.role, leftover.writer) == ("run.v2-1", PARTIAL, dead)
    for other in ("step-1", ".hidden", ".x.partial-", ".x.partial-1-2-3-4", ".x.other-1-2-00000000-000000000000"):
        assert parse_leftover(path.with_name(other)) is None


def test_who_is_gone(dead):
    alive = Writer.current()
    assert not alive.is_gone()
    assert dead.is_gone()
    # The number of a dead process has been given to another one.
    assert dataclasses.replace(dead, pid=alive.pid, start=alive.start + 1).is_gone()
    # Nothing can be said of another host.
    assert not dataclasses.replace(dead, host="0" * 12).is_gone()
    # Where start times are unknown only the number counts.
    assert not dataclasses.replace(alive, start=0).is_gone()


def test_a_process_that_proc_hides_is_not_gone(monkeypatch):
    """Mount option hidepid: another user's process is there, but not in /proc, and may not be signalled."""

    def kill(pid, number):
        raise PermissionError(1, "Operation not permitted")

    def hidden(*args, **options):
        raise FileNotFoundError(2, "No such file or directory")

    alive = Writer.current()
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr("builtins.open", hidden)
    gone = alive.is_gone()
    monkeypatch.undo()
    assert not gone


def test_a_process_that_waits_to_be_reaped_is_gone():
    code = "from distmd_protocol.checkpoint.layout import Writer; print(Writer.current(), flush=True)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    writer = Writer.parse(child.stdout.read().strip())
    deadline = time.monotonic() + 10
    while not writer.is_gone() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert writer.is_gone()
    child.stdout.close()
    child.wait()


@pytest.mark.parametrize("role", [PARTIAL, REPLACED, REMOVED])
def test_the_leftovers_of_a_dead_writer_are_swept_by_the_next_save(tmp_path, dead, role):
    save_checkpoint(tmp_path / "step-7", sample_arrays(), kind="dynamics", step=7)
    folder = leave(tmp_path, role, dead)
    save_checkpoint(tmp_path / "step-8", sample_arrays(), kind="dynamics", step=8)
    assert not folder.exists()
    assert sorted(os.listdir(tmp_path)) == ["step-7", "step-8"]


@pytest.mark.parametrize("role", [PARTIAL, REPLACED, REMOVED])
@pytest.mark.parametrize("where", ["this process", "another host"])
def test_what_may_be_in_use_stays_until_it_is_old(tmp_path, dead, role, where):
    save_checkpoint(tmp_path / "step-7", sample_arrays(), kind="dynamics", step=7)
    writer = Writer.current() if where == "this process" else dataclasses.replace(dead, host="0" * 12)
    folder = leave(tmp_path, role, writer, age=STALE_AFTER_S - 60)
    assert sweep(tmp_path) == []
    os.utime(folder, (time.time() - STALE_AFTER_S - 60,) * 2)
    # The newest file counts: a shard that is still being written keeps the folder.
    assert sweep(tmp_path) == []
    os.utime(folder / "shard", (time.time() - STALE_AFTER_S - 60,) * 2)
    os.utime(folder, (time.time() - STALE_AFTER_S - 60,) * 2)
    assert sweep(tmp_path) == [folder]
    assert not folder.exists()


def test_a_replaced_checkpoint_without_successor_gets_its_name_back(tmp_path, dead):
    path = save_checkpoint(tmp_path / "step-7", sample_arrays(7), kind="dynamics", step=7).wait()
    os.rename(path, leftover_path(path, REPLACED, dead))
    leave(tmp_path, PARTIAL, dead)
    save_checkpoint(tmp_path / "step-6", sample_arrays(6), kind="dynamics", step=6)
    assert sorted(os.listdir(tmp_path)) == ["step-6", "step-7"]
    assert latest(tmp_path) == path
    assert load_checkpoint(path).arrays["count"] == 7


def test_foreign_folders_are_never_touched(tmp_path, dead):
    foreign = [tmp_path / name for name in ("notes", ".git", ".step-7.partial", f".x.partial-{dead}.bak")]
    for folder in foreign:
        folder.mkdir()
        os.utime(folder, (0, 0))
    (tmp_path / f".file.partial-{dead}").write_text("a file")
    assert sweep(tmp_path) == []
    assert all(folder.exists() for folder in foreign)


def test_what_cannot_be_removed_does_not_stop_a_save(tmp_path, dead, monkeypatch):
    leave(tmp_path, PARTIAL, dead)
    monkeypatch.setattr("distmd_protocol.checkpoint.sweep.shutil.rmtree", refuse)
    save_checkpoint(tmp_path / "step-8", sample_arrays(), kind="dynamics", step=8)
    assert latest(tmp_path) == tmp_path / "step-8"


def refuse(path):
    raise PermissionError(13, "Permission denied")
