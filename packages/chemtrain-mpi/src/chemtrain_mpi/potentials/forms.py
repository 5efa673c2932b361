"""Pair energies φ as functions of the squared distance, one per family of the potential artefact.

Every form takes ``r2 > 0`` (the caller puts 1 where a neighbour slot is padding, never 0: a derivative at 0 is NaN and
would survive the mask) and its parameters broadcast against ``r2``. Formulas are those of the artefact's
specification. Distances and energies are in the caller's units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from chemtrain_mpi.errors import ArgumentError

Parameters = Mapping[str, jax.Array]


@dataclass(frozen=True)
class PairForm:
    """One family.

    Attributes
    ----------
    family
        Name in the artefact.
    parameters
        Names of the pair parameters, in the artefact's spelling.
    energy
        ``energy(r2, params) -> φ``, elementwise.
    tail_integral
        ``tail_integral(cutoff, params) -> ∫_cutoff^∞ φ(r) r² dr``, or ``None`` where there is no such form.
    """

    family: str
    parameters: tuple[str, ...]
    energy: Callable[[jax.Array, Parameters], jax.Array]
    tail_integral: Callable[[float, Parameters], jax.Array] | None


def lennard_jones(r2: jax.Array, params: Parameters) -> jax.Array:
    """Lennard-Jones: ``4ε[(σ/r)^12 − (σ/r)^6]``."""
    s6 = (params["sigma"] ** 2 / r2) ** 3
    return 4.0 * params["epsilon"] * (s6 * s6 - s6)


def mie(r2: jax.Array, params: Parameters) -> jax.Array:
    """Mie: ``C ε[(σ/r)^n − (σ/r)^m]`` with ``C = n/(n−m) (n/m)^{m/(n−m)}``."""
    n, m = params["n"], params["m"]
    log_ratio = jnp.log(params["sigma"]) - 0.5 * jnp.log(r2)
    return _mie_prefactor(params) * (jnp.exp(n * log_ratio) - jnp.exp(m * log_ratio))


def morse(r2: jax.Array, params: Parameters) -> jax.Array:
    """Morse: ``ε[(1 − e^{−α(r−r0)})² − 1]``."""
    decay = jnp.exp(-params["alpha"] * (jnp.sqrt(r2) - params["r0"]))
    return params["epsilon"] * (decay * decay - 2.0 * decay)


def _mie_prefactor(params: Parameters) -> jax.Array:
    n, m = params["n"], params["m"]
    return params["epsilon"] * n / (n - m) * (n / m) ** (m / (n - m))


def _lennard_jones_tail(cutoff: float, params: Parameters) -> jax.Array:
    sigma = params["sigma"]
    return 4.0 * params["epsilon"] * (sigma**12 / (9.0 * cutoff**9) - sigma**6 / (3.0 * cutoff**3))


def _mie_tail(cutoff: float, params: Parameters) -> jax.Array:
    n, m = params["n"], params["m"]
    ratio = params["sigma"] / cutoff
    return _mie_prefactor(params) * cutoff**3 * (ratio**n / (n - 3.0) - ratio**m / (m - 3.0))


def _morse_tail(cutoff: float, params: Parameters) -> jax.Array:
    def integral(rate: jax.Array) -> jax.Array:
        edge = jnp.exp(-rate * (cutoff - params["r0"]))
        return edge * (cutoff**2 / rate + 2.0 * cutoff / rate**2 + 2.0 / rate**3)

    return params["epsilon"] * (integral(2.0 * params["alpha"]) - 2.0 * integral(params["alpha"]))


ANALYTIC_FORMS = {
    form.family: form
    for form in (
        PairForm("lennard_jones", ("epsilon", "sigma"), lennard_jones, _lennard_jones_tail),
        PairForm("mie", ("epsilon", "sigma", "n", "m"), mie, _mie_tail),
        PairForm("morse", ("epsilon", "r0", "alpha"), morse, _morse_tail),
    )
}
"""Families whose pair energy is a closed formula. ``tabulated_pair`` lies in ``spline.py``."""

FAMILIES = (*ANALYTIC_FORMS, "tabulated_pair")


def check_family(family: str) -> None:
    """Refuse a family that this package has no form for.

    Raises
    ------
    ArgumentError
        Naming the known families.
    """
    if family not in FAMILIES:
        raise ArgumentError(f"there is no potential family {family!r} here; known: {', '.join(FAMILIES)}")
