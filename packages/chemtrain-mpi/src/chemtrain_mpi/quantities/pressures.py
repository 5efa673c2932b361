"""Pressures of a snapshot. ``N`` particles, box of volume ``V``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax_md import partition

from chemtrain_mpi.boxes import box_volume
from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials.neighbors import pair_virial
from chemtrain_mpi.potentials.terms import PairTerms, tail_pressure
from chemtrain_mpi.quantities.box import Quantity, snapshot_box
from chemtrain_mpi.trajectories import energy_kwargs


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
        box = snapshot_box(state, kwargs)
        n, volume = state.position.shape[0], box_volume(box)
        virial = pair_virial(terms, params, state.position, neighbor, box, fractional=fractional, species=species)
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
        box = snapshot_box(state, kwargs)

        def strained(scale: jax.Array) -> jax.Array:
            return energy_fn(state.position, neighbor=neighbor, **{**call, "box": jnp.asarray(box) * scale})

        # dV = 3V ds at s = 1.
        slope = jax.grad(strained)(jnp.ones((), state.position.dtype))
        volume = box_volume(box)
        return state.position.shape[0] * kwargs["kT"] / volume - slope / (3.0 * volume)

    return pressure
