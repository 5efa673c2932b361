"""Applying one program to many state points: one after the other, or stacked in one vectorised call.

``B`` items a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

Item = tuple[Any, ...]


class OneByOne:
    """Runs the compiled program once an item; the bits of a result do not depend on the other items.

    Parameters
    ----------
    program
        ``program(shared, *item)``, traced.
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        self._program = jax.jit(program)

    def __call__(self, shared: Any, items: Sequence[Item]) -> list[Any]:
        """Results in the order of the items."""
        # Each before the next: their temporary memory must not add up.
        return [jax.block_until_ready(self._program(shared, *item)) for item in items]


class Together:
    """Runs the program on all items of one shape at once.

    The number of items is filled up to a power of two with copies of the last one, so that programs are few: at most
    ``1 + log2 B`` for each shape. The last bits of a result depend on the items beside it.

    Parameters
    ----------
    program
        ``program(shared, *item)``, traced; it must be free of side effects.
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        def stacked(shared: Any, items: Sequence[Item]) -> list[Any]:
            together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *items)
            results = jax.vmap(lambda item: program(shared, *item))(together)
            return [jax.tree.map(itemgetter(i), results) for i in range(len(items))]

        self._stacked = jax.jit(stacked)

    def __call__(self, shared: Any, items: Sequence[Item]) -> list[Any]:
        """Results in the order of the items."""
        groups: dict[Any, list[int]] = {}
        for i, item in enumerate(items):
            groups.setdefault(_shape(item), []).append(i)
        results: dict[int, Any] = {}
        for members in groups.values():
            wanted = 1 << (len(members) - 1).bit_length()
            filled = [items[i] for i in members] + [items[members[-1]]] * (wanted - len(members))
            results |= dict(zip(members, self._stacked(shared, filled), strict=False))
        return [results[i] for i in range(len(items))]


def _shape(item: Item) -> Any:
    leaves, structure = jax.tree.flatten(item)
    return structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
