"""A disk that is full, a folder that may not be written to: the old checkpoint stays, and nothing else."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import sample_arrays

from distmd_protocol import CheckpointError, latest, load_checkpoint, save_checkpoint


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path, saved, arrays, monkeypatch):
    real = os.write
    written = []

    def write(descriptor, data):
        written.append(len(data))
        if sum(written) > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    for name in ("step-5", "step-6"):
        written.clear()
        with pytest.raises(CheckpointError, match="the disk is full; free space or save elsewhere"):
            save_checkpoint(tmp_path / name, sample_arrays(6), kind="dynamics", step=6)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["step-5"]
    np.testing.assert_array_equal(load_checkpoint(saved).arrays["params/w"], arrays["params/w"])


def test_short_writes_are_continued(tmp_path, arrays, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    path = save_checkpoint(tmp_path / "x", arrays, kind="dynamics", step=0).wait()
    monkeypatch.undo()
    np.testing.assert_array_equal(load_checkpoint(path).arrays["params/w"], arrays["params/w"])


def write_with_a_file_size_limit(folder):
    """Run in a process of its own: files cannot grow beyond 100 kB, as on a full disk or a used-up quota."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save_checkpoint(f"{folder}/step-6", {"big": np.ones(1_000_000)}, kind="dynamics", step=6)
    except CheckpointError as error:
        print(error)


def test_a_write_that_really_fails(tmp_path, saved):
    code = f"import test_checkpoint_faults as t; t.write_with_a_file_size_limit({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=os.path.dirname(__file__),
    )
    assert "cannot be written" in done.stdout
    assert "File too large" in done.stdout
    assert os.listdir(tmp_path) == ["step-5"]


def test_a_real_full_disk(tmp_path, arrays):
    small = tmp_path / "small"
    small.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=False).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        save_checkpoint(small / "step-1", arrays, kind="dynamics", step=1)
        with pytest.raises(CheckpointError, match="the disk is full"):
            save_checkpoint(small / "step-2", {"big": np.ones(300_000)}, kind="dynamics", step=2)
        assert os.listdir(small) == ["step-1"]
        assert latest(small) == small / "step-1"
    finally:
        subprocess.run(["umount", small], check=True)


def as_nobody(action):
    """Run a function without root's rights, in a child; return what it raised as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            action()
            text = "no error"
        except CheckpointError as error:
            text = f"CheckpointError: {error}"
        # It must never return into the test process's code.
        except BaseException as error:  # noqa: BLE001
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_folder_without_permission(tmp_path, arrays):
    folder = tmp_path / "locked"
    folder.mkdir()
    path = save_checkpoint(folder / "x", arrays, kind="dynamics", step=0).wait()
    # pytest's own folders are closed to others; what is tested is the last one.
    for parent in (tmp_path, *tmp_path.parents):
        if parent.owner() == tmp_path.owner() and str(parent).count("pytest-"):
            parent.chmod(0o755)
    folder.chmod(0o555)
    text = as_nobody(lambda: save_checkpoint(folder / "y", {"a": 1}, kind="dynamics", step=0))
    assert text.startswith("CheckpointError: the checkpoint cannot be written")
    assert "permission denied; choose a folder that this user may write to" in text
    path.chmod(0o000)
    assert "CheckpointError" in as_nobody(lambda: load_checkpoint(path))
    assert "no error" in as_nobody(lambda: latest(folder))
    path.chmod(0o755)
    (path / "shard-00000-of-00001.safetensors").chmod(0o000)
    assert "CheckpointError" in as_nobody(lambda: load_checkpoint(path))
    folder.chmod(0o000)
    assert "CheckpointError" in as_nobody(lambda: latest(folder))
    folder.chmod(0o755)
