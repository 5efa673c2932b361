from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from forge import change_manifest

from distmd_protocol import (
    CheckpointError,
    PrecisionWarning,
    flatten,
    load_checkpoint,
    precision,
    read_manifest,
    save_checkpoint,
)
from distmd_protocol.checkpoint.migrate import migrate


@dataclass
class State:
    position: Any
    velocity: Any
    box: Any = None


@pytest.fixture
def tree():
    rng = np.random.default_rng(1)
    return {"state": State(rng.normal(size=(4, 3)), rng.normal(size=(4, 3))), "opt": [(np.arange(3), np.float32(2))]}


@pytest.fixture
def path(tmp_path, tree):
    return save_checkpoint(tmp_path / "x", flatten(tree), kind="dynamics", step=1).wait()


def test_restoring_gives_the_same_structure_with_the_stored_values(path, tree):
    blank = {"state": State(np.zeros((4, 3)), np.zeros((4, 3))), "opt": [(np.zeros(3, int), np.float32(0))]}
    restored = load_checkpoint(path, template=blank).restore(blank)
    assert isinstance(restored["state"], State)
    assert isinstance(restored["opt"][0], tuple)
    np.testing.assert_array_equal(restored["state"].velocity, tree["state"].velocity)
    assert restored["opt"][0][1] == 2
    assert blank["state"].position.sum() == 0


def test_a_flat_mapping_of_the_stored_keys_is_a_template(path, tree):
    restored = load_checkpoint(path).restore(flatten(tree))
    np.testing.assert_array_equal(restored["state/position"], tree["state"].position)


def test_every_path_that_does_not_fit_is_named(path, tree):
    wrong = {
        "state": State(np.zeros((4, 3), np.float32), np.zeros((5, 3)), box=np.eye(3)),
        "extra": [1.0, {"deep": 2}],
    }
    message = (
        r"missing: state/box, extra/0, extra/1/deep\. left over: opt/0/0, opt/0/1\. different: "
        r"state/position \(stored float64 4×3, wanted float32 4×3\), "
        r"state/velocity \(stored float64 4×3, wanted float64 5×3\)"
    )
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path).restore(wrong)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, template=wrong)


def test_a_template_that_does_not_fit_is_found_before_the_arrays_are_read(path, tree):
    (path / "shard-00000-of-00001.safetensors").write_bytes(b"not read")
    with pytest.raises(CheckpointError, match="do not fit the template"):
        load_checkpoint(path, template={"a": 1.0})


@pytest.mark.parametrize("template", [np.ones(3), {"a": "text"}, {"a": object()}, {"": 1.0}])
def test_what_cannot_be_a_template_is_refused(path, template):
    with pytest.raises(CheckpointError, match="cannot be restored into this template"):
        load_checkpoint(path, template=template)


def test_nothing_is_cast(tmp_path):
    path = save_checkpoint(tmp_path / "x", {"a": np.ones(2, np.float32)}, kind="test", step=0).wait()
    for dtype in (np.float64, np.float16, np.int32, np.uint32):
        with pytest.raises(CheckpointError, match="different: a"):
            load_checkpoint(path).restore({"a": np.ones(2, dtype)})
    with pytest.raises(CheckpointError, match="different: a"):
        load_checkpoint(path).restore({"a": np.ones((1, 2), np.float32)})


def test_the_kind_is_checked(path):
    with pytest.raises(CheckpointError, match="is of kind 'dynamics', expected was 'trajectories'"):
        load_checkpoint(path, kind="trajectories")


def test_an_error_state_is_refused_unless_asked_for(tmp_path, arrays):
    path = save_checkpoint(tmp_path / "x", arrays, kind="error-state", step=0).wait()
    for kind in (None, "dynamics"):
        with pytest.raises(CheckpointError, match="saved after a failure: do not continue from it"):
            load_checkpoint(path, kind=kind)
        assert load_checkpoint(path, kind=kind, allow_error_state=True).kind == "error-state"
    assert load_checkpoint(path, kind="error-state").kind == "error-state"


@pytest.mark.parametrize("make", ["nothing", "file", "empty", "folder of checkpoints"])
def test_what_is_no_checkpoint(tmp_path, make):
    path = tmp_path / "x"
    if make == "file":
        path.write_text("x")
    elif make != "nothing":
        path.mkdir()
        if make != "empty":
            save_checkpoint(path / "step-1", {}, kind="test", step=1)
    message = {"nothing": "no checkpoint at", "file": "not a folder"}.get(make, r"ask latest\(\) for the newest")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(path)


def test_relative_paths_and_trailing_slashes(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    assert load_checkpoint("x").step == 1
    assert load_checkpoint("./x/").step == 1
    save_checkpoint("y/", {}, kind="test", step=2)
    assert sorted(os.listdir(".")) == ["x", "y"]


def test_a_newer_version_is_refused_with_the_version_that_reads_it(path):
    def change(content):
        content["version"] = 2
        content["packages"]["distmd-protocol"] = "9.1"
        del content["arrays"]

    change_manifest(path, change)
    with pytest.raises(CheckpointError, match=r"has version 2 .*reads up to 1; install distmd-protocol 9\.1"):
        load_checkpoint(path)


def test_older_versions_go_through_one_step_after_the_other():
    steps = {1: lambda c: {**c, "version": 2, "seen": [1]}, 2: lambda c: {**c, "version": 3, "seen": [*c["seen"], 2]}}
    content = {"format": "distmd-checkpoint", "version": 1}
    assert migrate(content, steps, version=3)["seen"] == [1, 2]
    assert "seen" not in content
    with pytest.raises(CheckpointError, match="no migration from version 2"):
        migrate(content, {1: steps[1]}, version=3)
    with pytest.raises(CheckpointError, match="does not exist"):
        migrate({**content, "version": 0}, steps, version=3)


def test_another_precision_policy_warns_once_with_both(path, monkeypatch):
    monkeypatch.setattr(precision, "_registry", precision._Registry())
    load_checkpoint(path)

    def change(content):
        content["precision"]["environment"]["XLA_FLAGS"] = "--then"

    change_manifest(path, change)
    monkeypatch.setenv("XLA_FLAGS", "--now")
    with pytest.warns(PrecisionWarning, match=r"written under --then, now --now.*not be bitwise equal"):
        load_checkpoint(path)
    load_checkpoint(path)


def test_a_potential_is_handed_over_without_that_warning(tmp_path):
    path = save_checkpoint(tmp_path / "x", {}, kind="potential", step=0).wait()
    change_manifest(path, lambda content: content["precision"]["cpu"].update(machine="elsewhere"))
    load_checkpoint(path)


@pytest.mark.parametrize("shard", [1, -1, 7])
def test_a_shard_that_is_not_there(path, shard):
    with pytest.raises(CheckpointError, match="has 1 shards, there is no shard"):
        load_checkpoint(path, shard=shard)
