"""The benchmark runs at a small size and writes the agreed records; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "checkpoint_io.py"


@pytest.mark.bench
def test_checkpoint_io(tmp_path):
    pytest.importorskip("safetensors")
    command = [sys.executable, SCRIPT, "--gigabytes", "0.01", "--repeats", "1", "--arrays", "4"]
    command += ["--folder", tmp_path, "--json", tmp_path / "x.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    rows = json.loads((tmp_path / "x.json").read_text())
    assert {(row["name"], row["work"]) for row in rows} >= {
        ("protocol", "checkpoint-write-0.01GB"),
        ("protocol without hashing", "checkpoint-read-0.01GB"),
        ("safetensors", "checkpoint-read-0.01GB"),
        ("numpy.savez", "checkpoint-write-0.01GB"),
        ("sha256", "hash-only"),
    }
    assert all(row["value"] > 0 for row in rows if row["metric"] == "gb_per_s")
    assert "gb_per_s" in done.stdout
