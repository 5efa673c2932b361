"""State-point axes: finding ``K``, taking one state point out of a pytree, and comparing arguments between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chemtrain_mpi.errors import ArgumentError
from distmd_protocol import AgreementError, Comm


def count_state_points(targets: Mapping[str, Mapping[str, Any]]) -> int:
    """``K``, from the leading axes of the targets.

    Raises
    ------
    ArgumentError
        If there is no target, a target lacks ``target`` or ``gamma``, or the leading axes differ.
    """
    if not targets:
        raise ArgumentError("targets is empty; give at least one {'target': (K, …), 'gamma': (K,)}")
    counts: dict[str, int] = {}
    for name, target in targets.items():
        extra = set(target) ^ {"target", "gamma"}
        if extra:
            raise ArgumentError(f"targets[{name!r}] must have exactly 'target' and 'gamma'; differs in {sorted(extra)}")
        for part in ("target", "gamma"):
            shape = np.shape(target[part])
            if shape:
                counts[f"targets[{name!r}][{part!r}]"] = shape[0]
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items()) or "only scalars"
        raise ArgumentError(f"the targets do not agree on the number of state points ({listed})")
    return next(iter(counts.values()))


def strong(tree: Any) -> Any:
    """Every leaf as an array with a type of its own: a weakly typed scalar would compile each program twice."""

    def convert(leaf: Any) -> jax.Array:
        array = jnp.asarray(leaf)
        return jax.lax.convert_element_type(array, array.dtype)

    return jax.tree.map(convert, tree)


def lead_with_points(name: str, tree: Any, points: int) -> Any:
    """Turn every leaf into an array that leads with the state-point axis; scalars are broadcast.

    Raises
    ------
    ArgumentError
        Naming the leaf that leads with something else.
    """

    def lead(path: Any, leaf: Any) -> jax.Array:
        array = jnp.asarray(leaf)
        if array.ndim == 0:
            return jnp.broadcast_to(array, (points,))
        if array.shape[0] != points:
            raise ArgumentError(
                f"{name}{jax.tree_util.keystr(path)} has shape {array.shape}; its first axis must be the {points} "
                "state points"
            )
        return array

    return jax.tree_util.tree_map_with_path(lead, strong(tree))


def take(tree: Any, point: int) -> Any:
    """One state point of a tree whose leaves lead with the state-point axis."""
    return jax.tree.map(lambda leaf: leaf[point], tree)


def digest(tree: Any) -> str:
    """Hash of a pytree: structure, dtypes, shapes and every bit of every array."""
    leaves, structure = jax.tree.flatten(tree)
    total = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, str | bool | None):
            total.update(repr(leaf).encode())
            continue
        array = np.asarray(leaf)
        total.update(f"{array.dtype.str}{array.shape}".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def check_agreement(comm: Comm, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Stop all ranks if they were given different arguments; else return the digest of each. Collective.

    Raises
    ------
    AgreementError
        On every rank, naming each argument that differs and the ranks that differ from rank zero.
    """
    own = {name: digest(value) for name, value in arguments.items()}
    every = comm.allgather(own)
    differing = {
        name: [rank for rank, digests in enumerate(every) if digests[name] != every[0][name]] for name in every[0]
    }
    lines = [f"{name} (ranks {', '.join(map(str, ranks))})" for name, ranks in differing.items() if ranks]
    if lines:
        raise AgreementError(
            f"these arguments differ from rank 0's: {'; '.join(lines)}; every rank must construct the trainer with "
            "the same data"
        )
    return own
