"""The array types that a checkpoint holds, by name, and how each lies in memory.

A type that numpy lacks (bfloat16, the float8 types) is carried by an unsigned integer array of the same width with
the same bits; its name travels beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StoredType:
    """One element type.

    Parameters
    ----------
    name
        Name in manifests: numpy's name, or the name that JAX and torch use.
    tag
        Name in the header of a safetensors file.
    carrier
        Little-endian numpy type with the same bytes.
    """

    name: str
    tag: str
    carrier: np.dtype[np.generic]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.carrier.itemsize


def _table() -> dict[str, StoredType]:
    rows = [
        ("bool", "BOOL", "?"),
        *((f"{kind}{8 * width}", f"{kind[0].upper()}{8 * width}", f"<{kind[0]}{width}")
          for kind in ("int", "uint", "float") for width in (1, 2, 4, 8) if (kind, width) != ("float", 1)),
        ("bfloat16", "BF16", "<u2"),
        ("float8_e4m3fn", "F8_E4M3", "u1"),
        ("float8_e5m2", "F8_E5M2", "u1"),
    ]  # fmt: skip
    return {name: StoredType(name, tag, np.dtype(carrier)) for name, tag, carrier in rows}


BY_NAME = _table()
BY_TAG = {stored.tag: stored for stored in BY_NAME.values()}
WITHOUT_NUMPY = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
"""Names of the types that numpy itself lacks."""


@dataclass(frozen=True)
class Layout:
    """What must agree between a stored array and the place it is restored into.

    Parameters
    ----------
    dtype
        Name of the element type.
    shape
        Shape; for a typed PRNG key that of its key data.
    prng
        Implementation name of a JAX typed PRNG key, else ``None``.
    """

    dtype: str
    shape: tuple[int, ...]
    prng: str | None = None

    def __str__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "0-d"
        return f"{self.dtype} {shape}" + (f" ({self.prng} PRNG key)" if self.prng else "")


@dataclass(frozen=True)
class StoredArray:
    """An array as it lies in a shard.

    Parameters
    ----------
    layout
        Element type name, shape, PRNG implementation.
    data
        C-contiguous carrier array.
    """

    layout: Layout
    data: NDArray[np.generic]
