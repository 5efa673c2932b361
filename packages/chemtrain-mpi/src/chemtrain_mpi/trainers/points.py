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

from chemtrain_mpi import free_energy, reweighting
from chemtrain_mpi.capacity import Capacity
from chemtrain_mpi.chains import Chain, chain_keys, with_fresh_momenta
from chemtrain_mpi.collectives import Collectives
from chemtrain_mpi.errors import ArgumentError, NonFiniteError
from chemtrain_mpi.mapping import Together
from chemtrain_mpi.reduction import all_finite
from chemtrain_mpi.sampler import Job, Sampler
from chemtrain_mpi.trainers.batching import deal
from chemtrain_mpi.trainers.history import Stopwatch
from chemtrain_mpi.trainers.objective import Objective, PointResult, enthalpies
from chemtrain_mpi.trainers.options import check_other_state
from chemtrain_mpi.trainers.statepoints import lead_with_points, take
from chemtrain_mpi.trajectories import Params, Trajectory, arrays, to_device, to_host
from distmd_protocol import agree

# Domains of the folded keys, so that no two uses of (seed, epoch, state point) share a key.
_START, _RUN, _BATCH, _RESAMPLE, _MOMENTA = range(5)


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
    chains
        ``C``, independent simulations of each state point.
    free_energies
        Keep the free energy of each trajectory's potential.
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
        chains: int = 1,
        free_energies: bool = False,
    ) -> None:
        self.comm = comm
        self.sampler = sampler
        self.objective = objective
        self.count = count
        self.chains = chains
        self.free_energies = free_energies
        self.kwargs: list[dict[str, Any]] = [take(state_kwargs, k) for k in range(count)]
        self._targets = [take(targets, k) for k in range(count)]
        self._references = [take(reference_states, k) for k in range(count)]
        self._key = key
        self._on_host = on_host
        self._resample = resample
        self._structures: dict[str, Any] = {"effective sample sizes": jax.tree.structure(0.0)}

    def kwargs_with(self, other: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every state point's keywords, with another temperature or pressure. Not collective.

        Raises
        ------
        ArgumentError
            For other keywords: stored snapshots cannot be reweighted to another box.
        """
        check_other_state(other)
        led = lead_with_points("state_kwargs", dict(other), self.count)
        return [{**own, **take(led, k)} for k, own in enumerate(self.kwargs)]

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
        starts = []
        for k in range(self.count):
            key = self.key(_START, 0, k)
            start = self.sampler.start(params, self._references[k], self.kwargs[k], key, self.chains)
            starts.append(self.place(start))
        if hasattr(starts[0].chains[0].state, "box") and "pressure" not in self.kwargs[0]:
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
                own = [k for k, owner in owners.items() if owner == self.comm.rank]
                # Handed over at once only where they run at once: a trajectory is moved to the host when it is ready.
                for share in [own] if self.sampler.mapping is Together else [[k] for k in own]:
                    mine |= self._simulated(share, params, trajectories, epoch, run)
            with watch.phase("communicating"):
                shared = self.comm.share({k: self._pack(t) for k, t in mine.items()}, owners)
        return {k: mine[k] if k in mine else self._unpack(shared[k], params, trajectories[k], k) for k in points}

    def _simulated(
        self, points: Sequence[int], params: Params, trajectories: Sequence[Trajectory], epoch: int, run: int
    ) -> dict[int, Trajectory]:
        """New trajectories of these state points, by this rank. Not collective."""
        jobs = [
            Job(
                self._resampled(params, trajectories[k], k, epoch, run),
                self.kwargs[k],
                self.key(_RUN, epoch, k, run),
                f"state point {k}",
            )
            for k in points
        ]
        result = {}
        for k, job, new in zip(points, jobs, self.sampler.run(params, jobs), strict=True):
            if not all_finite(arrays(new)):
                raise NonFiniteError(
                    f"the trajectory of {job.name} is not finite; the potential is too steep for the time step, or "
                    "has no minimum: look at the start configuration, shorten the time step or the update"
                )
            if self.free_energies:
                new = replace(new, free_energy=self._joined(params, trajectories[k], new))
            result[k] = jax.block_until_ready(self.place(new))
        return result

    def _joined(self, params: Params, before: Trajectory, new: Trajectory) -> free_energy.FreeEnergyRecord:
        """Free energy of the new trajectory's potential, from that of the one before; 0 for the first."""
        record, kwargs = before.free_energy, new.reference_kwargs
        if record is None:
            return free_energy.first_record(params, np.asarray(enthalpies(new)))
        # Both potentials on both trajectories.
        energy, reference = self.sampler.energies(params, [(before, kwargs)])[0], before.reference_energy
        reverse = new.reference_energy - self.sampler.energies(record.params, [(new, kwargs)])[0]
        return free_energy.next_record(record, params, float(kwargs["kT"]), energy - reference, reverse)

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

        def those(ks: Sequence[int]) -> list[PointResult]:
            return self.evaluate_here(ks, params, trajectories)

        with self.comm.named("evaluate state points"):
            return self._dealt("results", points, those, watch, share_gradients)

    def evaluate_here(
        self, points: Sequence[int], params: Params, trajectories: Sequence[Trajectory]
    ) -> list[PointResult]:
        """The same on this rank alone. Not collective."""
        return self.objective.evaluate(params, [(trajectories[k], self.kwargs[k], self._targets[k]) for k in points])

    def effective_samples(
        self, points: Sequence[int], params: Params, trajectories: Sequence[Trajectory], watch: Stopwatch
    ) -> dict[int, float]:
        """Effective sample size of the given state points under ``params``."""

        def those(ks: Sequence[int]) -> list[jax.Array]:
            exponents = self.objective.weights(params, [(trajectories[k], self.kwargs[k]) for k in ks])
            return [reweighting.effective_samples(exponent) for exponent in exponents]

        with self.comm.named("effective sample sizes"):
            return {k: float(n) for k, n in self._dealt("effective sample sizes", points, those, watch).items()}

    def predict(
        self,
        params: Params,
        trajectories: Sequence[Trajectory],
        kwargs: Sequence[Mapping[str, Any]],
        watch: Stopwatch,
        free_energies: bool = True,
    ) -> dict[int, tuple[dict[str, jax.Array], jax.Array]]:
        """Predictions and effective sample size of all state points under any parameters and state keywords."""

        def those(ks: Sequence[int]) -> list[tuple[dict[str, jax.Array], jax.Array]]:
            return self.objective.predict(params, [(trajectories[k], kwargs[k]) for k in ks], free_energies)

        with self.comm.named("predict"):
            return self._dealt("predictions", range(self.count), those, watch)

    def _dealt(
        self,
        what: str,
        points: Sequence[int],
        those: Callable[[Sequence[int]], list[Any]],
        watch: Stopwatch,
        share_gradients: bool = True,
    ) -> dict[int, Any]:
        owners = deal(points, self.comm.size)
        mine: dict[int, Any] = {}
        with agree(self.comm, "evaluating state points"), watch.phase("reweighting"):
            own = [k for k, owner in owners.items() if owner == self.comm.rank]
            mine = jax.tree.map(np.asarray, dict(zip(own, jax.block_until_ready(those(own)), strict=True)))
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
        exponent = self.objective.weights(params, [(before, self.kwargs[point])])[0]
        exponent = jnp.where(jnp.isfinite(exponent), exponent, -jnp.inf)
        if not bool(jnp.any(jnp.isfinite(exponent))):
            return before
        chains = []
        for key in chain_keys(self.key(_RESAMPLE, epoch, point, run), self.chains):
            index = int(jax.random.categorical(key, exponent))
            state = jax.tree.map(lambda leaf, index=index: leaf[index], before.snapshots)
            # A key of its own, not the one that drew the snapshot.
            state = with_fresh_momenta(state, jax.random.fold_in(key, _MOMENTA), self.kwargs[point]["kT"])
            chains.append(Chain(state, state.position))
        return replace(before, chains=tuple(chains), cache={})

    def place(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory where trajectories are kept. Not collective."""
        return to_host(trajectory) if self._on_host else to_device(trajectory)

    @staticmethod
    def _pack(trajectory: Trajectory) -> list[np.ndarray]:
        capacity = np.array([trajectory.capacity.slots, trajectory.capacity.cell], np.int64)
        return [capacity, *(np.asarray(leaf) for leaf in jax.tree.leaves(arrays(trajectory)))]

    def _unpack(self, bundle: list[np.ndarray], params: Params, before: Trajectory, point: int) -> Trajectory:
        slots, cell = (int(size) for size in bundle[0])
        # The first trajectory has snapshots and perhaps a record, which its start has not.
        state, record = before.chains[0].state, np.zeros(3) if self.free_energies else None
        structure = jax.tree.structure((before.chains, state, 0, record))
        chains, snapshots, energy, values = jax.tree.unflatten(structure, bundle[1:])
        new = Trajectory(
            chains,
            Capacity(slots, cell),
            snapshots,
            energy,
            dict(self.kwargs[point]),
            None if values is None else free_energy.FreeEnergyRecord(params, values),
        )
        return self.place(new)
