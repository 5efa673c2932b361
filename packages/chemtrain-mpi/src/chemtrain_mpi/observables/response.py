"""Response functions of the whole system, from fluctuations of energy and volume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.observables.averages import Observable, fluctuation, weighted_mean


def heat_capacity(energy: str, particles: int, *, ideal: float = 1.5) -> Observable:
    """Isochoric heat capacity a particle over ``k_B``: ``var(U) / (N kT²) + ideal``, NVT.

    Parameters
    ----------
    energy
        Name of the total potential energy.
    particles
        ``N``.
    ideal
        Kinetic share, 3/2 for atoms.
    """
    variance = fluctuation(energy)

    def capacity(trajectories: Mapping[str, jax.Array], weights: jax.Array, *, kT: jax.Array, **_: Any) -> jax.Array:
        return variance(trajectories, weights) / (particles * kT**2) + ideal

    return capacity


def compressibility(volume: str) -> Observable:
    """Isothermal compressibility ``var(V) / (⟨V⟩ kT)``, NPT."""
    variance = fluctuation(volume)

    def kappa(trajectories: Mapping[str, jax.Array], weights: jax.Array, *, kT: jax.Array, **_: Any) -> jax.Array:
        return variance(trajectories, weights) / (weighted_mean(trajectories[volume], weights) * kT)

    return kappa


def thermal_expansion(energy: str, volume: str) -> Observable:
    """Thermal expansion ``(1/V) ∂V/∂T`` over ``k_B``, an inverse energy: ``cov(V, U + PV) / (⟨V⟩ kT²)``, NPT.

    Source: Allen and Tildesley, Computer Simulation of Liquids, sect. 2.5. Times ``k_B`` it is an inverse temperature.

    Parameters
    ----------
    energy, volume
        Names of the total potential energy and of the volume.
    """

    def expansion(
        trajectories: Mapping[str, jax.Array],
        weights: jax.Array,
        *,
        kT: jax.Array,
        pressure: jax.Array | None = None,
        **_: Any,
    ) -> jax.Array:
        if pressure is None:
            raise ArgumentError("thermal expansion needs an NPT trajectory: give state_kwargs a 'pressure'")
        size = trajectories[volume]
        enthalpy = trajectories[energy] + pressure * size
        mean = weighted_mean(size, weights)
        covariance = weighted_mean((size - mean) * (enthalpy - weighted_mean(enthalpy, weights)), weights)
        return covariance / (mean * kT**2)

    return expansion
