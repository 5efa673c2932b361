"""Instantaneous quantities: ``quantity(state, neighbor=…, energy_params=…, **state_kwargs)`` of one snapshot.

Each function here returns such a quantity. ``N`` particles, box of volume ``V``. Units are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax_md import partition

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials.neighbors import pair_virial
from chemtrain_mpi.potentials.terms import PairTerms, tail_energy, tail_pressure
from chemtrain_mpi.trajectories import energy_kwargs

Quantity = Callable[..., jax.Array]


def box_volume(box: jax.Array | float) -> jax.Array:
    """Volume of a box given as an edge, three edges or a matrix."""
    box = jnp.asarray(box)
    return jnp.abs(jnp.linalg.det(box)) if box.ndim == 2 else jnp.prod(jnp.broadcast_to(box, (3,)))


def _box(state: Any, kwargs: dict[str, Any]) -> jax.Array:
    box = energy_kwargs(state, kwargs).get("box")
    if box is None:
        raise ArgumentError("this quantity needs the box: give state_kwargs a 'box', or use an NPT simulator")
    return box


def potential_energy(energy_fn_template: Callable[[Any], Callable[..., jax.Array]]) -> Quantity:
    """Potential energy ``U`` under the trained parameters."""

    def energy(state: Any, *, neighbor: partition.NeighborList, energy_params: Any, **kwargs: Any) -> jax.Array:
        return energy_fn_template(energy_params)(state.position, neighbor=neighbor, **energy_kwargs(state, kwargs))

    return energy


def pair_energy_per_particle(
    terms: PairTerms,
    energy_fn_template: Callable[[Any], Callable[..., jax.Array]],
    to_parameters: Callable[[Any], Any] = lambda params: params,
    *,
    tail: bool = True,
    fractions: Sequence[float] = (1.0,),
) -> Quantity:
    """Energy a particle, tail included.

    Parameters
    ----------
    terms
        The truncation to report, usually ``smoothing="none"``.
    energy_fn_template
        Of the same truncation; it takes what ``to_parameters`` returns.
    to_parameters
        From trained parameters to those of the family.
    tail
        Add the analytic ``g(r) = 1`` tail.
    fractions
        Mole fractions, for the tail.
    """

    def energy(state: Any, *, neighbor: partition.NeighborList, energy_params: Any, **kwargs: Any) -> jax.Array:
        params = to_parameters(energy_params)
        call = energy_kwargs(state, kwargs)
        n = state.position.shape[0]
        mean = energy_fn_template(params)(state.position, neighbor=neighbor, **call) / n
        if not tail:
            return mean
        return mean + tail_energy(terms, params, n / box_volume(_box(state, kwargs)), fractions)

    return energy


def pair_pressure(
    terms: PairTerms,
    to_parameters: Callable[[Any], Any] = lambda params: params,
    *,
    tail: bool = True,
    fractions: Sequence[float] = (1.0,),
    species: Sequence[int] | None = None,
    fractional: bool = True,
    kinetic: str = "target",
) -> Quantity:
    """Pressure of a pair potential, ``(N kT + tr Ξ / 3) / V`` and the tail.

    Parameters
    ----------
    kinetic
        ``"target"``: ``N kT`` from the state keyword, free of noise and of the integrator's kinetic error;
        ``"momenta"``: twice the kinetic energy over 3.
    """
    if kinetic not in ("target", "momenta"):
        raise ArgumentError(f"kinetic is {kinetic!r}; use 'target' or 'momenta'")

    def pressure(state: Any, *, neighbor: partition.NeighborList, energy_params: Any, **kwargs: Any) -> jax.Array:
        params = to_parameters(energy_params)
        box = _box(state, kwargs)
        n, volume = state.position.shape[0], box_volume(box)
        virial = pair_virial(
            terms, params, state.position, neighbor, box, fractional=fractional, species=species
        )
        thermal = n * kwargs["kT"] if kinetic == "target" else jnp.sum(state.momentum**2 / state.mass) / 3.0
        total = (thermal + jnp.trace(virial) / 3.0) / volume
        return total + tail_pressure(terms, params, n / volume, fractions) if tail else total

    return pressure


def virial_pressure(
    energy_fn_template: Callable[[Any], Callable[..., jax.Array]],
) -> Quantity:
    """Pressure ``N kT / V − dU/dV`` of any energy function on fractional coordinates, by differentiating the box.

    The energy function must use its ``box`` keyword. No tail.
    """

    def pressure(state: Any, *, neighbor: partition.NeighborList, energy_params: Any, **kwargs: Any) -> jax.Array:
        energy_fn = energy_fn_template(energy_params)
        call = energy_kwargs(state, kwargs)
        box = _box(state, kwargs)

        def strained(scale: jax.Array) -> jax.Array:
            return energy_fn(state.position, neighbor=neighbor, **{**call, "box": jnp.asarray(box) * scale})

        # dV = 3V ds at s = 1.
        slope = jax.grad(strained)(jnp.ones((), state.position.dtype))
        volume = box_volume(box)
        return state.position.shape[0] * kwargs["kT"] / volume - slope / (3.0 * volume)

    return pressure


def density() -> Quantity:
    """Number density ``N / V``."""

    def number_density(state: Any, **kwargs: Any) -> jax.Array:
        return state.position.shape[0] / box_volume(_box(state, kwargs))

    return number_density


def volume() -> Quantity:
    """Volume ``V``."""

    def box_size(state: Any, **kwargs: Any) -> jax.Array:
        return box_volume(_box(state, kwargs))

    return box_size


def radial_distribution(edges: Sequence[float]) -> Quantity:
    """Radial distribution function ``g(r)`` of one snapshot, all pairs, fractional coordinates.

    ``g`` of a shell is its pair count over that of an ideal gas of ``N − 1`` others in ``V``. The last edge must not
    exceed half the smallest distance between opposite faces.

    Parameters
    ----------
    edges
        Shell edges ``(B + 1,)``, increasing.

    Returns
    -------
    A quantity of shape ``(B,)``.
    """
    radii = jnp.asarray(edges)
    if radii.ndim != 1 or radii.size < 2 or bool(jnp.any(jnp.diff(radii) <= 0)):
        raise ArgumentError("edges must be at least two increasing radii")

    def rdf(state: Any, **kwargs: Any) -> jax.Array:
        box = jnp.asarray(_box(state, kwargs))
        position = state.position
        n = position.shape[0]
        raw = position[:, None, :] - position[None, :, :]
        raw = raw - jnp.round(raw)
        d = raw @ box.T if box.ndim == 2 else raw * box
        r2 = jnp.where(jnp.eye(n, dtype=bool), jnp.inf, jnp.sum(d * d, axis=-1))
        below = jnp.stack([jnp.sum(r2 < r * r) for r in radii]).astype(position.dtype)
        shells = 4.0 / 3.0 * jnp.pi * jnp.diff(radii**3)
        ideal = n * (n - 1) / box_volume(box) * shells
        return jnp.diff(below) / ideal

    return rdf
