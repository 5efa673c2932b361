"""Work on state points, dealt to ranks: start, recompute, evaluate. Every result ends up on every rank, bit for bit.

``K`` state points, ``T`` snapshots. All methods are collective unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chemtrain_mpi import reweighting
from chemtrain_mpi.capacity import Capacity
from chemtrain_mpi.collectives import Collectives
from chemtrain_mpi.errors import ArgumentError, NonFiniteError
from chemtrain_mpi.reduction import all_finite
from chemtrain_mpi.trainers.batching import deal
from chemtrain_mpi.trainers.history import Stopwatch
from chemtrain_mpi.trainers.objective import Objective, PointResult
from chemtrain_mpi.trainers.statepoints import take
from chemtrain_mpi.trajectories import Params, Sampler, Trajectory, to_host
from distmd_protocol import agree

# Domains of the folded keys, so that no two uses of (seed, epoch, state point) share a key.
_START, _RUN, _BATCH, _RESAMPLE = range(4)


class Points:
    """The state points of a trainer.

    Parameters
    ----------
    comm
        Ranks.
    key
        Seed, as raw key data.
    sampler, objective
        Run and evaluate one state point.
    state_kwargs, targets, reference_states
        Trees that lead with the state-point axis ``K``.
    count
        ``K``.
    on_host
        Keep trajectories in host memory.
    resample
        Start trajectories from reweighted snapshots.
    """

    def __init__(
        self,
        comm: Collectives,
        key: jax.Array,
        sampler: Sampler,
        objective: Objective,
        state_kwargs: Any,
        targets: Any,
        reference_states: Any,
        count: int,
        on_host: bool,
        resample: bool,
    ) -> None:
        self.comm = comm
        self.sampler = sampler
        self.objective = objective
        self.count = count
        self.kwargs: list[dict[str, Any]] = [take(state_kwargs, k) for k in range(count)]
        self._targets = [take(targets, k) for k in range(count)]
        self._references = [take(reference_states, k) for k in range(count)]
        self._key = key
        self._on_host = on_host
        self._resample = resample
        self._structures: dict[str, Any] = {"effective sample sizes": jax.tree.structure(0.0)}

    def key(self, domain: int, epoch: int, point: int = 0, run: int = 0) -> jax.Array:
        """Key of a state point in an epoch: the same on every rank and for any number of them. Not collective."""
        key = self._key
        for number in (domain, epoch, point, run):
            key = jax.random.fold_in(key, number)
        return key

    def batch_key(self, epoch: int) -> jax.Array:
        """Key of an epoch's batch order. Not collective."""
        return self.key(_BATCH, epoch)

    def start(self, params: Params) -> list[Trajectory]:
        """Every state point before its first step, computed by every rank for itself. Not collective."""
        starts = [
            self.place(self.sampler.start(params, self._references[k], self.kwargs[k], self.key(_START, 0, k)))
            for k in range(self.count)
        ]
        if hasattr(starts[0].state, "box") and "pressure" not in self.kwargs[0]:
            raise ArgumentError(
                "the simulator changes the box, but state_kwargs has no 'pressure'; give every state point the one "
                "that the barostat is to hold, else the weights of its snapshots are unknown"
            )
        return starts

    def recompute(
        self,
        points: Sequence[int],
        params: Params,
        trajectories: Sequence[Trajectory],
        epoch: int,
        watch: Stopwatch,
        run: int = 0,
    ) -> dict[int, Trajectory]:
        """New trajectories of the given state points, each simulated by one rank.

        Raises
        ------
        RankError
            On every rank, if a trajectory is not finite or overflows too often on any.
        """
        owners = deal(points, self.comm.size)
        mine: dict[int, Trajectory] = {}
        with self.comm.named("recompute trajectories"):
            with agree(self.comm, "recomputing trajectories"), watch.phase("simulating"):
                for k in (k for k, owner in owners.items() if owner == self.comm.rank):
                    before = self._resampled(params, trajectories[k], k, epoch, run)
                    name = f"state point {k}"
                    new = self.sampler.run(params, before, self.kwargs[k], self.key(_RUN, epoch, k, run), name)
                    mine[k] = jax.block_until_ready(self.place(new))
                    if not all_finite((new.state, new.snapshots, new.reference_energy)):
                        raise NonFiniteError(
                            f"the trajectory of {name} is not finite; the potential is too steep for the time step, or "
                            "has no minimum: look at the start configuration, shorten the time step or the update"
                        )
            with watch.phase("communicating"):
                shared = self.comm.share({k: self._pack(t) for k, t in mine.items()}, owners)
        return {k: mine[k] if k in mine else self._unpack(shared[k], trajectories[k], k) for k in points}

    def evaluate(
        self,
        points: Sequence[int],
        params: Params,
        trajectories: Sequence[Trajectory],
        watch: Stopwatch,
        share_gradients: bool,
    ) -> dict[int, PointResult]:
        """Loss, effective sample size, predictions and gradient of the given state points.

        Parameters
        ----------
        share_gradients
            Every rank gets every gradient; otherwise a gradient is only on the rank that computed it, and ``None``
            elsewhere.
        """

        def one(k: int) -> PointResult:
            return self.objective.evaluate(params, trajectories[k], self.kwargs[k], self._targets[k])

        with self.comm.named("evaluate state points"):
            return self._dealt("results", points, one, watch, share_gradients)

    def effective_samples(
        self, points: Sequence[int], params: Params, trajectories: Sequence[Trajectory], watch: Stopwatch
    ) -> dict[int, float]:
        """Effective sample size of the given state points under ``params``."""

        def one(k: int) -> jax.Array:
            exponent = self.objective.weights(params, trajectories[k], self.kwargs[k])
            return reweighting.effective_samples(exponent)

        with self.comm.named("effective sample sizes"):
            return {k: float(n) for k, n in self._dealt("effective sample sizes", points, one, watch).items()}

    def predict(
        self, params: Params, trajectories: Sequence[Trajectory], kwargs: Sequence[Mapping[str, Any]], watch: Stopwatch
    ) -> dict[int, tuple[dict[str, jax.Array], jax.Array]]:
        """Predictions and effective sample size of all state points under any parameters and state keywords."""

        def one(k: int) -> tuple[dict[str, jax.Array], jax.Array]:
            return self.objective.predict(params, trajectories[k], kwargs[k])

        with self.comm.named("predict"):
            return self._dealt("predictions", range(self.count), one, watch)

    def _dealt(
        self,
        what: str,
        points: Sequence[int],
        one: Callable[[int], Any],
        watch: Stopwatch,
        share_gradients: bool = True,
    ) -> dict[int, Any]:
        owners = deal(points, self.comm.size)
        mine: dict[int, Any] = {}
        with agree(self.comm, "evaluating state points"), watch.phase("reweighting"):
            for k in (k for k, owner in owners.items() if owner == self.comm.rank):
                mine[k] = jax.tree.map(np.asarray, jax.block_until_ready(one(k)))
        with watch.phase("communicating"):
            gradients = {k: value.gradient for k, value in mine.items()} if not share_gradients else {}
            light = {k: replace(v, gradient=None) if not share_gradients else v for k, v in mine.items()}
            # Every rank owns a state point of the first, full batch, so each knows the structure of a result.
            if light:
                self._structures[what] = jax.tree.structure(next(iter(light.values())))
            shared = self.comm.share({k: jax.tree.leaves(value) for k, value in light.items()}, owners)
            results = {k: jax.tree.unflatten(self._structures[what], shared[k]) for k in points}
        if not share_gradients:
            results = {k: replace(value, gradient=gradients.get(k)) for k, value in results.items()}
        return results

    def _resampled(self, params: Params, before: Trajectory, point: int, epoch: int, run: int) -> Trajectory:
        if not self._resample or before.snapshots is None:
            return before
        exponent = self.objective.weights(params, before, self.kwargs[point])
        exponent = jnp.where(jnp.isfinite(exponent), exponent, -jnp.inf)
        if not bool(jnp.any(jnp.isfinite(exponent))):
            return before
        index = int(jax.random.categorical(self.key(_RESAMPLE, epoch, point, run), exponent))
        state = jax.tree.map(lambda leaf: leaf[index], before.snapshots)
        return replace(before, state=state, reference_position=state.position, cache={})

    def place(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory where trajectories are kept. Not collective."""
        return to_host(trajectory) if self._on_host else trajectory

    @staticmethod
    def _pack(trajectory: Trajectory) -> list[np.ndarray]:
        capacity = np.array([trajectory.capacity.slots, trajectory.capacity.cell], np.int64)
        arrays = (
            trajectory.state,
            trajectory.snapshots,
            trajectory.reference_position,
            trajectory.reference_energy,
        )
        return [capacity, *(np.asarray(leaf) for leaf in jax.tree.leaves(arrays))]

    def _unpack(self, bundle: list[np.ndarray], before: Trajectory, point: int) -> Trajectory:
        slots, cell = (int(size) for size in bundle[0])
        structure = jax.tree.structure((before.state, before.state, 0, 0))
        as_array = np.asarray if self._on_host else jnp.asarray
        arrays = jax.tree.unflatten(structure, [as_array(leaf) for leaf in bundle[1:]])
        state, snapshots, position, energy = arrays
        return Trajectory(state, position, Capacity(slots, cell), snapshots, energy, dict(self.kwargs[point]))
