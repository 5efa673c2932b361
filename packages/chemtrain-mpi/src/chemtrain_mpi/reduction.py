"""Mean of the state points' gradients over the global batch: bitwise independent of the ranks, or in one all-reduce.

``B`` state points a batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from chemtrain_mpi.collectives import Collectives

JIT_BYTES = 4 << 20
"""Buffers on an accelerator from this size are summed by mpi4jax inside jit, without a copy to the host."""


def ordered_mean(gradients: Sequence[Any]) -> Any:
    """Mean of ``B`` trees, added up one after the other in the order given; numpy arrays.

    Numpy's elementwise addition rounds the same way everywhere, so the mean depends on the order alone.
    """
    total = jax.tree.map(lambda leaf: np.array(leaf, copy=True), gradients[0])
    for gradient in gradients[1:]:
        total = jax.tree.map(lambda a, b: a + np.asarray(b), total, gradient)
    return jax.tree.map(lambda leaf: (leaf / leaf.dtype.type(len(gradients))).astype(leaf.dtype), total)


def flat_mean(comm: Collectives, mine: Sequence[Any], template: Any, batch: int) -> Any:
    """Mean over all ranks' trees by one all-reduce a dtype; the last bits depend on the number of ranks.

    Parameters
    ----------
    mine
        This rank's trees, possibly none.
    template
        A tree of the same structure.
    batch
        ``B``, the global batch size.
    """
    leaves, structure = jax.tree.flatten(template)
    local = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    for tree in mine:
        local = [total + np.asarray(leaf) for total, leaf in zip(local, jax.tree.leaves(tree), strict=True)]
    result: list[Any] = list(local)
    for dtype in sorted({leaf.dtype for leaf in local}, key=str):
        members = [i for i, leaf in enumerate(local) if leaf.dtype == dtype]
        flat = np.concatenate([local[i].reshape(-1) for i in members])
        total = _sum(comm, flat) / dtype.type(batch)
        parts = np.split(total, np.cumsum([local[i].size for i in members])[:-1])
        for i, part in zip(members, parts, strict=True):
            result[i] = part.reshape(local[i].shape).astype(dtype)
    return jax.tree.unflatten(structure, result)


def _sum(comm: Collectives, flat: np.ndarray) -> np.ndarray:
    if comm.size > 1 and flat.nbytes >= JIT_BYTES and jax.default_backend() != "cpu" and comm.mpi is not None:
        # By name: importing it initialises MPI.
        jit_sum = importlib.import_module("chemtrain_mpi.jit_collectives").jit_sum
        return np.asarray(jit_sum(comm.mpi, flat))
    return comm.sum(flat)


def global_norm(tree: Any) -> float:
    """Euclidean norm of all entries."""
    return float(np.sqrt(sum(float(np.sum(np.square(np.asarray(leaf, np.float64)))) for leaf in jax.tree.leaves(tree))))


def all_finite(tree: Any) -> bool:
    """Whether every floating point entry of every leaf is finite."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return all(bool(np.all(np.isfinite(a))) for a in arrays if jax.numpy.issubdtype(a.dtype, np.inexact))
