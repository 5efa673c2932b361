"""Whatever lies on the disk: reading ends in a CheckpointError or in exactly what was saved."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import time

import numpy as np
import pytest
from conftest import sample_arrays
from forge import change_manifest, manifest_bytes, put_shard, read_content, shard_bytes
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distmd_protocol import CheckpointError, latest, load_checkpoint, read_manifest, save_checkpoint

pytestmark = pytest.mark.once

SHARD = "shard-00000-of-00001.safetensors"


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    """Return a checkpoint, and the bytes of its two files."""
    path = save_checkpoint(
        tmp_path_factory.mktemp("victim") / "x", sample_arrays(3), kind="dynamics", step=3, meta={"note": "é", "n": 1}
    ).wait()
    return path, {name: (path / name).read_bytes() for name in ("manifest.json", SHARD)}


@pytest.fixture
def simple(tmp_path):
    """Return a checkpoint with one array of six float64."""
    return save_checkpoint(tmp_path / "x", {"a": np.arange(6.0)}, kind="test", step=0).wait()


def refused(path, message=None):
    """Loading ends in a CheckpointError that names the place."""
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
def test_every_prefix(victim, name):
    path, content = victim
    try:
        for length in range(len(content[name])):
            (path / name).write_bytes(content[name][:length])
            refused(path)
    finally:
        (path / name).write_bytes(content[name])
    load_checkpoint(path)


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
@pytest.mark.parametrize("suffix", [b"\n", b"\0", b" ", b"x" * 100])
def test_something_appended(victim, name, suffix):
    path, content = victim
    try:
        (path / name).write_bytes(content[name] + suffix)
        refused(path)
    finally:
        (path / name).write_bytes(content[name])


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
@given(data=st.data())
@settings(max_examples=400)
def test_single_flipped_bytes(victim, name, data):
    path, content = victim
    position = data.draw(st.integers(0, len(content[name]) - 1))
    flip = data.draw(st.integers(1, 255))
    damaged = bytearray(content[name])
    damaged[position] ^= flip
    try:
        (path / name).write_bytes(damaged)
        refused(path)
    finally:
        (path / name).write_bytes(content[name])


def test_every_single_bit_of_a_small_checkpoint(simple):
    for name in ("manifest.json", SHARD):
        content = (simple / name).read_bytes()
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= 1 << (position % 8)
            (simple / name).write_bytes(damaged)
            refused(simple)
        (simple / name).write_bytes(content)


@given(content=st.binary(max_size=300))
@settings(max_examples=200)
def test_any_bytes_as_a_manifest(victim, content):
    path, good = victim
    try:
        for attempt in (content, manifest_bytes(content + b"}")):
            (path / "manifest.json").write_bytes(attempt)
            refused(path)
    finally:
        (path / "manifest.json").write_bytes(good["manifest.json"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
# Members that hold anything, or another legal value, are left out: there a change is another legal checkpoint.
FREE = {"meta", "created", "packages", "step", "kind", "world_size", "replicated"}


@pytest.mark.filterwarnings("ignore::distmd_protocol.PrecisionWarning")
@given(data=st.data())
@settings(max_examples=400)
def test_a_signed_manifest_with_any_value_anywhere(victim, data):
    """An attacker can sign. Replace one value, anywhere in the structure: refused, or the arrays are the same."""
    path, good = victim
    content = read_content(path)
    node, trail = content, []
    while isinstance(node, dict | list) and node and (not trail or data.draw(st.booleans())):
        keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        trail.append((node, key))
        node = node[key]
    parent, key = trail[-1]
    before = json.dumps(content)
    parent[key] = data.draw(json_values)
    assume(json.dumps(content) != before)
    try:
        (path / "manifest.json").write_bytes(manifest_bytes(content))
        try:
            loaded = load_checkpoint(path, allow_error_state=True)
        except CheckpointError:
            return
        assert trail[0][1] in FREE | {"precision", "arrays"}
        for name, value in sample_arrays(3).items():
            np.testing.assert_array_equal(loaded.arrays[name], value)
    finally:
        (path / "manifest.json").write_bytes(good["manifest.json"])


@given(data=st.data())
@settings(max_examples=300)
def test_a_signed_header_with_any_value_anywhere(victim, data):
    path, good = victim
    length = struct.unpack("<Q", good[SHARD][:8])[0]
    header = json.loads(good[SHARD][8 : 8 + length])
    key = data.draw(st.sampled_from(sorted(header)))
    if data.draw(st.booleans()):
        header[key] = data.draw(json_values)
    else:
        header[key][data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = data.draw(
            json_values | st.lists(st.integers(-3, 400), max_size=3)
        )
    try:
        put_shard(path, shard_bytes(header, good[SHARD][8 + length :]))
        try:
            loaded = load_checkpoint(path)
        except CheckpointError:
            return
        for name, value in sample_arrays(3).items():
            np.testing.assert_array_equal(loaded.arrays[name], value)
    finally:
        for name, content in good.items():
            (path / name).write_bytes(content)


def array_entry(content):
    return content["arrays"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: array_entry(c).update(sha256="0" * 64), "'a' does not have the SHA-256"),
        (lambda c: c["shards"][0].update(header_sha256="0" * 64), "header does not have the SHA-256"),
        (lambda c: array_entry(c).update(sha256="xyz"), "not 64 hexadecimal digits"),
        (lambda c: c["shards"][0].update(name="../x/" + SHARD), "is named"),
        (lambda c: c["shards"][0].update(name="/etc/passwd"), "is named"),
        (lambda c: c["shards"][0].update(name=".."), "is named"),
        (lambda c: c["shards"][0].update(name="manifest.json"), "is named"),
        (lambda c: c["shards"][0].update(name="shard-00001-of-00002.safetensors"), "is named"),
        (lambda c: c["shards"][0].update(name=SHARD + "\0"), "is named"),
        (lambda c: c["shards"].append(c["shards"][0]), "does not list 1 shards"),
        (lambda c: c.update(shards=[]), "does not list 1 shards"),
        (lambda c: c.update(world_size=10**6, replicated=False), "does not list 1000000 shards"),
        (lambda c: c["arrays"].append(array_entry(c)), "listed twice"),
        (lambda c: array_entry(c).update(shard=1), "is in shard 1 of 1"),
        (lambda c: array_entry(c).update(shard=-1), "is in shard -1 of 1"),
        (lambda c: array_entry(c).update(shard=False), "is in shard False of 1"),
        (lambda c: array_entry(c).update(key="b"), "list different arrays: a, b"),
        (lambda c: array_entry(c).update(key="../b"), "list different arrays"),
        (lambda c: array_entry(c).update(key="a//b"), "non-empty segments"),
        (lambda c: array_entry(c).update(key="k" * 1025), "1025 bytes, the limit is 1024"),
        (lambda c: array_entry(c).update(key="/".join("k" * 65)), "65 segments, the limit is 64"),
        (lambda c: array_entry(c).update(dtype="object"), "unknown type 'object'"),
        (lambda c: array_entry(c).update(dtype="int64"), "is float64 6 in its header and int64 6 in the manifest"),
        (lambda c: array_entry(c).update(shape=[2, 3]), "is float64 6 in its header and float64 2×3"),
        (lambda c: array_entry(c).update(shape=[-6]), "the shape of 'a'"),
        (lambda c: array_entry(c).update(shape=[2**63]), "the shape of 'a'"),
        (lambda c: array_entry(c).update(shape=[True]), "the shape of 'a'"),
        (lambda c: array_entry(c).update(shape=[1] * 33), "at most 32 counts"),
        (lambda c: array_entry(c).update(prng="threefry2x32"), "is no PRNG key"),
        (lambda c: c.update(arrays=[]), "list different arrays: a"),
        (lambda c: c.update(complete=False), "complete"),
        (lambda c: c.update(complete=1), "complete"),
        (lambda c: c.update(step=-1), "step is -1"),
        (lambda c: c.update(step=2**64), "step is"),
        (lambda c: c.update(world_size=0), "world_size is 0"),
        (lambda c: c.update(kind="../x"), "kind"),
        (lambda c: c.update(meta=[]), "meta in the manifest"),
        (lambda c: c.update(precision={}), "precision in the manifest"),
        (lambda c: c.update(format="zip"), "it has no format"),
        (lambda c: c.update(version="1"), "version '1'"),
        (lambda c: c.update(version=1.0), r"version 1\.0"),
        (lambda c: c.__delitem__("arrays"), "lacks arrays"),
        (lambda c: {"a": c}, "it has no format"),
    ],
)
def test_a_signed_manifest_that_lies(simple, change, message):
    change_manifest(simple, change)
    refused(simple, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'"step":0,"step":0', "'step' appears twice"),
        (b'"step":NaN', "NaN is not a JSON number"),
        (b'"step":Infinity', "Infinity is not a JSON number"),
        (b'"step":0,"x":-Infinity', "-Infinity is not a JSON number"),
        (b'"step":1e999', "beyond the range"),
        (b'"step":0,"x":' + b"[" * 70 + b"]" * 70, "deeper than 64"),
        (b'"step":0,"x":' + b"[" * 200_000 + b"]" * 200_000, "deeper than 64"),
        (b'"step":0,"x":"\xff"', "not JSON"),
        (b'"step":0,"x":"\\ud800"', "surrogate"),
        (b'"step":' + b"1" * 5000, "not JSON"),
        (b'"step":0,', "not JSON"),
    ],
)
def test_json_that_parsers_read_differently(simple, text, message):
    body = json.dumps(read_content(simple), separators=(",", ":")).encode().replace(b'"step":0', text)
    (simple / "manifest.json").write_bytes(manifest_bytes(body))
    refused(simple, message)


def entry(begin=0, end=48, dtype="F64", shape=(6,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({"a": entry()}, b"\0" * 48, 2**60, "header claims 1152921504606846976 bytes, the limit is"),
        ({"a": entry()}, b"\0" * 48, 2**64 - 1, "the limit is"),
        ({"a": entry()}, b"\0" * 48, 10_000, "header claims 10000 bytes, the whole file has"),
        ({"a": entry()}, b"", None, "'a'|arrays end at byte 48, but 0 bytes follow"),
        ({"a": entry()}, b"\0" * 56, None, "arrays end at byte 48, but 56 bytes follow"),
        ({"a": entry(end=2**50, shape=[2**47])}, b"\0" * 48, None, "arrays end at byte"),
        ({"a": entry(shape=[2**62, 2**62])}, b"\0" * 48, None, "claims bytes 0 to 48, but"),
        ({"a": entry(8, 56)}, b"\0" * 56, None, "leaves a gap before it"),
        ({"a": entry(), "b": entry(40, 88)}, b"\0" * 88, None, "'b' .* overlaps the array before it"),
        ({"a": entry(), "b": entry()}, b"\0" * 48, None, "overlaps"),
        ({"a": entry(48, 0)}, b"\0" * 48, None, "claims bytes 48 to 0"),
        ({"a": entry(-48, 0)}, b"\0" * 48, None, "not two counts of bytes"),
        ({"a": entry(dtype="C64")}, b"\0" * 48, None, "unknown type 'C64'"),
        ({"a": entry(dtype=7)}, b"\0" * 48, None, "unknown type"),
        ({"a": {"dtype": "F64"}}, b"\0" * 48, None, "does not consist of dtype, shape and data_offsets"),
        ({"a": [1]}, b"\0" * 48, None, "does not consist"),
        ({"": entry()}, b"\0" * 48, None, "non-empty segments"),
        ({"__metadata__": {"a": 1}, "a": entry()}, b"\0" * 48, None, "__metadata__ is not a mapping"),
        (b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"\0" * 48, None, "'a' appears twice"),
        (b'{"a":NaN}', b"", None, "NaN is not"),
        (b"[]", b"", None, "does not start with"),
        (b"{" + b"[" * 100_000, b"", None, "header is"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, b"", None, "deeper than 64"),
        (b"{}\n", b"", None, "list different arrays"),
        (b"", b"", None, "does not start with"),
        (b" {}", b"", None, "does not start with"),
    ],
)
def test_a_signed_header_that_lies(simple, header, data, length, message):
    put_shard(simple, shard_bytes(header, data, length))
    refused(simple, message)


def test_a_header_with_too_many_arrays(simple):
    header = {str(number): entry(0, 0, shape=[0]) for number in range(100_001)}
    put_shard(simple, shard_bytes(header, b""))
    refused(simple, "lists 100001 arrays, the limit is 100000")


def test_a_manifest_beyond_its_limit(simple):
    os.truncate(simple / "manifest.json", 257 * 1024**2)
    refused(simple, "the limit is 268435456")


def test_a_claim_of_terabytes_allocates_nothing(simple):
    """The claim is in all places at once and signed; only the file is small."""

    def change(content):
        content["arrays"][0]["shape"] = [2**40]
        content["shards"][0]["bytes"] = 2**43 + 100

    change_manifest(simple, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(simple, "the manifest says 8796093022308")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_a_bool_other_than_0_and_1(tmp_path):
    import hashlib

    path = save_checkpoint(tmp_path / "x", {"a": np.array([True, False])}, kind="test", step=0).wait()
    shard = bytearray((path / SHARD).read_bytes())
    shard[-1] = 2
    (path / SHARD).write_bytes(shard)
    change_manifest(path, lambda c: array_entry(c).update(sha256=hashlib.sha256(bytes(shard[-2:])).hexdigest()))
    refused(path, "no booleans")


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
def test_a_pickle_under_our_names(simple, name, monkeypatch):
    monkeypatch.chdir(simple)
    content = pickle.dumps(Bomb())
    if name == SHARD:
        put_shard(simple, content)
    else:
        (simple / name).write_bytes(content)
    refused(simple)
    assert latest(simple.parent) is None or name == SHARD
    assert not (simple / "exploded").exists()


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
@pytest.mark.parametrize("kind", ["link out", "link in", "dangling", "pipe", "folder", "missing", "device"])
def test_what_is_not_a_regular_file(simple, tmp_path, name, kind):
    target = simple / name
    content = target.read_bytes()
    target.unlink()
    if kind == "link out":
        (tmp_path / "outside").write_bytes(content)
        target.symlink_to(tmp_path / "outside")
    elif kind == "link in":
        (simple / "inside").write_bytes(content)
        target.symlink_to("inside")
    elif kind == "dangling":
        target.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(target)
    elif kind == "folder":
        target.mkdir()
    elif kind == "device":
        target.symlink_to("/dev/zero")
    begin = time.monotonic()
    refused(simple)
    latest(tmp_path)
    assert time.monotonic() - begin < 5


def test_a_shard_that_shrinks_while_it_is_read(simple, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: real(descriptor, buffers, offset + 10**6))
    refused(simple, "became shorter")


def test_a_disk_that_fails_while_it_is_read(simple, monkeypatch):
    def preadv(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    refused(simple, "cannot be read: Input/output error")


def test_no_memory_for_it(simple, monkeypatch):
    def empty(*args):
        raise MemoryError

    monkeypatch.setattr(np, "empty", empty)
    refused(simple, "more than there is memory for")


def test_extra_members_of_the_same_version_are_ignored(simple):
    change_manifest(simple, lambda content: content.update(remark="x", shards=[{**content["shards"][0], "more": 1}]))
    assert load_checkpoint(simple).arrays["a"].sum() == 15
    assert read_manifest(simple).step == 0


def test_an_unlisted_file_in_the_folder_is_ignored(simple):
    (simple / "README").write_text("x")
    (simple / "shard-00001-of-00002.safetensors").write_bytes(b"x")
    assert load_checkpoint(simple).arrays["a"].sum() == 15


def test_a_shard_that_the_safetensors_library_wrote(simple):
    library = pytest.importorskip("safetensors.numpy")
    put_shard(simple, library.save({"a": np.arange(6.0)}, metadata={"by": "the library"}))
    assert load_checkpoint(simple).arrays["a"].sum() == 15
