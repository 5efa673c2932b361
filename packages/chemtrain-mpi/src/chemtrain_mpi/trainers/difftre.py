"""Differentiable trajectory reweighting over MPI ranks: the trainer.

Method: Thaler and Zavadlav, Nature Communications 12, 6884 (2021). ``K`` state points, ``T`` snapshots of each.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax_md import partition

from chemtrain_mpi.collectives import Collectives
from chemtrain_mpi.errors import ArgumentError
from chemtrain_mpi.sampler import Sampler
from chemtrain_mpi.timings import Timings
from chemtrain_mpi.trainers.agreement import compare, first_evaluation, first_states, functions, settings
from chemtrain_mpi.trainers.batching import check_batch_size
from chemtrain_mpi.trainers.epoch import Epochs
from chemtrain_mpi.trainers.files import Files
from chemtrain_mpi.trainers.history import History, Stopwatch
from chemtrain_mpi.trainers.memory import log_estimate
from chemtrain_mpi.trainers.objective import LossFn, Objective
from chemtrain_mpi.trainers.options import check_numbers, check_state_kwargs, raw_key, timings_array
from chemtrain_mpi.trainers.points import Points
from chemtrain_mpi.trainers.progress import progress_bar
from chemtrain_mpi.trainers.runtime import check_deterministic, check_devices, processor_features, resolve_comm
from chemtrain_mpi.trainers.state import TrainerState
from chemtrain_mpi.trainers.statepoints import check_agreement, count_state_points, lead_with_points, strong
from chemtrain_mpi.trainers.stopping import Criterion, criterion
from chemtrain_mpi.trainers.store import Store
from chemtrain_mpi.trainers.update import UpdateRule
from chemtrain_mpi.trainers.views import Views
from chemtrain_mpi.trajectories import Params, Trajectory
from distmd_protocol import Comm, agree, check_environment, warn_if_reduced

_log = logging.getLogger(__name__)


class DifftreParallel(Files, Views):
    """Fits the parameters of a potential to ensemble observables at ``K`` state points, dealt to MPI ranks.

    Every rank constructs the trainer with the same arguments and calls its methods in the same order. Parameters,
    optimiser state and trajectories are on every rank; each rank computes a share of the state points.

    Parameters
    ----------
    key
        Seed, from ``jax.random.PRNGKey`` or ``jax.random.key``.
    init_params
        Pytree of parameters.
    optimizer
        An ``optax`` transformation.
    energy_fn_template
        ``energy_fn_template(params) -> energy_fn(position, neighbor=…, **state_kwargs)``.
    simulator_template
        ``simulator_template(energy_fn) -> (init_fn, apply_fn)``, as ``jax_md.simulate`` makes them.
    neighbor_fn
        From ``jax_md.partition.neighbor_list``.
    timings
        From ``process_printouts``.
    state_kwargs
        Pytree (a mapping) that leads with the state-point axis, with ``kT`` and, as needed, ``box`` and ``pressure``
        (needed where the simulator changes the box).
    quantities
        ``quantities[name](state, neighbor=…, energy_params=…, **state_kwargs)`` of a snapshot.
    targets
        ``targets[name] = {"target": (K, …), "gamma": (K,)}``.
    observables
        ``observables[name](quantity_trajectories, weights, **state_kwargs)`` of a state point.
    reference_states
        Where the first trajectories start: a mapping with ``position`` ``(K, N, 3)`` and what else the simulator's
        ``init_fn`` takes (``mass``, …), or a simulator state with a leading axis ``K``.
    reweight_ratio
        A trajectory is used again while ``N_eff ≥ reweight_ratio · T``.
    allowed_reduction
        Shorten each update, by bisection, until ``N_eff ≥ allowed_reduction · T`` at every state point of the batch. If
        no tried fraction does that, the smallest one (1/64) is taken and logged: a run must not stand still. At most
        ``reweight_ratio``; ``None`` takes updates as they are.
    sim_batch_size
        State points an update; −1 for all. At least the number of ranks.
    num_chains
        Independent simulations of each state point, with keys of their own; all their snapshots are reweighted
        together. The trajectory length is that of each.
    parallelism
        ``"single"``, ``"mpi"``, or ``"auto"``: MPI when several ranks were started.
    deterministic
        Parameters, losses and effective sample sizes are bitwise the same for any number of ranks. Needs one XLA
        thread on CPU (``NPROC=1``), deterministic kernels on GPU. ``False``: a rank's state points in one vectorised
        program, for small systems on a GPU (it builds neighbour lists at every step), and one all-reduce of the sums.
    overflow_capacity_multiplier, max_neighbor_retries
        Ratio of two neighbour-list capacities, and how often a trajectory is repeated with the next one.
    vmap_batch
        Snapshots a vectorised energy call.
    bucket_recompute
        Put state points that need a new trajectory into the same batches.
    resample_simstates
        Start each chain of a new trajectory from a snapshot of any chain, drawn by weight, instead of from its last
        state. Simulators without noise of their own get new momenta then.
    free_energies
        Also predict ``"free_energy"`` and ``"entropy"``, differences to the potential that training began with: see
        ``chemtrain_mpi.free_energy``. Targets may name them. Each trajectory keeps its parameters.
    traj_states_on_host
        Keep trajectories and the lists of their snapshots in host memory.
    convergence_criterion
        ``"max_loss"``, ``"ave_loss"``, ``"window_median"``, or a function of the list of epoch losses.
    checkpoint_path
        Folder for checkpoints and error states, on a file system that all ranks see.
    history_path
        File of one JSON line an update.
    progress
        Show a progress bar; ``None``: where standard error is a terminal.
    loss_fn, target_loss_fns
        Loss of a prediction, ``fn(prediction, target)``, in general (mean squared error) and by target.
    comm
        Ranks to use instead of those that ``parallelism`` finds.

    Raises
    ------
    ArgumentError
        For anything that has no meaning or is not supported, with the remedy.
    AgreementError
        On every rank, if ranks were given different arguments or run in different environments. Functions are compared
        by what they do: optimiser, criterion and losses here; in deterministic mode also the energy function and the
        simulator at the start of ``initialize_trajstates``, and quantities and observables before the first update.
    """

    def __init__(
        self,
        key: jax.Array,
        init_params: Params,
        optimizer: optax.GradientTransformation,
        energy_fn_template: Callable[[Params], Callable[..., jax.Array]],
        simulator_template: Callable[[Callable[..., jax.Array]], tuple[Callable, Callable]],
        neighbor_fn: partition.NeighborListFns,
        timings: Timings,
        state_kwargs: Mapping[str, Any],
        quantities: Mapping[str, Callable[..., jax.Array]],
        targets: Mapping[str, Mapping[str, Any]],
        observables: Mapping[str, Callable[..., jax.Array]],
        *,
        reference_states: Any,
        reweight_ratio: float = 0.9,
        allowed_reduction: float | None = None,
        sim_batch_size: int = 1,
        num_chains: int = 1,
        parallelism: str = "auto",
        deterministic: bool = True,
        overflow_capacity_multiplier: float = 1.25,
        max_neighbor_retries: int = 3,
        vmap_batch: int = 1,
        bucket_recompute: bool = True,
        resample_simstates: bool = False,
        free_energies: bool = False,
        traj_states_on_host: bool = False,
        convergence_criterion: str | Criterion | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        history_path: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
        loss_fn: LossFn | None = None,
        target_loss_fns: Mapping[str, LossFn] | None = None,
        comm: Comm | None = None,
    ) -> None:
        self._comm = Collectives(resolve_comm(parallelism, comm))
        with self._comm.named("construct the trainer"):
            with agree(self._comm, "constructing the trainer"):
                check_devices(parallelism, self._comm)
                check_numbers(reweight_ratio, allowed_reduction, max_neighbor_retries, vmap_batch, num_chains)
                if deterministic:
                    check_deterministic()
                check_state_kwargs(state_kwargs)
                key = raw_key(key)
                count = count_state_points(targets)
                size = check_batch_size(sim_batch_size, count, self._comm.size)
                state_kwargs = lead_with_points("state_kwargs", dict(state_kwargs), count)
                targets = lead_with_points("targets", {name: dict(target) for name, target in targets.items()}, count)
                reference_states = lead_with_points("reference_states", reference_states, count)
                params = strong(init_params)
                self._criterion = criterion(convergence_criterion)
                sampler = Sampler(
                    energy_fn_template,
                    simulator_template,
                    neighbor_fn,
                    timings,
                    overflow_capacity_multiplier,
                    max_neighbor_retries,
                    vmap_batch,
                    together=not deterministic,
                )
                opt_state, propose = optimizer.init(params), jax.jit(optimizer.update)
                objective = Objective(
                    sampler, quantities, observables, targets, loss_fn, target_loss_fns, free_energies
                )
            # Other processors may round differently.
            check_environment(self._comm, processor_features() if deterministic else None)
            digests = check_agreement(
                self._comm,
                {
                    "key": key,
                    "init_params": params,
                    "optimizer": opt_state,
                    "timings": timings_array(timings),
                    "state_kwargs": state_kwargs,
                    "targets": targets,
                    "reference_states": reference_states,
                    "quantities": sorted(quantities),
                    "observables": sorted(observables),
                    "reweight_ratio": reweight_ratio,
                    "allowed_reduction": -1.0 if allowed_reduction is None else allowed_reduction,
                    "sim_batch_size": size,
                    "num_chains": num_chains,
                    "simulator_template": settings(simulator_template),
                    "deterministic": deterministic,
                    "overflow_capacity_multiplier": overflow_capacity_multiplier,
                    "max_neighbor_retries": max_neighbor_retries,
                    "vmap_batch": vmap_batch,
                    "bucket_recompute": bucket_recompute,
                    "resample_simstates": resample_simstates,
                    "free_energies": free_energies,
                    "traj_states_on_host": traj_states_on_host,
                    "convergence_criterion": "function" if callable(convergence_criterion) else convergence_criterion,
                    "checkpoint_path": str(checkpoint_path),
                },
            )
            self._exact = deterministic
            called = partial(functions, propose, params, opt_state, self._criterion, objective.losses, targets)
            compare(self._comm, "comparing the functions", called, deterministic)
        if self._comm.size > 1:
            warn_if_reduced("DifftreParallel")
        self._sampler = sampler
        self._points = Points(
            self._comm,
            key,
            sampler,
            objective,
            state_kwargs,
            targets,
            reference_states,
            count,
            traj_states_on_host,
            resample_simstates,
            num_chains,
            free_energies,
        )
        snapshots = timings.snapshots * num_chains
        self._rule = UpdateRule(self._points, propose, snapshots, reweight_ratio, allowed_reduction, deterministic)
        self._store = Store(self._comm, self._points, checkpoint_path, digests)
        self._history = History(None if history_path is None else Path(history_path), self._comm.rank == 0)
        self._epochs = Epochs(self._comm, self._points, self._rule, self._store, self._history, size, bucket_recompute)
        self._evaluated = False
        self._progress = progress
        self._state = TrainerState(params=params, opt_state=opt_state, best_params=params)

    def initialize_trajstates(self, params: Params | None = None, *, num_runs: int = 1) -> None:
        """Simulate the first trajectory of every state point. Collective.

        Parameters
        ----------
        params
            Potential to sample; ``None``: the current parameters.
        num_runs
            Trajectories run one after the other, each from the end of the one before; the last one is kept.

        Raises
        ------
        ArgumentError
            If ``num_runs`` is below 1.
        RankError
            On every rank, if a trajectory fails on any.
        """
        if num_runs < 1:
            raise ArgumentError(f"num_runs is {num_runs}; it must be at least 1")
        params = self._state.params if params is None else strong(params)
        with agree(self._comm, "preparing the state points"):
            trajectories = self._points.start(params)
        if self._exact:
            compare(self._comm, "comparing the starts", partial(first_states, trajectories), exact=True)
        if self._comm.rank == 0:
            log_estimate(self._sampler, trajectories, params if self._points.free_energies else None)
        self._state.trajectories = self._run_all(params, trajectories, num_runs, anew=True)

    def refresh_trajstates(self, *, num_runs: int = 1) -> None:
        """Simulate every state point anew under the current parameters, from where it stands. Collective.

        For predictions of a finished training, without a reweighting that ends in it. ``num_runs`` and errors are those
        of ``initialize_trajstates``.
        """
        if num_runs < 1:
            raise ArgumentError(f"num_runs is {num_runs}; it must be at least 1")
        self._state.trajectories = self._run_all(self._state.params, self._state.require_trajectories(), num_runs)

    def train(self, max_epochs: int, checkpoint_freq: int | None = None, threshold: float | None = None) -> None:
        """Train for up to ``max_epochs`` more epochs. Collective.

        Parameters
        ----------
        max_epochs
            Epochs; each sees every state point once.
        checkpoint_freq
            Epochs between checkpoints in ``checkpoint_path``, the last one always among them; ``None``: none.
        threshold
            Stop when the convergence criterion falls below it.

        Raises
        ------
        NotInitializedError
            If there are no trajectories yet.
        NonFiniteError
            On every rank, if a loss, gradient or parameter is not finite on any: the update is undone, and an error
            state is written to ``checkpoint_path``.
        RankError
            On every rank, if any fails otherwise.
        """
        trajectories = self._state.require_trajectories()
        if checkpoint_freq is not None and (checkpoint_freq < 1 or self._store.folder is None):
            raise ArgumentError(f"checkpoint_freq {checkpoint_freq} needs to be at least 1, and a checkpoint_path")
        if threshold is not None and self._criterion is None:
            raise ArgumentError("threshold without a convergence_criterion; give the trainer one of 'max_loss', …")
        if self._exact and not self._evaluated:
            probe = partial(first_evaluation, self._points, self._state.params, trajectories)
            compare(self._comm, "comparing the first evaluation", probe, exact=True)
            self._evaluated = True
        with progress_bar(self._shows(), "training", max_epochs * self._epochs.updates) as bar:
            for index in range(max_epochs):
                self._epochs.run(self._state, bar)
                last = index == max_epochs - 1 or self._converged(threshold)
                if checkpoint_freq is not None and (last or self._state.epoch % checkpoint_freq == 0):
                    self._store.save_epoch(self._state)
                if last:
                    break

    def predict(
        self, params: Params | None = None, state_kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """Every observable at every state point, reweighted from the stored trajectories. Collective.

        Parameters
        ----------
        params
            ``None``: the current ones.
        state_kwargs
            Other temperatures or pressures (``kT``, ``pressure``), as in the constructor; ``None``: the trainer's own.

        Returns
        -------
        By observable, arrays that lead with ``K``; ``n_eff`` beside them tells how far they can be trusted. Free energy
        and entropy are left out at other temperatures, where the potential that training began with was not sampled.

        Raises
        ------
        ArgumentError
            For other state keywords: snapshots cannot be reweighted to another box.
        """
        trajectories = self._state.require_trajectories()
        params = self._state.params if params is None else strong(params)
        kwargs = self._points.kwargs if state_kwargs is None else self._points.kwargs_with(state_kwargs)
        same_temperature = state_kwargs is None or "kT" not in state_kwargs
        results = self._points.predict(params, trajectories, kwargs, Stopwatch(), same_temperature)
        everything = range(self._points.count)
        stacked = {name: np.stack([np.asarray(results[k][0][name]) for k in everything]) for name in results[0][0]}
        return {**stacked, "n_eff": np.array([float(results[k][1]) for k in everything])}

    def _run_all(
        self, params: Params, trajectories: list[Trajectory], num_runs: int, anew: bool = False
    ) -> list[Trajectory]:
        watch, everything = Stopwatch(), range(self._points.count)
        with progress_bar(self._shows(), "trajectories", num_runs) as bar:
            for _ in range(num_runs):
                if anew:
                    # Free energies count from the last of these.
                    trajectories = [replace(t, free_energy=None) for t in trajectories]
                self._state.runs += 1
                run = self._state.runs
                new = self._points.recompute(everything, params, trajectories, self._state.epoch, watch, run)
                trajectories = [new[k] for k in everything]
                bar.update()
        if self._comm.rank == 0:
            _log.info("trajectories of %d state points: %.1f s", self._points.count, watch.seconds["simulating"])
        return trajectories

    def _converged(self, threshold: float | None) -> bool:
        return (
            threshold is not None
            and self._criterion is not None
            and (self._criterion(self._state.epoch_losses) < threshold)
        )

    def _shows(self) -> bool | None:
        return False if self._comm.rank else self._progress
