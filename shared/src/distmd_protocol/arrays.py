"""From numpy, JAX and torch arrays to stored arrays, and back into the kind of array that a template holds.

Neither jax nor torch is imported: a value can only be one of theirs if its library is in ``sys.modules`` already.

Stated behaviour
----------------
- Byte order is converted to little-endian, the value is kept. Non-contiguous input is stored in C order.
- Python ``bool``, ``int`` and ``float`` are 0-d bool, int64 and float64 arrays, restored as what they were.
- bfloat16 and float8 keep their bits; without a template they come back as uint16 and uint8 arrays.
- A JAX typed PRNG key is stored as its key data; its implementation name stands in the manifest.
- Complex, long double, object, string, date and structured types are refused.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmd_protocol.dtypes import BY_NAME, WITHOUT_NUMPY, Layout, StoredArray
from distmd_protocol.errors import CheckpointError

_SCALARS = {bool: "bool", int: "int64", float: "float64"}


def layout_of(value: Any, key: str) -> Layout:
    """Return the layout of an array, a Python scalar, or a description with ``shape`` and ``dtype``.

    Raises
    ------
    CheckpointError
        Naming ``key``, if the value is no array or its type cannot be stored.
    """
    if type(value) in _SCALARS:
        return Layout(_SCALARS[type(value)], ())
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        remedy = "pass flatten(tree)" if isinstance(value, dict | list | tuple) else "put what is no array into meta"
        raise CheckpointError(f"{key!r} is a {type(value).__name__}, not an array; {remedy}")
    prng = _prng_implementation(value)
    if prng is not None:
        jax = sys.modules["jax"]
        data = jax.eval_shape(jax.random.key_data, value)
        return Layout("uint32", tuple(data.shape), prng)
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    if name not in BY_NAME:
        raise CheckpointError(_refusal(key, str(name)))
    return Layout(name, tuple(int(extent) for extent in shape))


def to_stored(value: Any, key: str, *, copy: bool) -> StoredArray:
    """Return the stored form of an array.

    Parameters
    ----------
    value
        numpy, JAX or torch array, or a Python scalar.
    key
        Named in errors.
    copy
        Never share memory with ``value``. Without it memory is shared where that is possible.

    Raises
    ------
    CheckpointError
        If the value is no array, its type cannot be stored, or its library will not hand it out.
    """
    layout = layout_of(value, key)
    try:
        raw = _raw_numpy(value, layout)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        # The first line says it; JAX adds a page.
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{key!r} ({layout}) cannot be brought to this host's memory: {reason}. Pass a dense array of which this "
            "process holds every element, outside of any transformation"
        ) from error
    carrier = BY_NAME[layout.dtype].carrier
    if layout.dtype in WITHOUT_NUMPY:
        # An array of one of these types views as its carrier only along contiguous memory.
        raw = np.ascontiguousarray(raw).view(carrier)
    data = np.array(raw, dtype=carrier, order="C", copy=True if copy else None).reshape(layout.shape)
    return StoredArray(layout, data)


def restore_leaf(template: Any, stored: StoredArray) -> Any:
    """Return the stored array as the kind of array that ``template`` is. The layouts are equal already.

    numpy and Python scalars give themselves; a JAX array gives a JAX array on the template's devices; a torch tensor
    gives a tensor on the template's device; a description (``jax.ShapeDtypeStruct``) gives numpy.
    """
    data = stored.data
    if type(template) in _SCALARS:
        return data.item()
    if _is_instance(template, "torch", "Tensor"):
        return _to_torch(template, data)
    if _is_instance(template, "jax", "Array"):
        return _to_jax(template, stored)
    wanted = np.dtype(template.dtype) if stored.layout.prng is None else data.dtype
    return data.view(wanted) if stored.layout.dtype in WITHOUT_NUMPY else data.astype(wanted, copy=False)


def _raw_numpy(value: Any, layout: Layout) -> NDArray[np.generic]:
    if type(value) in _SCALARS:
        return np.asarray(value, dtype=layout.dtype)
    if _is_instance(value, "torch", "Tensor"):
        return _from_torch(value, layout)
    if layout.prng is not None:
        value = sys.modules["jax"].random.key_data(value)
    return np.asarray(value)


def _from_torch(value: Any, layout: Layout) -> NDArray[np.generic]:
    torch = sys.modules["torch"]
    value = value.detach().cpu()
    if layout.dtype in WITHOUT_NUMPY:
        value = value.contiguous().view(torch.int16 if layout.dtype == "bfloat16" else torch.uint8)
    array: NDArray[np.generic] = value.resolve_neg().numpy()
    return array


def _to_torch(template: Any, data: NDArray[np.generic]) -> Any:
    torch = sys.modules["torch"]
    if str(template.dtype).removeprefix("torch.") in WITHOUT_NUMPY:
        # torch.from_numpy knows uint16 only since 2.3, int16 always.
        signed = data.view(np.int16) if data.itemsize == 2 else data
        tensor = torch.from_numpy(signed).view(template.dtype)
    else:
        tensor = torch.from_numpy(data)
    return tensor.to(template.device).requires_grad_(template.requires_grad)


def _to_jax(template: Any, stored: StoredArray) -> Any:
    jax = sys.modules["jax"]
    if stored.layout.prng is not None:
        data = jax.numpy.asarray(stored.data)
        return jax.device_put(jax.random.wrap_key_data(data, impl=stored.layout.prng), template.sharding)
    data = stored.data.view(template.dtype) if stored.layout.dtype in WITHOUT_NUMPY else stored.data
    return jax.device_put(data, template.sharding)


def _prng_implementation(value: Any) -> str | None:
    jax = sys.modules.get("jax")
    if jax is None or not _is_instance(value, "jax", "Array"):
        return None
    if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return None
    return str(jax.random.key_impl(value))


def _is_instance(value: Any, module: str, name: str) -> bool:
    loaded: ModuleType | None = sys.modules.get(module)
    kind = getattr(loaded, name, None)
    return kind is not None and isinstance(value, kind)


def _refusal(key: str, name: str) -> str:
    if name.startswith("complex"):
        remedy = "store its real and imaginary parts as two arrays"
    elif name.startswith(("longdouble", "float96", "float128")):
        remedy = "convert it to float64"
    else:
        remedy = f"use one of {', '.join(BY_NAME)}, or put it into meta"
    return f"{key!r} has the type {name}, which a checkpoint does not hold; {remedy}"
