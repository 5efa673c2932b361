"""Comparing between ranks what has no value to hash: functions, by what they do.

A function is called with the same arguments on every rank, and the numbers it returns are compared. What stays unseen:
settings inside a simulator that is no ``functools.partial`` and that do not show in its initial state, and a
learning-rate schedule that differs only between the update counts tried here. Energies, forces and observables can be
sums that nearly cancel, so they are compared only where the arithmetic is the same on all ranks, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chemtrain_mpi.collectives import Collectives
from chemtrain_mpi.trainers.points import Points
from chemtrain_mpi.trajectories import Trajectory
from distmd_protocol import AgreementError, Comm, agree

# Updates after which a learning rate is looked at; schedules change with the count.
_COUNTS = (0, 30, 1_000, 30_000)
_LOSSES = np.concatenate([np.linspace(3.0, 1.0, 12), np.full(12, 0.9)]).tolist()
# Reproducible arithmetic gives equal numbers; other processors may round otherwise.
_ROUNDING = 1e-4


def functions(
    update: Callable[..., Any],
    params: Any,
    opt_state: Any,
    criterion: Callable[[Sequence[float]], float] | None,
    losses: Mapping[str, Callable[..., Any]],
    targets: Mapping[str, Mapping[str, Any]],
) -> dict[str, list[float]]:
    """What this rank's functions do that need no trajectory. Not collective."""
    return {
        "optimizer": optimizer_probe(update, params, opt_state),
        "convergence_criterion": criterion_probe(criterion),
        "loss_fn, target_loss_fns": losses_probe(losses, targets),
    }


def optimizer_probe(update: Callable[..., Any], params: Any, opt_state: Any) -> list[float]:
    """What an optimiser makes of a fixed gradient, at several update counts.

    Parameters
    ----------
    update
        The transformation's ``update``.
    opt_state
        Fresh; its whole-number scalars are its counts.
    """
    gradient = jax.tree.map(lambda leaf: jnp.asarray(_waves(leaf.shape), leaf.dtype), params)
    numbers = []
    for count in _COUNTS:

        def later(leaf: Any, count: int = count) -> Any:
            counts = jnp.ndim(leaf) == 0 and jnp.result_type(leaf) in (jnp.int32, jnp.int64)
            return leaf + jnp.asarray(count, leaf.dtype) if counts else leaf

        updates, _ = update(gradient, jax.tree.map(later, opt_state), params)
        numbers += projections(updates)
    return numbers


def losses_probe(losses: Mapping[str, Callable[..., Any]], targets: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """Losses of predictions around the targets of the first state point."""
    numbers = []
    for name, loss in sorted(losses.items()):
        target = targets[name]["target"][0]
        numbers += [float(loss(factor * target + shift, target)) for factor, shift in ((1.0, 0.0), (0.9, 0.01))]
    return numbers


def criterion_probe(criterion: Callable[[Sequence[float]], float] | None) -> list[float]:
    """The criterion's value for several histories."""
    return [] if criterion is None else [float(criterion(_LOSSES[:length])) for length in (1, 6, 12, 24)]


def settings(template: Any) -> dict[str, Any]:
    """Numbers and words among the arguments of a ``functools.partial``; nothing of any other function."""
    if not isinstance(template, partial):
        return {}
    given = {**{str(i): argument for i, argument in enumerate(template.args)}, **template.keywords}
    plain = (bool, int, float, complex, str, np.ndarray, np.generic, jax.Array)
    return {name: [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, plain)] for name, value in given.items()}


def projections(tree: Any) -> list[float]:
    """Norm of every leaf and its product with a fixed vector; float64, 2 numbers a leaf."""
    numbers = []
    for leaf in jax.tree.leaves(tree):
        flat = np.asarray(leaf).astype(np.float64).reshape(-1)
        numbers += [float(np.sqrt(np.sum(flat * flat))), float(np.sum(flat * _waves(flat.shape)))]
    return numbers


def first_evaluation(points: Points, params: Any, trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """What this rank makes of the first state point. Not collective."""
    (result,) = points.evaluate_here([0], params, trajectories)
    named = {f"the observable {name!r}": projections(value) for name, value in result.predictions.items()}
    return {
        "energy_fn_template (effective sample size)": projections(result.n_eff),
        **named,
        "the loss": projections(result.loss),
        "the gradient": projections(result.gradient),
    }


def first_states(starts: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Where this rank has the state points begin. Not collective."""
    states = [(start.chains, start.capacity.slots, start.capacity.cell) for start in starts]
    return {
        "energy_fn_template, simulator_template or neighbor_fn, at the start of the state points": projections(states)
    }


def compare(comm: Collectives, what: str, probes: Callable[[], Mapping[str, list[float]]], exact: bool) -> None:
    """Probe on every rank, if there are several, and check that all get the same. Collective."""
    if comm.size == 1:
        return
    with comm.named(what):
        with agree(comm, what):
            numbers = probes()
        check_behaviour(comm, numbers, exact)


def check_behaviour(comm: Comm, probes: Mapping[str, Sequence[float]], exact: bool) -> None:
    """Stop all ranks if a function does something else on one of them. Collective.

    Parameters
    ----------
    probes
        Numbers by what they come from.
    exact
        Whether the arithmetic is the same on all ranks.

    Raises
    ------
    AgreementError
        On every rank, naming what differs and the ranks that differ from rank zero.
    """
    # As text: JSON has no NaN.
    every = comm.allgather({name: [number.hex() for number in numbers] for name, numbers in probes.items()})
    differing = {
        name: [rank for rank, theirs in enumerate(every) if not _alike(theirs[name], every[0][name], exact)]
        for name in every[0]
    }
    lines = [f"{name} (ranks {', '.join(map(str, ranks))})" for name, ranks in differing.items() if ranks]
    if lines:
        raise AgreementError(
            f"these do something else than on rank 0 when they are called with the same arguments: {'; '.join(lines)}; "
            "every rank must construct the trainer with the same functions"
        )


def _alike(one: Sequence[str], other: Sequence[str], exact: bool) -> bool:
    if len(one) != len(other):
        return False
    a, b = (np.array([float.fromhex(text) for text in numbers]) for numbers in (one, other))
    return bool(np.allclose(a, b, rtol=0.0 if exact else _ROUNDING, atol=0.0, equal_nan=True))


def _waves(shape: tuple[int, ...]) -> np.ndarray:
    return np.cos(1.0 + np.arange(int(np.prod(shape)), dtype=np.float64)).reshape(shape)
