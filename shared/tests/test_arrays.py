"""Every kind of array goes through a checkpoint on the disk and comes back bit for bit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from distmd_protocol import CheckpointError, load_checkpoint, save_checkpoint
from distmd_protocol.arrays import layout_of, restore_leaf, to_stored
from distmd_protocol.dtypes import BY_NAME, WITHOUT_NUMPY


def round_trip(tmp_path, tree, **options):
    path = save_checkpoint(tmp_path / "x", tree, kind="test", step=0, **options).wait()
    return load_checkpoint(path, template=tree)


def assert_same_bits(first, second):
    assert first.dtype == second.dtype
    assert first.shape == second.shape
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - WITHOUT_NUMPY))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_numpy_types_and_shapes(tmp_path, name, shape):
    rng = np.random.default_rng(0)
    array = np.asarray(rng.integers(0, 2, shape) if name == "bool" else rng.normal(size=shape) * 100).astype(name)
    loaded = round_trip(tmp_path, {"a": array})
    assert_same_bits(loaded.arrays["a"], array)
    assert_same_bits(loaded.restore({"a": array})["a"], array)


@given(
    hnp.arrays(
        st.sampled_from([np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4),
    )
)
def test_any_array_keeps_its_bits_nan_payloads_included(array):
    stored = to_stored(array, "a", copy=True)
    assert_same_bits(stored.data, array)
    assert not np.shares_memory(stored.data, array)


@pytest.mark.parametrize(
    "view",
    [lambda a: a[::2, ::-1], lambda a: a.T, lambda a: np.asfortranarray(a), lambda a: np.broadcast_to(a[0], (3, 6))],
)
def test_non_contiguous_input_is_stored_in_c_order(tmp_path, view):
    array = view(np.arange(24.0).reshape(4, 6))
    loaded = round_trip(tmp_path, {"a": array})
    np.testing.assert_array_equal(loaded.arrays["a"], array)
    assert loaded.arrays["a"].flags.c_contiguous


@pytest.mark.parametrize("name", ["f8", "f4", "f2", "i4", "u2"])
def test_big_endian_input_is_converted_with_its_value(tmp_path, name):
    array = np.array([1, 2, 300]).astype(f">{name}")
    loaded = round_trip(tmp_path, {"a": array})
    assert loaded.arrays["a"].dtype == np.dtype(f"<{name}")
    np.testing.assert_array_equal(loaded.arrays["a"], array)
    np.testing.assert_array_equal(loaded.restore({"a": array})["a"], array)


def test_python_scalars_come_back_as_what_they_were(tmp_path):
    tree = {"i": 7, "f": 0.1, "b": True}
    restored = round_trip(tmp_path, tree).restore(tree)
    assert restored == tree
    assert [type(value) for value in restored.values()] == [int, float, bool]
    with pytest.raises(CheckpointError, match="too large"):
        to_stored(2**63, "i", copy=False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(2, complex), "complex128, which a checkpoint does not hold; store its real and imaginary parts"),
        (np.ones(2, np.complex64), "complex64"),
        (np.ones(2, np.longdouble), "convert it to float64"),
        (np.array(["a"]), "str"),
        (np.array([object()]), "object"),
        (np.zeros(2, "M8[s]"), "datetime64"),
        (np.zeros(2, [("x", "f4")]), "void"),
        ("text", "is a str, not an array; put what is no array into meta"),
        ([1.0, 2.0], r"is a list, not an array; pass flatten\(tree\)"),
        (None, "NoneType"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_key(tmp_path, value, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        save_checkpoint(tmp_path / "x", {"good": np.ones(1), "bad/key": value}, kind="test", step=0)
    assert "'bad/key'" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_and_float8_keep_their_bits_without_ml_dtypes(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tree = {
        "bf": np.array([1.7, -2.3, np.nan], ml_dtypes.bfloat16),
        "e4": np.array([1.75, -2], ml_dtypes.float8_e4m3fn),
        "e5": np.array(1.5, ml_dtypes.float8_e5m2),
        "strided": np.arange(6).astype(ml_dtypes.bfloat16)[::2],
    }
    loaded = round_trip(tmp_path, tree)
    assert loaded.layouts["bf"].dtype == "bfloat16"
    assert loaded.arrays["bf"].dtype == np.uint16
    assert loaded.arrays["e4"].dtype == np.uint8
    restored = loaded.restore(tree)
    for key in tree:
        assert_same_bits(restored[key], np.ascontiguousarray(tree[key]).reshape(tree[key].shape))


def test_jax_arrays(tmp_path):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    tree = {
        "f": jnp.linspace(0, 1, 5).reshape(5, 1),
        "bf": jnp.array([1.7, -2.3], jnp.bfloat16),
        "bf0": jnp.array(1.5, jnp.bfloat16),
        "i": jnp.arange(3),
        "b": jnp.array(True),
        "empty": jnp.zeros((0, 2)),
    }
    loaded = round_trip(tmp_path, tree)
    assert loaded.arrays["bf"].dtype == np.uint16
    restored = loaded.restore(tree)
    for key, value in tree.items():
        assert isinstance(restored[key], jax.Array)
        assert restored[key].dtype == value.dtype
        assert np.asarray(restored[key]).tobytes() == np.asarray(value).tobytes()
    described = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in tree.items()}
    assert isinstance(loaded.restore(described)["f"], np.ndarray)
    assert loaded.restore(described)["bf"].dtype == tree["bf"].dtype


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_jax_prng_keys_round_trip_bitwise(tmp_path, implementation, shape):
    jax = pytest.importorskip("jax")
    key = jax.random.key(11, impl=implementation)
    if shape:
        key = jax.random.split(key, shape)
    loaded = round_trip(tmp_path, {"rng": key})
    assert loaded.layouts["rng"].prng == implementation
    restored = loaded.restore({"rng": key})["rng"]
    assert restored.dtype == key.dtype
    assert restored.shape == key.shape
    np.testing.assert_array_equal(jax.random.key_data(restored), jax.random.key_data(key))
    draw = jax.random.normal if not shape else jax.vmap(jax.random.normal)
    np.testing.assert_array_equal(draw(restored), draw(key))


def test_a_prng_key_of_another_implementation_or_none_is_different(tmp_path):
    jax = pytest.importorskip("jax")
    key = jax.random.key(0)
    loaded = round_trip(tmp_path, {"rng": key})
    with pytest.raises(CheckpointError, match=r"different: rng \(stored uint32 2 \(threefry2x32 PRNG key\), wanted"):
        loaded.restore({"rng": jax.random.key(0, impl="rbg")})
    with pytest.raises(CheckpointError, match="different: rng"):
        loaded.restore({"rng": np.zeros(2, np.uint32)})


def test_jax_tracers_are_refused():
    jax = pytest.importorskip("jax")

    def save(x):
        to_stored(x, "traced", copy=False)
        return x

    with pytest.raises(CheckpointError, match=r"'traced'.*outside of any transformation"):
        jax.jit(save)(1.0)


def test_torch_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    tree = {
        "f": torch.linspace(0, 1, 6, dtype=torch.float64).reshape(2, 3).T,
        "bf": torch.tensor([1.7, -2.3], dtype=torch.bfloat16),
        "bf0": torch.tensor(1.5, dtype=torch.bfloat16),
        "e4": torch.tensor([1.75, -2]).to(torch.float8_e4m3fn),
        "h": torch.ones(2, dtype=torch.float16),
        "b": torch.tensor([True, False]),
        "i": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "negative_bit": torch._neg_view(torch.arange(3.0)),
    }
    loaded = round_trip(tmp_path, tree)
    assert loaded.arrays["bf"].dtype == np.uint16
    restored = loaded.restore(tree)
    for key, value in tree.items():
        assert isinstance(restored[key], torch.Tensor)
        assert (restored[key].dtype, restored[key].shape) == (value.dtype, value.shape)
        assert restored[key].requires_grad == value.requires_grad
        as_bytes = [t.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (restored[key], value)]
        assert torch.equal(*as_bytes)


def test_torch_tensors_without_dense_memory_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(CheckpointError, match="'s'"):
        to_stored(torch.eye(3).to_sparse(), "s", copy=False)
    with pytest.raises(CheckpointError, match="complex64"):
        to_stored(torch.ones(2, dtype=torch.complex64), "c", copy=False)
    with pytest.raises(CheckpointError, match="'m'"):
        to_stored(torch.ones(2, device="meta"), "m", copy=False)


def test_one_backend_writes_and_the_other_reads(tmp_path):
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    path = save_checkpoint(
        tmp_path / "x", {"w": jax.numpy.array([1.7, 2.3], jax.numpy.bfloat16)}, kind="test", step=0
    ).wait()
    restored = load_checkpoint(path).restore({"w": torch.zeros(2, dtype=torch.bfloat16)})["w"]
    assert torch.equal(restored, torch.tensor([1.7, 2.3], dtype=torch.bfloat16))


def test_layouts_differ_by_type_shape_and_key():
    assert layout_of(np.ones(3), "a") == layout_of(np.zeros(3), "b")
    assert layout_of(np.ones(3), "a") != layout_of(np.ones(3, "f4"), "a")
    assert layout_of(np.ones((3, 1)), "a") != layout_of(np.ones(3), "a")
    assert str(layout_of(np.float32(1), "a")) == "float32 0-d"


def test_restored_arrays_own_writable_memory():
    array = np.arange(3.0)
    restored = restore_leaf(array, to_stored(array, "a", copy=True))
    restored += 1
    np.testing.assert_array_equal(array, np.arange(3.0))


def test_importing_the_protocol_imports_neither_backend():
    code = (
        "import sys, distmd_protocol, distmd_protocol.testkit, distmd_protocol.testkit.benchmark\n"
        "print([n for n in ('jax', 'torch', 'mpi4py', 'pickle', 'safetensors', 'ml_dtypes') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    # numpy itself imports pickle; the protocol never names it (see test_sources).
    assert done.stdout.strip() in ("[]", "['pickle']")
