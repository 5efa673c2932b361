r"""Derivatives of the energy with respect to a homogeneous strain of all positions.

The box ``h`` becomes ``F h`` with ``F = (1 + 2η)^½``, ``η`` the Lagrangian strain, and fractional positions stay. Voigt
order ``xx, yy, zz, yz, xz, xy``; a shear component is ``2 η_ab``, so that derivatives are components of the stress.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax_md import partition

from chemtrain_mpi.boxes import box_matrix, box_volume
from chemtrain_mpi.quantities.box import Quantity, snapshot_box
from chemtrain_mpi.trajectories import energy_kwargs


def deformation(strain: jax.Array) -> jax.Array:
    """``F`` of a Voigt strain ``(6,)``, exact to second order: its derivatives at zero strain are wanted, no others."""
    xx, yy, zz, yz, xz, xy = strain
    eta = 0.5 * jnp.array([[2 * xx, xy, xz], [xy, 2 * yy, yz], [xz, yz, 2 * zz]])
    return jnp.eye(3, dtype=strain.dtype) + eta - 0.5 * eta @ eta


def born_stress(energy_fn_template: Callable[[Any], Callable[..., jax.Array]]) -> Quantity:
    """Configurational stress ``(1/V) ∂U/∂η``, ``(6,)``, positive under tension; the kinetic part is not in it.

    The energy function must take fractional positions and use its ``box`` keyword, a matrix here.
    """

    def stress(state: Any, *, neighbor: partition.NeighborList, energy_params: Any, **kwargs: Any) -> jax.Array:
        energy, unstrained, volume = _strained(energy_fn_template(energy_params), state, neighbor, kwargs)
        return jax.grad(energy)(unstrained) / volume

    return stress


def born_stiffness(energy_fn_template: Callable[[Any], Callable[..., jax.Array]]) -> Quantity:
    """Born term ``(1/V) ∂²U/∂η∂η`` of the elastic constants, ``(6, 6)``: the response to an affine strain.

    The energy function as for ``born_stress``. Costs about as much as twenty energies.
    """

    def stiffness(state: Any, *, neighbor: partition.NeighborList, energy_params: Any, **kwargs: Any) -> jax.Array:
        energy, unstrained, volume = _strained(energy_fn_template(energy_params), state, neighbor, kwargs)
        return jax.jacfwd(jax.grad(energy))(unstrained) / volume

    return stiffness


def _strained(
    energy_fn: Callable[..., jax.Array], state: Any, neighbor: partition.NeighborList, kwargs: dict[str, Any]
) -> tuple[Callable[[jax.Array], jax.Array], jax.Array, jax.Array]:
    call = energy_kwargs(state, kwargs)
    box = box_matrix(snapshot_box(state, kwargs)).astype(state.position.dtype)

    def energy(strain: jax.Array) -> jax.Array:
        return energy_fn(state.position, neighbor=neighbor, **{**call, "box": deformation(strain) @ box})

    return energy, jnp.zeros(6, state.position.dtype), box_volume(box)
