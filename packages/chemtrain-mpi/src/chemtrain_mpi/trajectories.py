"""Trajectories of one state point, as one compiled program whatever the number of ranks or state points.

``T`` snapshots, ``N`` particles. Everything here works on one state point; the trainer deals state points to ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_md import partition, quantity

from chemtrain_mpi.capacity import Capacity, NeighborLists
from chemtrain_mpi.errors import OverflowRetriesError
from chemtrain_mpi.timings import Timings

SimState = Any
Params = Any
Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class Trajectory:
    """What is kept of one state point.

    Attributes
    ----------
    state
        Simulator state after the last step: where the next trajectory starts.
    reference_position
        Positions ``(N, 3)`` at which the neighbour list was last valid and built; in NPT the list belongs to them and
        to the box of ``state``.
    capacity
        Its capacity.
    snapshots
        Simulator states with a leading axis ``T``; ``None`` before the first trajectory.
    reference_energy
        ``U`` of the snapshots under the potential that sampled them, ``(T,)``.
    reference_kwargs
        The state keywords (``kT``, ``pressure``, ``box``, …) under which it was sampled.
    cache
        What can be made again from the rest, with the same bits: the list built at ``reference_position``, and the
        slots of every snapshot's own list. Neither stored nor sent.
    """

    state: SimState
    reference_position: jax.Array
    capacity: Capacity
    snapshots: SimState | None
    reference_energy: jax.Array | None
    reference_kwargs: dict[str, Any]
    cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


def box_kwargs(state: SimState, kwargs: Kwargs) -> dict[str, Any]:
    """The ``box`` keyword of a snapshot: the state's own in NPT, else the state point's, else none."""
    box = getattr(state, "box", None)
    box = kwargs.get("box") if box is None else box
    return {} if box is None else {"box": box}


def energy_kwargs(state: SimState, kwargs: Kwargs) -> dict[str, Any]:
    """State keywords for the energy function, with the box of this snapshot."""
    return {**kwargs, **box_kwargs(state, kwargs)}


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
        self._simulate = jax.jit(self._simulate_program)
        self._lists = jax.jit(self._lists_program)
        self._energies = jax.jit(self._energies_program)

    def start(self, params: Params, reference: Any, kwargs: Kwargs, key: jax.Array) -> Trajectory:
        """A state point before its first step.

        Parameters
        ----------
        reference
            A mapping with ``position`` ``(N, 3)`` and optionally ``mass``, ``momenta`` and other keywords of the
            simulator's ``init_fn``, or a simulator state.
        """
        if hasattr(reference, "position"):
            state = jax.tree.map(jnp.asarray, reference)
            capacity = self.lists.first(state.position, **box_kwargs(state, kwargs))
        else:
            extra = dict(reference)
            position = jnp.asarray(extra.pop("position"))
            box = box_kwargs(None, kwargs)
            capacity = self.lists.first(position, **box)
            neighbors = self.lists.allocate(position, capacity, **box)
            state = self._start(params, key, position, neighbors, extra, dict(kwargs))
        return Trajectory(state, state.position, capacity, None, None, dict(kwargs))

    def run(self, params: Params, before: Trajectory, kwargs: Kwargs, key: jax.Array, name: str) -> Trajectory:
        """The trajectory that follows ``before``.

        After an overflow it starts again from the state it had before, bit for bit, with the next capacity rung and a
        list built at the last valid reference positions: the outcome is that of a run that began with that capacity.

        Parameters
        ----------
        key
            Replaces the random state of a stochastic simulator.
        name
            Of the state point, for the error.

        Raises
        ------
        OverflowRetriesError
            Naming the state point, the capacity reached and the remedy.
        """
        state = before.state.set(rng=key) if hasattr(before.state, "rng") else before.state
        capacity, neighbors = before.capacity, self.neighbors(before)
        for attempt in range(self.max_retries + 1):
            if attempt:
                neighbors = self.lists.allocate(before.reference_position, capacity, **box_kwargs(state, kwargs))
            last, last_neighbors, snapshots, overflow = self._simulate(params, state, neighbors, dict(kwargs))
            if not bool(overflow) and hasattr(last, "box"):
                # The run built its list under a box that is not kept. What is kept must give the list again, bit for
                # bit, on any rank and after a restart.
                box = box_kwargs(last, kwargs)
                last_neighbors = self.lists.allocate(last_neighbors.reference_position, capacity, **box)
            if not bool(overflow):
                # The snapshots' own lists are built elsewhere than the run's were, and may be fuller.
                slots, overflow = self._lists(snapshots, last_neighbors, dict(kwargs))
            if not bool(overflow):
                energy = self._energies(params, snapshots, last_neighbors, slots, dict(kwargs))
                reference = last_neighbors.reference_position
                cache = {"neighbors": last_neighbors, "slots": slots}
                return Trajectory(last, reference, capacity, snapshots, energy, dict(kwargs), cache)
            reached, capacity = capacity, self.lists.larger(capacity)
        raise OverflowRetriesError(
            f"the neighbour list of {name} overflowed {self.max_retries + 1} times, last at {reached.slots} slots "
            f"(cells of {reached.cell}); raise max_neighbor_retries or overflow_capacity_multiplier, and look at the "
            "trajectory: a collapsing or exploding system overflows at any capacity"
        )

    def neighbors(self, trajectory: Trajectory) -> partition.NeighborList:
        """The list built at the reference positions, from which the snapshots' own lists are made."""
        if "neighbors" not in trajectory.cache:
            box = box_kwargs(trajectory.state, trajectory.reference_kwargs)
            neighbors = self.lists.allocate(trajectory.reference_position, trajectory.capacity, **box)
            trajectory.cache["neighbors"] = neighbors
        return trajectory.cache["neighbors"]

    def slots(self, trajectory: Trajectory) -> jax.Array:
        """Slots of every snapshot's own list, with a leading axis ``T``: for one trajectory they are made once."""
        if "slots" not in trajectory.cache:
            slots, _ = self._lists(trajectory.snapshots, self.neighbors(trajectory), dict(trajectory.reference_kwargs))
            trajectory.cache["slots"] = slots
        return trajectory.cache["slots"]

    def energies(self, params: Params, trajectory: Trajectory, kwargs: Kwargs) -> jax.Array:
        """``U`` of the stored snapshots under ``params``, ``(T,)``."""
        lists = self.neighbors(trajectory), self.slots(trajectory)
        return self._energies(params, trajectory.snapshots, *lists, dict(kwargs))

    def energy_dtype(self, params: Params, trajectory: Trajectory) -> Any:
        """Type of the potential energy, without computing one."""
        state, neighbors = trajectory.state, self.neighbors(trajectory)
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
            The list at the reference positions, and the slots of each snapshot's own.
        """

        # Without the checkpoint the gradient would keep the pair arrays of all snapshots at once.
        @jax.checkpoint
        def one(pair: tuple[SimState, jax.Array]) -> Any:
            state, own = pair
            return fn(state, neighbors.set(idx=own, reference_position=state.position))

        batch = None if self.snapshot_batch == 1 else self.snapshot_batch
        return jax.lax.map(one, (snapshots, slots), batch_size=batch)

    def _lists_program(
        self, snapshots: SimState, neighbors: partition.NeighborList, kwargs: Kwargs
    ) -> tuple[jax.Array, jax.Array]:
        self.compilations["lists"] += 1

        def one(state: SimState) -> tuple[jax.Array, jax.Array]:
            own = neighbors.update(state.position, **box_kwargs(state, kwargs))
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
            state, neighbors = carry
            neighbors = neighbors.update(state.position, **box_kwargs(state, kwargs))
            return (apply_fn(state, neighbor=neighbors, **apply_kwargs), neighbors), None

        def sample(carry: tuple, _: None) -> tuple[tuple, SimState]:
            carry, _ = jax.lax.scan(step, carry, None, length=self.timings.steps_per_snapshot)
            return carry, carry[0]

        carry, _ = jax.lax.scan(step, (state, neighbors), None, length=self.timings.equilibration_steps)
        (state, neighbors), snapshots = jax.lax.scan(sample, carry, None, length=self.timings.snapshots)
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


def to_host(trajectory: Trajectory) -> Trajectory:
    """The same with every array in host memory."""
    arrays = (trajectory.state, trajectory.reference_position, trajectory.snapshots, trajectory.reference_energy)
    state, position, snapshots, energy = jax.tree.map(np.asarray, arrays)
    return replace(
        trajectory, state=state, reference_position=position, snapshots=snapshots, reference_energy=energy
    )
