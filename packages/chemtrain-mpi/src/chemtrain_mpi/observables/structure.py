"""Distributions of what ``quantities`` count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from chemtrain_mpi.observables.averages import Observable, weighted_mean


def normalized_histogram(quantity: str, edges: Sequence[float]) -> Observable:
    """Probability density ``(B,)`` of a histogram, of integral one over the edges.

    Counts are averaged before they are divided: snapshots with more of what is counted weigh more.

    Parameters
    ----------
    quantity
        Name of a histogram ``(B,)``, such as ``quantities.angular_distribution``.
    edges
        Its bin edges ``(B + 1,)``.
    """
    widths = jnp.diff(jnp.asarray(edges))

    def density(trajectories: Mapping[str, jax.Array], weights: jax.Array, **_: Any) -> jax.Array:
        counts = weighted_mean(trajectories[quantity], weights)
        return counts / (jnp.sum(counts) * widths)

    return density
