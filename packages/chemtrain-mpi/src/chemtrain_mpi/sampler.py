"""Runs and evaluates trajectories, by programs whose shape does not depend on the number of ranks.

A state point has ``C`` chains. ``T`` snapshots of all chains together, ``N`` particles. The trainer deals state points
to ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_md import partition, quantity

from chemtrain_mpi import moving_box
from chemtrain_mpi.boxes import box_matrix
from chemtrain_mpi.capacity import Capacity, NeighborLists
from chemtrain_mpi.chains import Chain, chain_keys, with_fresh_momenta
from chemtrain_mpi.errors import OverflowRetriesError
from chemtrain_mpi.mapping import OneByOne, Together
from chemtrain_mpi.timings import Timings
from chemtrain_mpi.trajectories import Kwargs, Params, SimState, Trajectory, box_kwargs, energy_kwargs


@dataclass(frozen=True)
class Job:
    """A trajectory to be run.

    Attributes
    ----------
    before
        The one that it follows.
    kwargs
        State keywords.
    key
        Replaces the random states of a stochastic simulator.
    name
        Of the state point, for errors.
    """

    before: Trajectory
    kwargs: Kwargs
    key: jax.Array
    name: str


@dataclass(frozen=True)
class _Run:
    """One chain's simulation: state and list at its end, snapshots with a leading axis."""

    last: SimState
    neighbors: partition.NeighborList
    snapshots: SimState


