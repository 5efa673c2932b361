"""Loss and gradient of state points, by programs whose shape depends on no rank count.

``K`` state points, ``T`` snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from chemtrain_mpi import free_energy, reweighting
from chemtrain_mpi.boxes import box_volume
from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.sampler import Sampler
from chemtrain_mpi.trajectories import Kwargs, Params, Trajectory, energy_kwargs

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
    free_energies
        Predict free energy and entropy differences too.
    """

    def __init__(
        self,
        sampler: Sampler,
        quantities: Mapping[str, Callable[..., jax.Array]],
        observables: Mapping[str, Callable[..., jax.Array]],
        targets: Mapping[str, Any],
        loss_fn: LossFn | None,
        target_loss_fns: Mapping[str, LossFn] | None,
        free_energies: bool = False,
    ) -> None:
        reserved = [name for name in free_energy.RESERVED if free_energies and name in observables]
        if reserved:
            raise ArgumentError(
                f"the names {', '.join(reserved)} belong to the trainer's own predictions when free_energies is on; "
                "give these observables other names"
            )
        known = [*observables, *(free_energy.RESERVED if free_energies else ())]
        unknown = [name for name in targets if name not in known]
        if unknown:
            remedy = "" if free_energies or not set(unknown) & set(free_energy.RESERVED) else "; set free_energies=True"
            raise ArgumentError(
                f"there is no observable for the targets {', '.join(unknown)}; observables: {', '.join(known)}{remedy}"
            )
        left_over = set(target_loss_fns or {}) - set(targets)
        if left_over:
            raise ArgumentError(f"target_loss_fns names {', '.join(sorted(left_over))}, which are no targets")
        self._sampler = sampler
        self._quantities = dict(quantities)
        self._observables = dict(observables)
        self.losses = {name: (target_loss_fns or {}).get(name, loss_fn or mean_squared_error) for name in targets}
        """By target."""
        self._gradient = sampler.mapping(self._gradient_program)
        self._predictions = sampler.mapping(self._predictions_program)

    def evaluate(self, params: Params, jobs: Sequence[tuple[Trajectory, Kwargs, Any]]) -> list[PointResult]:
        """Loss, gradient, effective sample size and predictions under ``params``.

        Parameters
        ----------
        jobs
            Trajectory, state keywords and targets of each state point.
        """
        return self._gradient(
            params, [(*self._stored(t), _record(t), dict(kwargs), targets) for t, kwargs, targets in jobs]
        )

    def predict(
        self, params: Params, jobs: Sequence[tuple[Trajectory, Kwargs]], free_energies: bool = True
    ) -> list[tuple[dict[str, jax.Array], jax.Array]]:
        """Predictions and effective sample size, under any parameters and state keywords.

        Parameters
        ----------
        free_energies
            Among them free energy and entropy, where they are kept; they have no meaning at another temperature.
        """
        return self._predictions(
            params, [(*self._stored(t), _record(t) if free_energies else None, dict(kwargs)) for t, kwargs in jobs]
        )

    def weights(self, params: Params, jobs: Sequence[tuple[Trajectory, Kwargs]]) -> list[jax.Array]:
        """Exponents of the weights ``(T,)``."""
        energies = self._sampler.energies(params, jobs)
        return [
            _exponents(energy, _volumes(t.snapshots), t.reference_energy, t.reference_kwargs, kwargs)
            for (t, kwargs), energy in zip(jobs, energies, strict=True)
        ]

    def _stored(self, trajectory: Trajectory) -> tuple[Any, ...]:
        lists = self._sampler.neighbors(trajectory)[0], self._sampler.slots(trajectory)
        return trajectory.snapshots, trajectory.reference_energy, lists, dict(trajectory.reference_kwargs)

    def _gradient_program(self, params: Params, *arguments: Any) -> PointResult:
        *stored, targets = arguments
        self._sampler.compilations["gradient"] += 1

        def loss(params: Params) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array]]:
            predictions, n_eff = self._reweight(params, *stored)
            total = jnp.zeros((), n_eff.dtype)
            for name, loss_fn in self.losses.items():
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
        record: jax.Array | None,
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
        volumes = _volumes(snapshots)
        exponent = _exponents(energy, volumes, reference_energy, reference_kwargs, kwargs)
        weights = reweighting.weights(exponent)
        predictions = {
            name: jnp.asarray(observable(values, weights, **kwargs)) for name, observable in self._observables.items()
        }
        if record is not None:
            values = jnp.asarray(record, energy.dtype)
            enthalpy = energy + kwargs.get("pressure", 0.0) * volumes
            predictions |= free_energy.predictions(values, exponent, weights, enthalpy, kwargs["kT"])
        return predictions, reweighting.effective_samples(jax.lax.stop_gradient(exponent))


def enthalpies(trajectory: Trajectory) -> jax.Array:
    """``U``, in NPT ``U + PV``, of the snapshots under the potential and pressure that sampled them, ``(T,)``."""
    energy = trajectory.reference_energy
    assert energy is not None
    return energy + trajectory.reference_kwargs.get("pressure", 0.0) * _volumes(trajectory.snapshots)


def _exponents(
    energy: jax.Array,
    volumes: jax.Array | float,
    reference_energy: jax.Array | None,
    reference_kwargs: Kwargs,
    kwargs: Kwargs,
) -> jax.Array:
    assert reference_energy is not None
    return reweighting.exponents(
        energy,
        reference_energy,
        kwargs["kT"],
        reference_kwargs["kT"],
        volumes,
        kwargs.get("pressure", 0.0),
        reference_kwargs.get("pressure", 0.0),
    )


def _volumes(snapshots: Any) -> jax.Array | float:
    """``V`` of each snapshot ``(T,)``; 0 in NVT."""
    # One by one: the box of a jax-md state is computed from its fields, and means nothing for stacked ones.
    volumes = jax.vmap(_volume)(snapshots)
    return 0.0 if volumes is None else volumes


def _volume(state: Any) -> jax.Array | None:
    box = getattr(state, "box", None)
    return None if box is None else box_volume(box)


def _record(trajectory: Trajectory) -> Any:
    return None if trajectory.free_energy is None else trajectory.free_energy.values
