"""What several test modules share."""

from __future__ import annotations

import numpy as np
import pytest

from distmd_protocol import save_checkpoint


def sample_arrays(step: int = 0) -> dict[str, np.ndarray]:
    """Return a small set of arrays of many types, different for each step."""
    rng = np.random.default_rng(step)
    return {
        "params/w": rng.normal(size=(3, 4)),
        "params/b": rng.normal(size=4).astype(np.float32),
        "mask": rng.integers(0, 2, 5).astype(bool),
        "count": np.array(step),
        "empty": np.zeros((0, 3)),
    }


@pytest.fixture
def arrays():
    return sample_arrays()


@pytest.fixture
def saved(tmp_path, arrays):
    """Path of a complete checkpoint with one shard."""
    return save_checkpoint(tmp_path / "step-5", arrays, kind="dynamics", step=5, meta={"x": 1.5}).wait()
