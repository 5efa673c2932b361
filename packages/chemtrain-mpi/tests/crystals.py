"""Crystals, lists for them, and the exact thermal motion of a harmonic one."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax_md import partition, space

FCC = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
DIAMOND = np.concatenate([FCC, FCC + 0.25])


def crystal(basis: np.ndarray, cells: int) -> np.ndarray:
    """Fractional positions of ``cells³`` cubic cells, off the faces of the box."""
    corners = np.stack(np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"), axis=-1).reshape(-1, 1, 3)
    return (corners + basis + 0.1).reshape(-1, 3) / cells


def neighbors(position: jax.Array, edge: float, reach: float, spare: int = 0) -> partition.NeighborList:
    """A dense list, with ``spare`` slots of padding more than needed."""
    displacement, _ = space.periodic_general(edge, fractional_coordinates=True)
    lists = partition.neighbor_list(
        displacement, jnp.asarray(edge), reach, 0.0, 1.0, fractional_coordinates=True, disable_cell_list=True
    )
    return lists.allocate(position, extra_capacity=spare, box=jnp.asarray(edge))


def harmonic_sample(energy, position: jax.Array, edge: float, kT: float, count: int, seed: int = 0) -> np.ndarray:
    """Positions ``(count, N, 3)`` drawn from the Boltzmann distribution of the energy's second-order expansion.

    ``energy`` is a function of fractional positions. The three translations stay at rest.
    """
    flat = jnp.zeros(position.size)
    hessian = np.asarray(jax.jit(jax.hessian(lambda u: energy_at(energy, position, u, edge)))(flat))
    values, vectors = np.linalg.eigh(hessian)
    assert values[3] > 1e-3 * values[-1], "the crystal must be stable"
    amplitudes = np.sqrt(kT / values[3:]) * np.random.default_rng(seed).normal(size=(count, len(values) - 3))
    moved = (amplitudes @ vectors[:, 3:].T).reshape(count, *position.shape)
    return np.asarray(position) + moved / edge


def energy_at(energy, position, displacement, edge):
    """Energy after Cartesian displacements, differentiable in the ordinary sense.

    jax-md takes the tangent of a fractional position for a Cartesian one, so a tangent must not be divided by the edge.
    """

    @jax.custom_jvp
    def move(u):
        return position + u.reshape(position.shape) / edge

    move.defjvp(lambda primals, tangents: (move(*primals), tangents[0].reshape(position.shape)))
    return energy(move(displacement))


def snapshot(position) -> SimpleNamespace:
    """A state with positions and nothing else."""
    return SimpleNamespace(position=jnp.asarray(position))
