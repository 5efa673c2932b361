r"""Elastic constants at constant volume, from the fluctuation of the stress.

    C_IJ = ⟨C^B_IJ⟩ − (V/kT) (⟨σ^B_I σ^B_J⟩ − ⟨σ^B_I⟩⟨σ^B_J⟩) + (N kT / V) K_IJ,   K = diag(2, 2, 2, 1, 1, 1),

the isothermal second derivatives of the free energy a volume with respect to the Lagrangian strain: the affine (Born)
response, the relaxation that fluctuations measure, and the kinetic term. Source: Squire, Holt and Hoover, Physica 42,
388 (1969); Lutsko, J. Appl. Phys. 65, 2991 (1989). Under a stress these differ from the stress–strain
coefficients by terms of its size. Voigt order ``xx, yy, zz, yz, xz, xy``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from chemtrain_mpi.boxes import box_volume
from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.observables.averages import Observable, weighted_mean

KINETIC = (2.0, 2.0, 2.0, 1.0, 1.0, 1.0)


def mean_stress(stress: str, particles: int) -> Observable:
    """Stress ``⟨σ^B⟩ − N kT/V`` (on the diagonal), ``(6,)``, positive under tension: minus the pressure tensor.

    Parameters
    ----------
    stress
        Name of ``quantities.born_stress``.
    particles
        ``N``.
    """

    def total(trajectories: Mapping[str, jax.Array], weights: jax.Array, **kwargs: Any) -> jax.Array:
        thermal = particles * kwargs["kT"] / _volume(kwargs)
        return weighted_mean(trajectories[stress], weights) - thermal * jnp.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])

    return total


def stress_fluctuation(stress: str) -> Observable:
    """What fluctuations take off the Born term, ``(V/kT) cov(σ^B, σ^B)``, ``(6, 6)``.

    Parameters
    ----------
    stress
        Name of ``quantities.born_stress``.
    """

    def term(trajectories: Mapping[str, jax.Array], weights: jax.Array, **kwargs: Any) -> jax.Array:
        spread = trajectories[stress] - weighted_mean(trajectories[stress], weights)
        covariance = jnp.einsum("t,ti,tj->ij", weights, spread, spread)
        return _volume(kwargs) / kwargs["kT"] * covariance

    return term


def elastic_constants(stress: str, stiffness: str, particles: int) -> Observable:
    """Isothermal elastic constants ``C_IJ``, ``(6, 6)``, NVT, energy unit over volume unit.

    Parameters
    ----------
    stress, stiffness
        Names of ``quantities.born_stress`` and ``quantities.born_stiffness``.
    particles
        ``N``.
    """
    fluctuation = stress_fluctuation(stress)

    def constants(trajectories: Mapping[str, jax.Array], weights: jax.Array, **kwargs: Any) -> jax.Array:
        kinetic = particles * kwargs["kT"] / _volume(kwargs) * jnp.diag(jnp.array(KINETIC))
        return weighted_mean(trajectories[stiffness], weights) - fluctuation(trajectories, weights, **kwargs) + kinetic

    return constants


def cubic(tensor: Observable) -> Observable:
    """``C11``, ``C12`` and ``C44`` ``(3,)`` of a ``(6, 6)`` observable: means over what cubic symmetry makes equal."""
    return _of(tensor, cubic_means)


def cubic_means(matrix: jax.Array) -> jax.Array:
    """Means over the entries of a ``(6, 6)`` matrix that cubic symmetry makes equal: 11, 12 and 44, ``(3,)``."""
    diagonal = jnp.diag(matrix)
    upper = matrix[:3, :3]
    off = (jnp.sum(upper) - jnp.trace(upper)) / 6.0
    return jnp.stack([jnp.mean(diagonal[:3]), off, jnp.mean(diagonal[3:])])


def _of(observable: Observable, fn: Callable[[jax.Array], jax.Array]) -> Observable:
    def composed(trajectories: Mapping[str, jax.Array], weights: jax.Array, **kwargs: Any) -> jax.Array:
        return fn(observable(trajectories, weights, **kwargs))

    return composed


def _volume(kwargs: Mapping[str, Any]) -> jax.Array:
    if "pressure" in kwargs:
        raise ArgumentError("these fluctuations belong to a fixed box; sample without a barostat")
    if "box" not in kwargs:
        raise ArgumentError("elastic constants need the box: give state_kwargs a 'box'")
    return box_volume(kwargs["box"])
