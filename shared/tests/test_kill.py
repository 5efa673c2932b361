"""Kill −9 at random moments: the newest complete checkpoint is always found, and it is exactly what was saved."""

from __future__ import annotations

import os

import kill_cases
import numpy as np
import pytest

from distmd_protocol import latest, list_checkpoints, load_checkpoint, save_checkpoint
from distmd_protocol.testkit import run_ranks

pytestmark = pytest.mark.once

MOMENTS = {False: 20, True: 8}
"""Kills of a rank that writes its shard, and of the only writing rank."""


def check(folder, replicated, committed_before):
    """Return the newest step, after checking every checkpoint in the folder against what was saved."""
    found = list_checkpoints(folder)
    for path in found:
        manifest = load_checkpoint(path, shard=0).manifest
        for shard in range(len(manifest.shards)):
            loaded = load_checkpoint(path, shard=shard)
            for key, value in kill_cases.arrays_of(shard, loaded.step).items():
                np.testing.assert_array_equal(loaded.arrays[key], value)
    returned = folder / "returned.txt"
    last_returned = int(returned.read_text().split()[-1]) if returned.exists() else -1
    # A kill between the commit and the note leaves a step that was committed and never noted.
    known = max(last_returned, committed_before)
    newest = load_checkpoint(latest(folder), shard=0).step if found else -1
    # The save that was interrupted may or may not have been committed.
    assert known <= newest <= known + 1
    return newest


@pytest.mark.filterwarnings("ignore::distmd_protocol.PrecisionWarning")
@pytest.mark.parametrize("replicated", [False, True])
def test_kill_at_random_moments(tmp_path, replicated):
    rng = np.random.default_rng(2024 + replicated)
    newest, leftovers = -1, 0
    for _ in range(MOMENTS[replicated]):
        outcomes = run_ranks(
            kill_cases.write_until_killed,
            2,
            str(tmp_path),
            newest + 1,
            # Killing a rank that does not write is the lesser test.
            0 if replicated else int(rng.integers(2)),
            float(rng.uniform(0.0, 0.4)),
            replicated,
            fresh=True,
        )
        assert all(outcome.failure is not None for outcome in outcomes)
        assert -9 in [outcome.exit_code for outcome in outcomes]
        newest = check(tmp_path, replicated, newest)
        leftovers += sum(".partial-" in name or ".replaced-" in name for name in os.listdir(tmp_path))
    # Otherwise the moments were all between two saves and nothing was tested.
    assert leftovers > 0
    save_checkpoint(tmp_path / "last", {}, kind="dynamics", step=newest + 1, keep_last=1)
    assert sorted(os.listdir(tmp_path)) == ["last", "returned.txt"]