class Sampler:
    """Runs and evaluates trajectories.

    Parameters
    ----------
    energy_fn_template, simulator_template, neighbor_fn
        As the trainer takes them.
    timings
        Steps and snapshots.
    capacity_multiplier
        Ratio of two rungs of the capacity ladder.
    max_retries
        Repeats after overflow before it is an error.
    snapshot_batch
        Snapshots a vectorised energy call.
    together
        State points and chains in one vectorised program instead of one after the other.
    """

    def __init__(
        self,
        energy_fn_template: Callable[[Params], Callable[..., jax.Array]],
        simulator_template: Callable[[Callable[..., jax.Array]], tuple[Callable, Callable]],
        neighbor_fn: partition.NeighborListFns,
        timings: Timings,
        capacity_multiplier: float,
        max_retries: int,
        snapshot_batch: int,
        together: bool = False,
    ) -> None:
        self.template = energy_fn_template
        self.simulator_template = simulator_template
        self.lists = NeighborLists(neighbor_fn, capacity_multiplier)
        self.timings = timings
        self.max_retries = max_retries
        self.snapshot_batch = snapshot_batch
        self.compilations: Counter[str] = Counter()
        """How often each program was traced; a trace is a compilation."""
        self._start = jax.jit(self._start_program)
        self.mapping = Together if together else OneByOne
        self._simulate = self.mapping(self._simulate_program)
        self._lists = self.mapping(self._lists_program)
        self._energies = self.mapping(self._energies_program)

    def start(self, params: Params, reference: Any, kwargs: Kwargs, key: jax.Array, chains: int = 1) -> Trajectory:
        """A state point before its first step.

        Parameters
        ----------
        reference
            A mapping with ``position`` ``(N, 3)`` and optionally ``mass``, ``momenta`` and other keywords of the
            simulator's ``init_fn``, or a simulator state. All chains start there, each with noise, or where the
            simulator has none with momenta, of its own.
        chains
            ``C``.
        """
        keys = chain_keys(key, chains)
        if hasattr(reference, "position"):
            state = jax.tree.map(jnp.asarray, reference)
            capacity = self.lists.first(state.position, **box_kwargs(state, kwargs))
            states = [state] * chains
        else:
            extra = dict(reference)
            position = jnp.asarray(extra.pop("position"))
            box = box_kwargs(None, kwargs)
            capacity = self.lists.first(position, **box)
            neighbors = self.lists.allocate(position, capacity, **box)
            states = [self._start(params, own, position, neighbors, extra, dict(kwargs)) for own in keys]
        states[1:] = [
            with_fresh_momenta(state, own, kwargs["kT"]) for state, own in zip(states[1:], keys[1:], strict=True)
        ]
        return Trajectory(tuple(Chain(state, state.position) for state in states), capacity, None, None, dict(kwargs))

    def run(self, params: Params, jobs: Sequence[Job]) -> list[Trajectory]:
        """The trajectories that follow.

        After an overflow of any chain a state point starts again from what it had before, bit for bit, with the next
        capacity rung and lists built at the last valid reference positions: the outcome is that of a run that began
        with that capacity. The other state points are not repeated.

        Raises
        ------
        OverflowRetriesError
            Naming the state point, the capacity reached and the remedy.
        """
        done: dict[int, Trajectory] = {}
        capacities = [job.before.capacity for job in jobs]
        lists = [self.neighbors(job.before) for job in jobs]
        for attempt in range(self.max_retries + 1):
            pending = [i for i in range(len(jobs)) if i not in done]
            if attempt:
                for i in pending:
                    capacities[i] = self.lists.larger(capacities[i])
                    lists[i] = self._allocate(jobs[i].before.chains, capacities[i], jobs[i].kwargs)
            tried = self._try(params, [(jobs[i], capacities[i], lists[i]) for i in pending])
            done |= {i: new for i, new in zip(pending, tried, strict=True) if new is not None}
            if len(done) == len(jobs):
                return [done[i] for i in range(len(jobs))]
        i = next(i for i in range(len(jobs)) if i not in done)
        raise OverflowRetriesError(
            f"the neighbour list of {jobs[i].name} overflowed {self.max_retries + 1} times, last at "
            f"{capacities[i].slots} slots (cells of {capacities[i].cell}); raise max_neighbor_retries or "
            "overflow_capacity_multiplier, and look at the trajectory: a collapsing or exploding system overflows at "
            "any capacity"
        )

    def _try(
        self, params: Params, jobs: Sequence[tuple[Job, Capacity, list[partition.NeighborList]]]
    ) -> list[Trajectory | None]:
        """The trajectories at these capacities; ``None`` for those that overflow."""
        runs = self._simulated(params, jobs)
        # The snapshots' own lists are built elsewhere than the run's were, and may be fuller.
        items = [
            (run.snapshots, run.neighbors, _box(run.last), dict(jobs[i][0].kwargs))
            for i, chain in runs.items()
            for run in chain
        ]
        made = iter(self._lists(None, items))
        slots = {i: [next(made) for _ in chain] for i, chain in runs.items()}
        kept = [i for i in runs if not any(bool(overflow) for _, overflow in slots[i])]
        snapshots = {i: _concatenated([run.snapshots for run in runs[i]]) for i in kept}
        own = {i: _concatenated([each for each, _ in slots[i]]) for i in kept}
        energies = self._energies(
            params, [(snapshots[i], runs[i][0].neighbors, own[i], dict(jobs[i][0].kwargs)) for i in kept]
        )
        result: list[Trajectory | None] = [None] * len(jobs)
        for i, energy in zip(kept, energies, strict=True):
            job, capacity, _ = jobs[i]
            lists = [run.neighbors for run in runs[i]]
            chains = tuple(Chain(run.last, run.neighbors.reference_position) for run in runs[i])
            cache = {"neighbors": lists, "slots": own[i]}
            result[i] = Trajectory(chains, capacity, snapshots[i], energy, dict(job.kwargs), cache=cache)
        return result

    def _simulated(
        self, params: Params, jobs: Sequence[tuple[Job, Capacity, list[partition.NeighborList]]]
    ) -> dict[int, list[_Run]]:
        """Every chain of the state points of which none overflowed."""
        items = []
        for job, _, lists in jobs:
            keys = chain_keys(job.key, len(lists))
            for chain, neighbors, key in zip(job.before.chains, lists, keys, strict=True):
                state = chain.state.set(rng=key) if hasattr(chain.state, "rng") else chain.state
                items.append((state, neighbors, dict(job.kwargs)))
        outcomes = iter(self._simulate(params, items))
        runs = {}
        for i, (job, capacity, lists) in enumerate(jobs):
            own = [next(outcomes) for _ in lists]
            if any(bool(overflow) for *_, overflow in own):
                continue
            runs[i] = [_Run(*parts) for *parts, _ in own]
            if hasattr(runs[i][0].last, "box"):
                # The run built its list under a box that is not kept. What is kept must give the list again, bit for
                # bit, on any rank and after a restart.
                ends = [Chain(run.last, run.neighbors.reference_position) for run in runs[i]]
                again = self._allocate(ends, capacity, job.kwargs)
                runs[i] = [replace(run, neighbors=neighbors) for run, neighbors in zip(runs[i], again, strict=True)]
        return runs

    def neighbors(self, trajectory: Trajectory) -> list[partition.NeighborList]:
        """The chains' lists, built at their reference positions; the snapshots' own lists are made from these."""
        if "neighbors" not in trajectory.cache:
            trajectory.cache["neighbors"] = self._allocate(
                trajectory.chains, trajectory.capacity, trajectory.reference_kwargs
            )
        return trajectory.cache["neighbors"]

    def _allocate(self, chains: Sequence[Chain], capacity: Capacity, kwargs: Kwargs) -> list[partition.NeighborList]:
        return [
            self.lists.allocate(chain.reference_position, capacity, **box_kwargs(chain.state, kwargs))
            for chain in chains
        ]

    def slots(self, trajectory: Trajectory) -> jax.Array:
        """Slots of every snapshot's own list, with a leading axis ``T``: for one trajectory they are made once.

        They are kept where the snapshots are, on the device or in host memory.
        """
        if "slots" not in trajectory.cache:
            chains = len(trajectory.chains)
            kwargs, neighbors = dict(trajectory.reference_kwargs), self.neighbors(trajectory)
            parts = _split(trajectory.snapshots, chains)
            items = [
                (part, own, _box(chain.state), kwargs)
                for part, own, chain in zip(parts, neighbors, trajectory.chains, strict=True)
            ]
            slots = _concatenated([slots for slots, _ in self._lists(None, items)])
            on_host = isinstance(jax.tree.leaves(trajectory.snapshots)[0], np.ndarray)
            trajectory.cache["slots"] = np.asarray(slots) if on_host else slots
        return trajectory.cache["slots"]

    def energies(self, params: Params, jobs: Sequence[tuple[Trajectory, Kwargs]]) -> list[jax.Array]:
        """``U`` of each trajectory's stored snapshots under ``params``, ``(T,)``."""
        return self._energies(
            params, [(t.snapshots, self.neighbors(t)[0], self.slots(t), dict(kwargs)) for t, kwargs in jobs]
        )

    def energy_dtype(self, params: Params, trajectory: Trajectory) -> Any:
        """Type of the potential energy, without computing one."""
        state, neighbors = trajectory.chains[0].state, self.neighbors(trajectory)[0]
        call = energy_kwargs(state, trajectory.reference_kwargs)

        def energy(params: Params, neighbors: partition.NeighborList) -> jax.Array:
            return self.template(params)(state.position, neighbor=neighbors, **call)

        return jax.eval_shape(energy, params, neighbors).dtype

    def map_snapshots(
        self,
        fn: Callable[[SimState, partition.NeighborList], Any],
        snapshots: SimState,
        neighbors: partition.NeighborList,
        slots: jax.Array,
    ) -> Any:
        """``fn(state, neighbor)`` of every snapshot, stacked. Traced.

        Parameters
        ----------
        neighbors, slots
            A list of the right sizes, and the slots of each snapshot's own.
        """

        # Without the checkpoint the gradient would keep the pair arrays of all snapshots at once.
        @jax.checkpoint
        def one(pair: tuple[SimState, jax.Array]) -> Any:
            state, own = pair
            return fn(state, neighbors.set(idx=own, reference_position=state.position))

        batch = None if self.snapshot_batch == 1 else self.snapshot_batch
        return jax.lax.map(one, (snapshots, slots), batch_size=batch)

    def _updated(
        self, neighbors: partition.NeighborList, built: jax.Array | None, state: SimState, kwargs: Kwargs
    ) -> tuple[partition.NeighborList, jax.Array | None]:
        """The list at a state, and the box in which it was built where boxes change. Traced."""
        if built is None:
            return neighbors.update(state.position, **box_kwargs(state, kwargs)), None
        return moving_box.updated(neighbors, built, state.position, state.box, *self.lists.reach())

    def _lists_program(
        self,
        _: None,
        snapshots: SimState,
        neighbors: partition.NeighborList,
        built: jax.Array | None,
        kwargs: Kwargs,
    ) -> tuple[jax.Array, jax.Array]:
        self.compilations["lists"] += 1

        def one(state: SimState) -> tuple[jax.Array, jax.Array]:
            own, _ = self._updated(neighbors, built, state, kwargs)
            return own.idx, own.error.code

        slots, codes = jax.lax.map(one, snapshots)
        return slots, jnp.any(codes != 0)

    def _start_program(
        self,
        params: Params,
        key: jax.Array,
        position: jax.Array,
        neighbors: partition.NeighborList,
        extra: Kwargs,
        kwargs: Kwargs,
    ) -> SimState:
        self.compilations["start"] += 1
        init_fn, _ = self.simulator_template(self.template(params))
        return init_fn(key, position, neighbor=neighbors, **extra, **kwargs)

    def _simulate_program(
        self, params: Params, state: SimState, neighbors: partition.NeighborList, kwargs: Kwargs
    ) -> tuple[SimState, partition.NeighborList, SimState, jax.Array]:
        self.compilations["simulate"] += 1
        energy_fn = self.template(params)
        _, apply_fn = self.simulator_template(energy_fn)
        # In NPT the box belongs to the state; jax-md's barostat refuses a second one.
        apply_kwargs = {k: v for k, v in kwargs.items() if k != "box" or not hasattr(state, "box")}
        if hasattr(state, "force"):
            # The stored force is that of the parameters before the last update.
            force = quantity.force(energy_fn)(state.position, neighbor=neighbors, **energy_kwargs(state, kwargs))
            state = state.set(force=force)

        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            state, neighbors, built = carry
            neighbors, built = self._updated(neighbors, built, state, kwargs)
            return (apply_fn(state, neighbor=neighbors, **apply_kwargs), neighbors, built), None

        def sample(carry: tuple, _: None) -> tuple[tuple, SimState]:
            carry, _ = jax.lax.scan(step, carry, None, length=self.timings.steps_per_snapshot)
            return carry, carry[0]

        # The list was made in the box that the state has now.
        carry, _ = jax.lax.scan(step, (state, neighbors, _box(state)), None, length=self.timings.equilibration_steps)
        (state, neighbors, _), snapshots = jax.lax.scan(sample, carry, None, length=self.timings.snapshots)
        # Every bit counts: a cell list that became too coarse misses pairs as silently as a full one.
        return state, neighbors, snapshots, neighbors.error.code != 0

    def _energies_program(
        self,
        params: Params,
        snapshots: SimState,
        neighbors: partition.NeighborList,
        slots: jax.Array,
        kwargs: Kwargs,
    ) -> jax.Array:
        self.compilations["energies"] += 1
        energy_fn = self.template(params)

        def energy(state: SimState, own: partition.NeighborList) -> jax.Array:
            return energy_fn(state.position, neighbor=own, **energy_kwargs(state, kwargs))

        return self.map_snapshots(energy, snapshots, neighbors, slots)


def _box(state: SimState) -> jax.Array | None:
    """The box of a state, ``(D, D)``; ``None`` where the box does not belong to the state."""
    return box_matrix(state.box, state.position.shape[1]) if hasattr(state, "box") else None


def _concatenated(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _split(tree: Any, parts: int) -> list[Any]:
    if parts == 1:
        return [tree]
    shaped = jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), tree)
    return [jax.tree.map(itemgetter(i), shaped) for i in range(parts)]
