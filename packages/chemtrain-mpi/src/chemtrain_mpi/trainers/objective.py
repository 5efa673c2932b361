"""Loss and gradient of one state point, in one program whose shape depends on no rank count.

``K`` state points, ``T`` snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from chemtrain_mpi import reweighting
from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.quantities import box_volume
from chemtrain_mpi.trajectories import Kwargs, Params, Sampler, Trajectory, energy_kwargs

LossFn = Callable[[jax.Array, jax.Array], jax.Array]


def mean_squared_error(prediction: jax.Array, target: jax.Array) -> jax.Array:
    """Mean of the squared differences over all entries of a target."""
    return jnp.mean((prediction - target) ** 2)


@dataclass(frozen=True)
class PointResult:
    """What one state point gives.

    Attributes
    ----------
    loss
        ``Σ γ L(prediction, target)``.
    n_eff
        Effective sample size.
    predictions
        By observable.
    gradient
        Of the loss, as the parameters.
    """

    loss: jax.Array
    n_eff: jax.Array
    predictions: dict[str, jax.Array]
    gradient: Params


jax.tree_util.register_dataclass(PointResult, ["loss", "n_eff", "predictions", "gradient"], [])


class Objective:
    """Reweighted predictions of a state point, their loss and its gradient.

    Parameters
    ----------
    sampler
        Holds the energy function and evaluates snapshots.
    quantities, observables
        As the trainer takes them.
    targets
        Names of the observables that enter the loss.
    loss_fn, target_loss_fns
        Default and per-target loss of a prediction.
    """

    def __init__(
        self,
        sampler: Sampler,
        quantities: Mapping[str, Callable[..., jax.Array]],
        observables: Mapping[str, Callable[..., jax.Array]],
        targets: Mapping[str, Any],
        loss_fn: LossFn | None,
        target_loss_fns: Mapping[str, LossFn] | None,
    ) -> None:
        unknown = [name for name in targets if name not in observables]
        if unknown:
            raise ArgumentError(
                f"there is no observable for the targets {', '.join(unknown)}; observables: {', '.join(observables)}"
            )
        left_over = set(target_loss_fns or {}) - set(targets)
        if left_over:
            raise ArgumentError(f"target_loss_fns names {', '.join(sorted(left_over))}, which are no targets")
        self._sampler = sampler
        self._quantities = dict(quantities)
        self._observables = dict(observables)
        self._losses = {name: (target_loss_fns or {}).get(name, loss_fn or mean_squared_error) for name in targets}
        self._gradient = jax.jit(self._gradient_program)
        self._predictions = jax.jit(self._predictions_program)

    def evaluate(self, params: Params, trajectory: Trajectory, kwargs: Kwargs, targets: Any) -> PointResult:
        """Loss, gradient, effective sample size and predictions under ``params``."""
        return self._gradient(params, *self._stored(trajectory), dict(kwargs), targets)

    def predict(self, params: Params, trajectory: Trajectory, kwargs: Kwargs) -> tuple[dict[str, jax.Array], jax.Array]:
        """Predictions and effective sample size, under any parameters and state keywords."""
        return self._predictions(params, *self._stored(trajectory), dict(kwargs))

    def weights(self, params: Params, trajectory: Trajectory, kwargs: Kwargs) -> jax.Array:
        """Exponents of the weights ``(T,)``."""
        energy = self._sampler.energies(params, trajectory, kwargs)
        reference, sampled = trajectory.reference_energy, trajectory.reference_kwargs
        assert reference is not None
        return _exponents(energy, trajectory.snapshots, reference, sampled, kwargs)

    def _stored(self, trajectory: Trajectory) -> tuple[Any, ...]:
        lists = self._sampler.neighbors(trajectory), self._sampler.slots(trajectory)
        return trajectory.snapshots, trajectory.reference_energy, lists, dict(trajectory.reference_kwargs)

    def _gradient_program(self, params: Params, *arguments: Any) -> PointResult:
        *stored, targets = arguments
        self._sampler.compilations["gradient"] += 1

        def loss(params: Params) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array]]:
            predictions, n_eff = self._reweight(params, *stored)
            total = jnp.zeros((), n_eff.dtype)
            for name, loss_fn in self._losses.items():
                target = targets[name]
                if predictions[name].shape != target["target"].shape:
                    raise ArgumentError(
                        f"the observable {name!r} has shape {predictions[name].shape} a state point, its target "
                        f"{target['target'].shape}"
                    )
                total = total + target["gamma"] * loss_fn(predictions[name], target["target"])
            return total, (predictions, n_eff)

        (value, (predictions, n_eff)), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return PointResult(value, n_eff, predictions, gradient)

    def _predictions_program(self, params: Params, *arguments: Any) -> tuple[dict[str, jax.Array], jax.Array]:
        self._sampler.compilations["predictions"] += 1
        return self._reweight(params, *arguments)

    def _reweight(
        self,
        params: Params,
        snapshots: Any,
        reference_energy: jax.Array,
        lists: tuple[Any, jax.Array],
        reference_kwargs: Kwargs,
        kwargs: Kwargs,
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        energy_fn = self._sampler.template(params)

        def one(state: Any, own: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            values = {
                name: quantity(state, neighbor=own, energy_params=params, **kwargs)
                for name, quantity in self._quantities.items()
            }
            return energy_fn(state.position, neighbor=own, **energy_kwargs(state, kwargs)), values

        energy, values = self._sampler.map_snapshots(one, snapshots, *lists)
        exponent = _exponents(energy, snapshots, reference_energy, reference_kwargs, kwargs)
        weights = reweighting.weights(exponent)
        predictions = {
            name: jnp.asarray(observable(values, weights, **kwargs)) for name, observable in self._observables.items()
        }
        return predictions, reweighting.effective_samples(jax.lax.stop_gradient(exponent))


def _exponents(
    energy: jax.Array, snapshots: Any, reference_energy: jax.Array, reference_kwargs: Kwargs, kwargs: Kwargs
) -> jax.Array:
    # One by one: the box of a jax-md state is computed from its fields, and means nothing for stacked ones.
    volume = jax.vmap(_volume)(snapshots)
    return reweighting.exponents(
        energy,
        reference_energy,
        kwargs["kT"],
        reference_kwargs["kT"],
        0.0 if volume is None else volume,
        kwargs.get("pressure", 0.0),
        reference_kwargs.get("pressure", 0.0),
    )


def _volume(state: Any) -> jax.Array | None:
    box = getattr(state, "box", None)
    return None if box is None else box_volume(box)
