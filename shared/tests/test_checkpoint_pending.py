from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import sample_arrays

from distmd_protocol import CheckpointError, latest, load_checkpoint, save_checkpoint
from distmd_protocol.checkpoint import commit


@pytest.fixture
def gate(monkeypatch):
    """Hold every write until the gate is opened."""
    event = threading.Event()
    real = commit.write_shard

    def write_shard(*args):
        assert event.wait(30)
        return real(*args)

    monkeypatch.setattr(commit, "write_shard", write_shard)
    yield event
    event.set()


def test_later_updates_never_reach_the_file(tmp_path, gate):
    tree = {"a": np.ones(1000), "view": np.ones((10, 10))[:, ::2], "big_endian": np.ones(3, ">f4")}
    pending = save_checkpoint(tmp_path / "x", tree, kind="test", step=0, wait=False)
    for array in tree.values():
        array += 1
    gate.set()
    loaded = load_checkpoint(pending.wait())
    assert all(np.all(array == 1) for array in loaded.arrays.values())


def test_later_updates_of_torch_tensors_never_reach_the_file(tmp_path, gate):
    torch = pytest.importorskip("torch")
    tree = {"f": torch.ones(1000), "bf": torch.ones(7, dtype=torch.bfloat16), "one": torch.tensor(1.0)}
    pending = save_checkpoint(tmp_path / "x", tree, kind="test", step=0, wait=False)
    for tensor in tree.values():
        tensor.add_(1)
    gate.set()
    template = {key: torch.zeros_like(value) for key, value in tree.items()}
    restored = load_checkpoint(pending.wait()).restore(template)
    assert all(torch.all(value == 1) for value in restored.values())


def test_a_donated_jax_buffer_never_reaches_the_file(tmp_path, gate):
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones(1000)
    pending = save_checkpoint(tmp_path / "x", {"a": array}, kind="test", step=0, wait=False)
    jax.jit(lambda a: a + 1, donate_argnums=0)(array).block_until_ready()
    gate.set()
    assert np.all(load_checkpoint(pending.wait()).arrays["a"] == 1)


def test_nothing_is_visible_before_the_commit(tmp_path, gate):
    pending = save_checkpoint(tmp_path / "step-1", sample_arrays(1), kind="test", step=1, wait=False)
    assert latest(tmp_path) is None
    assert all(".partial-" in name for name in os.listdir(tmp_path))
    gate.set()
    assert pending.wait() == pending.path == tmp_path / "step-1"
    assert pending.wait() == pending.path
    assert latest(tmp_path) == pending.path


def test_it_is_committed_without_waiting(tmp_path):
    """The commit of a replicated checkpoint needs no call of wait, not even at the end of the program."""
    code = (
        "import numpy as np\nfrom distmd_protocol import save_checkpoint\n"
        f"save_checkpoint({str(tmp_path / 'x')!r}, {{'a': np.ones(1_000_000)}}, kind='test', step=3, wait=False)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    assert load_checkpoint(tmp_path / "x").arrays["a"].sum() == 1_000_000


def test_a_failure_in_the_background_is_raised_by_wait(tmp_path, monkeypatch, caplog):
    def write_shard(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit, "write_shard", write_shard)
    pending = save_checkpoint(tmp_path / "x", sample_arrays(), kind="test", step=0, wait=False)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="the disk is full"):
            pending.wait()
    assert os.listdir(tmp_path) == []
    assert "the disk is full" in caplog.text


def test_what_is_wrong_with_the_arguments_is_raised_at_once(tmp_path):
    with pytest.raises(CheckpointError, match="not an array"):
        save_checkpoint(tmp_path / "x", {"a": object()}, kind="test", step=0, wait=False)
    assert os.listdir(tmp_path) == []


def test_keep_last_works_in_the_background(tmp_path):
    for step in range(4):
        save_checkpoint(tmp_path / f"{step}", sample_arrays(), kind="test", step=step, wait=False, keep_last=2).wait()
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]
