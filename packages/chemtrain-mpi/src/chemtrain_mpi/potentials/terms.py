"""From named parameters to an elementwise pair energy: pair types, truncation and the long-range tail.

``S`` is the number of species, ``P = S·S`` the number of ordered pair types, ``D`` any shape of distances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials import spline
from chemtrain_mpi.potentials.forms import ANALYTIC_FORMS, check_family

Coefficients = dict[str, jax.Array]
Fractions = Sequence[float] | np.ndarray
SMOOTHINGS = ("none", "shift")


@dataclass(frozen=True)
class PairTerms:
    """A family with its truncation. Hashable, so that it can be a static argument.

    Attributes
    ----------
    family
        ``lennard_jones``, ``mie``, ``morse`` or ``tabulated_pair``.
    cutoff
        Pairs at or beyond it do not interact.
    smoothing
        ``"none"`` (plain truncation) or ``"shift"`` (energy moved to zero at the cutoff; the same forces).
    """

    family: str
    cutoff: float
    smoothing: str = "none"

    def __post_init__(self) -> None:
        check_family(self.family)
        if not (np.isfinite(self.cutoff) and self.cutoff > 0):
            raise ArgumentError(f"the cutoff is {self.cutoff}; it must be positive and finite")
        if self.smoothing not in SMOOTHINGS:
            raise ArgumentError(f"smoothing is {self.smoothing!r}; use one of {', '.join(SMOOTHINGS)}")

    def prepare(self, params: Mapping[str, jax.Array]) -> Coefficients:
        """Turn parameters, each a scalar or ``(S, S)``, into flat tables by pair type.

        For ``tabulated_pair``: ``r`` ``(M,)`` and ``energy`` ``(M,)`` or ``(S, S, M)``. Differentiable.

        Raises
        ------
        ArgumentError
            Naming missing and unknown parameters, and for knots that are not a table up to the cutoff. Traced knots
            cannot be refused: where they are none, every energy is NaN.
        """
        wanted = ("r", "energy") if self.family == "tabulated_pair" else ANALYTIC_FORMS[self.family].parameters
        missing = [name for name in wanted if name not in params]
        unknown = [name for name in params if name not in wanted]
        if missing or unknown:
            raise ArgumentError(
                f"{self.family} takes the parameters {', '.join(wanted)}; missing: {', '.join(missing) or 'none'}, "
                f"unknown: {', '.join(unknown) or 'none'}"
            )
        if self.family == "tabulated_pair":
            # Before jnp.asarray, which inside a traced function hides the values of any NumPy array.
            traced = isinstance(params["r"], jax.core.Tracer)
            if not traced:
                spline.check_knots(np.asarray(params["r"]), self.cutoff)
            knots, energy = jnp.asarray(params["r"]), jnp.asarray(params["energy"])
            if traced:
                energy = jnp.where(spline.sensible(knots, self.cutoff), energy, jnp.nan)
            energy = energy.reshape(-1, knots.shape[0])
            coefficients = {"r": knots, "energy": energy, "curvature": spline.second_derivatives(knots, energy)}
            kinds = jnp.arange(energy.shape[0])
        else:
            coefficients = {name: jnp.asarray(params[name]).reshape(-1) for name in wanted}
            coefficients = dict(zip(wanted, jnp.broadcast_arrays(*coefficients.values()), strict=True))
            kinds = jnp.arange(coefficients[wanted[0]].shape[0])
        if self.smoothing == "shift":
            edge = jnp.full(kinds.shape, self.cutoff**2, dtype=coefficients[wanted[-1]].dtype)
            coefficients["shift"] = self._bare(edge, coefficients, kinds)
        return coefficients

    def energy(self, r2: jax.Array, coefficients: Coefficients, kind: jax.Array | int) -> jax.Array:
        """φ(r) less the shift, elementwise, with no regard to the cutoff. ``r2`` must be positive everywhere."""
        value = self._bare(r2, coefficients, kind)
        return value - coefficients["shift"][kind] if self.smoothing == "shift" else value

    def slope(self, r2: jax.Array, coefficients: Coefficients, kind: jax.Array | int) -> jax.Array:
        """dφ/d(r²), elementwise: the force on ``i`` is ``−2 dφ/d(r²) (r_i − r_j)``, with no square root of ours."""
        return jax.jvp(lambda s: self._bare(s, coefficients, kind), (r2,), (jnp.ones_like(r2),))[1]

    def _bare(self, r2: jax.Array, coefficients: Coefficients, kind: jax.Array | int) -> jax.Array:
        if self.family == "tabulated_pair":
            c = coefficients
            return spline.evaluate(jnp.sqrt(r2), c["r"], c["energy"], c["curvature"], kind)
        form = ANALYTIC_FORMS[self.family]
        return form.energy(r2, {name: coefficients[name][kind] for name in form.parameters})


def tail_energy(
    terms: PairTerms, params: Mapping[str, jax.Array], density: jax.Array | float, fractions: Fractions = (1.0,)
) -> jax.Array:
    """Energy a particle beyond the cutoff for ``g(r) = 1``: ``2πρ Σ x_a x_b ∫_rc^∞ φ_ab r² dr``.

    With ``smoothing="shift"`` the mean-field give-back of the shift, ``2πρ Σ x_a x_b φ_ab(rc) rc³/3``, is added.
    Source: Allen and Tildesley, Computer Simulation of Liquids, eq. 2.144.

    Parameters
    ----------
    density
        Particles a volume.
    fractions
        Mole fractions ``(S,)``.

    Raises
    ------
    ArgumentError
        For ``tabulated_pair``, which says nothing about what lies beyond its cutoff.
    """
    coefficients, integral, pairs = _tail(terms, params, fractions)
    if terms.smoothing == "shift":
        integral = integral + coefficients["shift"] * terms.cutoff**3 / 3.0
    return 2.0 * jnp.pi * density * jnp.sum(pairs * integral)


def tail_pressure(
    terms: PairTerms, params: Mapping[str, jax.Array], density: jax.Array | float, fractions: Fractions = (1.0,)
) -> jax.Array:
    """Pressure from beyond the cutoff: ``−(2/3)πρ² Σ x_a x_b ∫_rc^∞ φ'_ab r³ dr``.

    The forces do not know of a shift, so ``smoothing`` plays no part. By parts, ``∫φ' r³ = −φ(rc)rc³ − 3∫φ r²``.

    Raises
    ------
    ArgumentError
        For ``tabulated_pair``.
    """
    coefficients, integral, pairs = _tail(terms, params, fractions)
    kinds = jnp.arange(integral.shape[0])
    edge = jnp.full(integral.shape, terms.cutoff**2, dtype=integral.dtype)
    bare = PairTerms(terms.family, terms.cutoff).energy(edge, coefficients, kinds)
    by_parts = -bare * terms.cutoff**3 - 3.0 * integral
    return -2.0 / 3.0 * jnp.pi * density**2 * jnp.sum(pairs * by_parts)


def _tail(
    terms: PairTerms, params: Mapping[str, jax.Array], fractions: Fractions
) -> tuple[Coefficients, jax.Array, jax.Array]:
    form = ANALYTIC_FORMS.get(terms.family)
    if form is None or form.tail_integral is None:
        raise ArgumentError(
            f"{terms.family} has no tail correction: its energy beyond the cutoff is unknown; leave the tail off"
        )
    coefficients = terms.prepare(params)
    x = jnp.asarray(fractions)
    pairs = jnp.outer(x, x).reshape(-1)
    integral = form.tail_integral(terms.cutoff, {name: coefficients[name] for name in form.parameters})
    if pairs.shape != integral.shape:
        raise ArgumentError(f"{x.size} mole fractions do not fit parameters for {integral.size} ordered pair types")
    return coefficients, integral, pairs
