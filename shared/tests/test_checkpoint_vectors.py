"""The committed vectors, read by this package and by the reader that the specification prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distmd_protocol import CheckpointError, load_checkpoint, read_manifest

FOLDER = Path(__file__).parent / "vectors" / "checkpoints"
SPECIFICATION = Path(__file__).parents[2] / "docs" / "protocol" / "checkpoint-v1.md"
EXPECTED = json.loads((FOLDER / "accepted" / "expected.json").read_text(encoding="utf-8"))
REFUSED = sorted(path.name for path in (FOLDER / "refused").iterdir())

pytestmark = pytest.mark.filterwarnings("ignore::distmd_protocol.PrecisionWarning")


@pytest.fixture(scope="module")
def printed_reader():
    """The code block of the specification."""
    if not SPECIFICATION.exists():
        pytest.skip("the specification is not beside this package")
    (code,) = re.findall(r"```python\n(.*?)```", SPECIFICATION.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict = {}
    exec(compile(code, str(SPECIFICATION), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", EXPECTED)
def test_accepted(name):
    for shard, arrays in enumerate(EXPECTED[name]):
        loaded = load_checkpoint(FOLDER / "accepted" / name, shard=shard)
        found = {
            key: {"dtype": a.layout.dtype, "shape": list(a.layout.shape), "hex": a.data.tobytes().hex()}
            for key, a in loaded.stored.items()
        }
        assert found == arrays
    if name == "prng-key":
        assert loaded.layouts["rng"].prng == "threefry2x32"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(CheckpointError):
        load_checkpoint(FOLDER / "refused" / name)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_printed_reader_accepts_the_same(name, printed_reader):
    path = FOLDER / "accepted" / name
    manifest = printed_reader["read_manifest"](path)
    assert manifest["step"] == read_manifest(path).step
    for shard, arrays in enumerate(EXPECTED[name]):
        found = printed_reader["read_shard"](path, manifest, shard)
        assert found == {key: (a["dtype"], a["shape"], bytes.fromhex(a["hex"])) for key, a in arrays.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_the_printed_reader_refuses_the_same(name, printed_reader):
    path = FOLDER / "refused" / name
    with pytest.raises((AssertionError, ValueError, OSError, KeyError)):
        printed_reader["read_shard"](path, printed_reader["read_manifest"](path), 0)


def test_the_limits_in_the_specification_are_those_in_force():
    from distmd_protocol.checkpoint import limits

    if not SPECIFICATION.exists():
        pytest.skip("the specification is not beside this package")
    text = SPECIFICATION.read_text(encoding="utf-8")
    table = dict(
        re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text.partition("## Limits")[2].partition("## Writing")[0], re.M)
    )
    assert limits.MAX_MANIFEST_BYTES == 256 * 1024**2
    assert table["manifest"] == "256 MiB"
    assert table["header of a shard"] == f"{limits.MAX_HEADER_BYTES:,} bytes"
    assert table["nesting of JSON"] == str(limits.MAX_JSON_DEPTH)
    assert table["shards"] == f"{limits.MAX_SHARDS:,}"
    assert table["arrays in a shard, in all"] == f"{limits.MAX_ARRAYS_PER_SHARD:,}; {limits.MAX_ARRAYS:,}"
    assert table["key"] == f"{limits.MAX_KEY_BYTES:,} bytes of UTF-8, {limits.MAX_KEY_DEPTH} segments"
    assert table["dimensions"] == str(limits.MAX_DIMENSIONS)
    assert limits.STALE_AFTER_S == 24 * 3600
    assert f"1 to {limits.MAX_NAME_BYTES} bytes" in text
