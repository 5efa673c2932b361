r"""A learned correction: jax-md's Behler–Parrinello network on symmetry functions taken by moments.

The network is ``jax_md.energy.BehlerParrinelloEnergy``: one multilayer perceptron for the energy of every atom. Its
inputs are symmetry functions of Behler, J. Chem. Phys. 134, 074106 (2011): the radial ``Σ_j e^{−η r²} f_c(r)`` (G2) and
the angular ``2^{1−ζ} Σ_{j≠k} (1 ± cos θ)^ζ e^{−η (r_j² + r_k²)} f_c(r_j) f_c(r_k)`` with ``ζ = 1, 2`` (G5, here over
ordered pairs), with ``f_c(r) = ½ (1 + cos(π r/r_c))``. jax-md's own angular functions (G4) take triplets, at ten times
the cost, and their gradients by position need every triplet's three sides.

``N`` atoms, ``M`` neighbour slots an atom, ``F`` symmetry functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx  # type: ignore[import-not-found]
from jax_md import energy as jax_md_energy
from jax_md import partition

from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.potentials.geometry import Box, check_dense, pair_displacements, strained_box
from chemtrain_mpi.potentials.moments import cosine_moments

PER_ETA = 5
"""Symmetry functions a width: one radial, and angular ones of two signs and two exponents."""


def symmetry_functions(
    cutoff: float, etas: Sequence[float], *, box: Box | None = None, fractional: bool = True
) -> Callable[..., jax.Array]:
    """Symmetry functions of every atom.

    Parameters
    ----------
    cutoff
        Length beyond which an atom does not see others.
    etas
        Widths ``η``, inverse squared lengths.
    box, fractional
        As in ``pair_energy_template``.

    Returns
    -------
    ``fn(position, neighbor, box=…, perturbation=…, **ignored) -> (N, F)``, ``F`` five times the number of widths.
    """
    if not (np.isfinite(cutoff) and cutoff > 0):
        raise ArgumentError(f"the cutoff is {cutoff}; it must be positive and finite")
    if not etas or min(etas) < 0:
        raise ArgumentError(f"etas are {list(etas)}; give at least one, none negative")

    def features(
        position: jax.Array,
        neighbor: partition.NeighborList,
        box: Box | None = box,
        perturbation: jax.Array | float | None = None,
        **_: Any,
    ) -> jax.Array:
        check_dense(neighbor, box)
        edges = strained_box(jnp.asarray(box, position.dtype), perturbation)
        d, r2, mask = pair_displacements(cutoff, fractional, position, neighbor.idx, edges)
        r = jnp.sqrt(r2)
        # Slots that are no pairs stand at the cutoff, where the value and the slope of this are zero.
        decay = jnp.where(mask, 0.5 * (1.0 + jnp.cos(jnp.pi * r / cutoff)), 0.0)
        n = [jnp.where(mask, x / r, 0.0) for x in d]
        columns = []
        for eta in etas:
            g = jnp.exp(-eta * r2) * decay
            zeroth, first, second = cosine_moments(g, n)
            columns += [jnp.sum(g, axis=1), zeroth + first, zeroth - first]
            columns += [0.5 * (zeroth + 2.0 * first + second), 0.5 * (zeroth - 2.0 * first + second)]
        return jnp.stack(columns, axis=-1)

    return features


@dataclass(frozen=True)
class NeuralCorrection:
    """A trainable energy that starts at zero.

    Attributes
    ----------
    template
        ``energy_fn_template``, for ``sum_template`` with a prior.
    init_params
        By layer: weights and biases; those of the last layer are zero, so that training begins at the prior.
    """

    template: Callable[[Any], Callable[..., jax.Array]]
    init_params: dict[str, jax.Array]

    @classmethod
    def create(
        cls,
        features: Callable[..., jax.Array],
        samples: jax.Array,
        *,
        key: jax.Array,
        mlp_sizes: Sequence[int] = (16, 16),
        energy_scale: float = 1.0,
    ) -> NeuralCorrection:
        """Build the network.

        Parameters
        ----------
        features
            From ``symmetry_functions``.
        samples
            Their values ``(S, F)`` on typical configurations: inputs are taken less their mean, over their spread.
        key
            Seed of the weights.
        mlp_sizes
            Widths of the hidden layers.
        energy_scale
            Unit of the network's output, an energy: about what the correction of an atom may be.

        Raises
        ------
        ArgumentError
            If a symmetry function does not vary over the samples.
        """
        mean, spread = jnp.mean(samples, axis=0), jnp.std(samples, axis=0)
        if not bool(jnp.all(spread > 1e-6 * jnp.max(jnp.abs(samples), axis=0))):
            raise ArgumentError("a symmetry function is the same in all samples; take samples with thermal motion")

        def inputs(position: jax.Array, neighbor: partition.NeighborList, **kwargs: Any) -> jax.Array:
            return (features(position, neighbor, **kwargs) - mean) / spread

        model = jax_md_energy.BehlerParrinelloEnergy(
            inputs, samples.shape[1], tuple(mlp_sizes), rngs=nnx.Rngs(key), activation=jnp.tanh
        )
        graph, state = nnx.split(model)
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        last = f"layers_{len(mlp_sizes)}"
        init = {
            name: jnp.zeros_like(leaf) if last in name else jnp.asarray(leaf)
            for name, (_, leaf) in zip(names, leaves, strict=True)
        }

        def template(params: Mapping[str, jax.Array]) -> Callable[..., jax.Array]:
            network = nnx.merge(graph, jax.tree.unflatten(structure, [params[name] for name in names]))

            def energy_fn(position: jax.Array, neighbor: partition.NeighborList, **kwargs: Any) -> jax.Array:
                return energy_scale * network(position, neighbor, **kwargs)

            return energy_fn

        return cls(template, init)
