"""One update: decide what is stale, recompute it, evaluate, step. All ranks decide alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from chemtrain_mpi.errors import NonFiniteError
from chemtrain_mpi.reduction import all_finite, flat_mean, global_norm, ordered_mean
from chemtrain_mpi.trainers.history import Stopwatch
from chemtrain_mpi.trainers.objective import PointResult
from chemtrain_mpi.trainers.points import Points
from chemtrain_mpi.trainers.state import TrainerState
from chemtrain_mpi.trajectories import Params, Trajectory
from distmd_protocol import RankError

_log = logging.getLogger(__name__)

_BISECTIONS = 6


class UpdateRule:
    """Changes a trainer's state by one batch.

    Parameters
    ----------
    points
        The state points.
    propose
        The optimiser's ``update``, compiled.
    snapshots
        ``T``, of all chains of a state point.
    reweight_ratio, allowed_reduction, deterministic
        As in the trainer.
    """

    def __init__(
        self,
        points: Points,
        propose: Callable[..., Any],
        snapshots: int,
        reweight_ratio: float,
        allowed_reduction: float | None,
        deterministic: bool,
    ) -> None:
        self._points = points
        self.snapshots = snapshots
        self._ratio = reweight_ratio
        self._reduction = allowed_reduction
        self._deterministic = deterministic
        self._propose = propose
        self._step = jax.jit(
            lambda params, updates, size: optax.apply_updates(
                params, jax.tree.map(lambda u: (u * size).astype(u.dtype), updates)
            )
        )

    def stale(self, state: TrainerState, points: Iterable[int], watch: Stopwatch) -> set[int]:
        """State points whose trajectories must be recomputed before they are used. Collective."""
        sizes = self._points.effective_samples(list(points), state.params, state.require_trajectories(), watch)
        return {k for k, size in sizes.items() if self._is_stale(size)}

    def update(self, state: TrainerState, batch: Sequence[int], epoch: int) -> dict[str, Any]:
        """Change ``state`` by one update and return its history entry. Collective.

        Raises
        ------
        NonFiniteError
            On every rank; then parameters, optimiser state and trajectories are as they were, bit for bit.
        """
        watch = Stopwatch()
        points = sorted(batch)
        trajectories = list(state.require_trajectories())
        share = self._deterministic
        results = self._points.evaluate(points, state.params, trajectories, watch, share)
        recomputed = [k for k in points if self._is_stale(float(results[k].n_eff))]
        if recomputed:
            fresh = self._recompute(recomputed, state, trajectories, epoch, watch)
            for k, trajectory in fresh.items():
                trajectories[k] = trajectory
            results.update(self._points.evaluate(recomputed, state.params, trajectories, watch, share))
        loss, gradient = self._mean(points, results, state.params, watch)
        self._require_finite(points, results, loss, gradient)
        updates, opt_state = self._propose(gradient, state.opt_state, state.params)
        size = 1.0
        if self._reduction is not None:
            limit = self._reduction * self.snapshots
            size = self._step_size(limit, points, state.params, updates, trajectories, watch)
        params = self._step(state.params, updates, size)
        if not all_finite((params, opt_state)):
            raise NonFiniteError(
                f"the update of epoch {epoch} makes a parameter or the optimiser's state not finite (loss {loss:.6g}, "
                f"gradient norm {global_norm(gradient):.3g}); parameters were left as they were. Shorten the learning "
                "rate or clip the gradient"
            )
        state.mid_epoch = True
        state.params, state.opt_state, state.trajectories = params, opt_state, trajectories
        state.update += 1
        return {
            "epoch": epoch,
            "update": state.update,
            "batch": points,
            "recomputed": recomputed,
            "loss": loss,
            "losses": {str(k): float(results[k].loss) for k in points},
            "n_eff": {str(k): float(results[k].n_eff) for k in points},
            "gradient_norm": global_norm(gradient),
            "step_size": size,
            "seconds": dict(watch.seconds),
        }

    def _is_stale(self, n_eff: float) -> bool:
        # Not "<": a NaN must lead to a new trajectory, not pass as fresh.
        return not n_eff >= self._ratio * self.snapshots * (1.0 - 1e-6)

    def _recompute(
        self, points: Sequence[int], state: TrainerState, trajectories: list[Trajectory], epoch: int, watch: Stopwatch
    ) -> dict[int, Trajectory]:
        try:
            return self._points.recompute(points, state.params, trajectories, epoch, watch)
        except RankError as error:
            kinds = {failure.type for failure in error.failures}
            if NonFiniteError.__name__ in kinds:
                raise NonFiniteError(str(error)) from error
            raise

    def _mean(
        self, points: Sequence[int], results: dict[int, PointResult], params: Params, watch: Stopwatch
    ) -> tuple[float, Any]:
        losses = np.array([np.asarray(results[k].loss) for k in points])
        if self._deterministic:
            gradient = ordered_mean([results[k].gradient for k in points])
        else:
            own = [results[k].gradient for k in points if results[k].gradient is not None]
            with watch.phase("communicating"), self._points.comm.named("sum gradients"):
                gradient = flat_mean(self._points.comm, own, params, len(points))
        return float(np.sum(losses, dtype=np.float64) / len(points)), gradient

    def _require_finite(
        self, points: Sequence[int], results: dict[int, PointResult], loss: float, gradient: Any
    ) -> None:
        wrong = [k for k in points if not np.isfinite(float(results[k].loss))]
        if wrong or not np.isfinite(loss) or not all_finite(gradient):
            parts = f"the loss of state points {wrong}" if wrong else "the gradient"
            raise NonFiniteError(
                f"{parts} is not finite; the update was rejected on every rank and parameters were left as they were. "
                "Look for particles on top of each other, padding that reaches a square root, or a target with gamma "
                "and no finite value"
            )

    def _step_size(
        self,
        limit: float,
        points: Sequence[int],
        params: Params,
        updates: Any,
        trajectories: list[Trajectory],
        watch: Stopwatch,
    ) -> float:
        """Fraction of the update, from a bisection, that keeps every N_eff of the batch at the limit or above.

        If none that was tried does, the smallest one, which is above zero.
        """

        def allowed(size: float) -> bool:
            moved = self._step(params, updates, size)
            sizes = self._points.effective_samples(points, moved, trajectories, watch)
            return all(n >= limit for n in sizes.values())

        if allowed(1.0):
            return 1.0
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if allowed(middle) else (low, middle)
        if low > 0.0:
            return low
        # Never zero: that would be a stand-still.
        if self._points.comm.rank == 0:
            _log.warning("no fraction of the update from %.3g up keeps N_eff at %.1f; %.3g is taken", high, limit, high)
        return high
