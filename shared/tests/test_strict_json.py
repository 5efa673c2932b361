from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmd_protocol import ProtocolError, strict_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a":1}x', "not JSON"),
        (b"\xff", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a":1,"b":{"c":1,"c":2}}', "'c' appears twice"),
        (b"[NaN]", "NaN is not"),
        (b"[Infinity]", "Infinity is not"),
        (b"[-Infinity]", "-Infinity is not"),
        (b"[1e999]", "beyond the range"),
        (b"[" + b"9" * 5000 + b"]", "not JSON"),
        (b'["\\ud800"]', "surrogate"),
        (b'{"\\udfff":1}', "surrogate"),
        (b"[" * 65 + b"]" * 65, "deeper than 64"),
        (b"[" * 100_000 + b"]" * 100_000, "deeper than 64"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "deeper than 64"),
    ],
)
def test_refused_on_reading(text, message):
    with pytest.raises(ProtocolError, match=message):
        strict_json.loads(text)


def test_the_deepest_allowed_nesting_is_read():
    strict_json.loads(b"[" * 64 + b"]" * 64)


def test_a_large_object_is_checked_in_linear_time():
    names = ",".join(f'"{number}":0' for number in range(200_000))
    assert len(strict_json.loads(f"{{{names}}}".encode())) == 200_000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1, np.float64("nan")], object(), {1: 2}, np.ones(2)])
def test_refused_on_writing(value):
    with pytest.raises(ProtocolError):
        strict_json.dumps({"x": value})


def test_refused_on_writing_too_deep():
    value: list = []
    for _ in range(100):
        value = [value]
    with pytest.raises(ProtocolError, match="deeper than 64"):
        strict_json.dumps(value)


def test_numpy_scalars_and_tuples_are_written():
    assert strict_json.dumps({"a": np.float32(0.5), "b": (np.int64(1), np.bool_(True))}) == b'{"a":0.5,"b":[1,true]}'


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_every_bit(value):
    assert strict_json.loads(strict_json.dumps([value]))[0].hex() == value.hex()
