"""Differentiable trajectory reweighting over MPI ranks: the trainer.

Method: Thaler and Zavadlav, Nature Communications 12, 6884 (2021). ``K`` state points, ``T`` snapshots.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax_md import partition
from tqdm import tqdm

from chemtrain_mpi.collectives import Collectives
from chemtrain_mpi.errors import ArgumentError, NonFiniteError
from chemtrain_mpi.timings import Timings
from chemtrain_mpi.trainers.batching import check_batch_size, epoch_batches
from chemtrain_mpi.trainers.history import History, Stopwatch
from chemtrain_mpi.trainers.objective import LossFn, Objective
from chemtrain_mpi.trainers.options import check_numbers, check_other_state, check_state_kwargs, raw_key, timings_array
from chemtrain_mpi.trainers.points import Points
from chemtrain_mpi.trainers.progress import progress_bar
from chemtrain_mpi.trainers.runtime import check_deterministic, check_devices, processor_features, resolve_comm
from chemtrain_mpi.trainers.state import TrainerState
from chemtrain_mpi.trainers.statepoints import check_agreement, count_state_points, lead_with_points, strong
from chemtrain_mpi.trainers.stopping import Criterion, criterion
from chemtrain_mpi.trainers.store import Store
from chemtrain_mpi.trainers.update import UpdateRule
from chemtrain_mpi.trainers.views import Views
from chemtrain_mpi.trajectories import Params, Sampler, Trajectory
from distmd_protocol import Comm, agree, check_environment, warn_if_reduced

_log = logging.getLogger(__name__)


class DifftreParallel(Views):
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
    parallelism
        ``"single"``, ``"mpi"``, or ``"auto"``: MPI when several ranks were started.
    deterministic
        Parameters, losses and effective sample sizes are bitwise the same for any number of ranks. Needs one XLA
        thread on CPU (``NPROC=1``), deterministic kernels on GPU. ``False``: one all-reduce of local sums instead.
    overflow_capacity_multiplier, max_neighbor_retries
        Ratio of two neighbour-list capacities, and how often a trajectory is repeated with the next one.
    vmap_batch
        Snapshots a vectorised energy call.
    bucket_recompute
        Put state points that need a new trajectory into the same batches.
    resample_simstates
        Start a new trajectory from a snapshot drawn by weight instead of the last state.
    traj_states_on_host
        Keep trajectories in host memory.
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
        On every rank, if ranks were given different arguments or run in different environments.
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
        parallelism: str = "auto",
        deterministic: bool = True,
        overflow_capacity_multiplier: float = 1.25,
        max_neighbor_retries: int = 3,
        vmap_batch: int = 1,
        bucket_recompute: bool = True,
        resample_simstates: bool = False,
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
                check_numbers(reweight_ratio, allowed_reduction, max_neighbor_retries, vmap_batch)
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
                )
                opt_state = optimizer.init(params)
                objective = Objective(sampler, quantities, observables, targets, loss_fn, target_loss_fns)
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
                    "deterministic": deterministic,
                    "overflow_capacity_multiplier": overflow_capacity_multiplier,
                    "max_neighbor_retries": max_neighbor_retries,
                    "vmap_batch": vmap_batch,
                    "bucket_recompute": bucket_recompute,
                    "resample_simstates": resample_simstates,
                    "traj_states_on_host": traj_states_on_host,
                    # Two ranks' functions cannot be compared.
                    "convergence_criterion": "function" if callable(convergence_criterion) else convergence_criterion,
                    "checkpoint_path": str(checkpoint_path),
                },
            )
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
        )
        self._rule = UpdateRule(
            self._points, optimizer, timings.snapshots, reweight_ratio, allowed_reduction, deterministic
        )
        self._batch_size = size
        self._bucket = bucket_recompute and size < count
        self._store = Store(self._comm, self._points, checkpoint_path, digests)
        self._history = History(None if history_path is None else Path(history_path), self._comm.rank == 0)
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
        self._log_memory(trajectories)
        self._state.trajectories = self._run_all(params, trajectories, num_runs)

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
        self._state.require_trajectories()
        if checkpoint_freq is not None and (checkpoint_freq < 1 or self._store.folder is None):
            raise ArgumentError(f"checkpoint_freq {checkpoint_freq} needs to be at least 1, and a checkpoint_path")
        if threshold is not None and self._criterion is None:
            raise ArgumentError("threshold without a convergence_criterion; give the trainer one of 'max_loss', …")
        batches = self._points.count // self._batch_size
        with progress_bar(self._shows(), "training", max_epochs * batches) as bar:
            for index in range(max_epochs):
                self._epoch(bar)
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
        By observable, arrays that lead with ``K``; ``n_eff`` beside them tells how far they can be trusted.

        Raises
        ------
        ArgumentError
            For other state keywords: snapshots cannot be reweighted to another box.
        """
        trajectories = self._state.require_trajectories()
        params = self._state.params if params is None else strong(params)
        kwargs = self._points.kwargs
        if state_kwargs is not None:
            check_other_state(state_kwargs)
            led = lead_with_points("state_kwargs", dict(state_kwargs), self._points.count)
            kwargs = [{**own, **{n: v[k] for n, v in led.items()}} for k, own in enumerate(kwargs)]
        results = self._points.predict(params, trajectories, kwargs, Stopwatch())
        everything = range(self._points.count)
        stacked = {name: np.stack([np.asarray(results[k][0][name]) for k in everything]) for name in results[0][0]}
        return {**stacked, "n_eff": np.array([float(results[k][1]) for k in everything])}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a resumable checkpoint. Collective; returns its folder.

        Raises
        ------
        CheckpointError
            On every rank, after a training that broke off within an epoch, or if the folder cannot be written.
        """
        return self._store.save(self._state, path)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint, bit for bit. Collective; nothing changes if it is refused on any rank.

        Raises
        ------
        CheckpointError
            On every rank: an error state, an unfinished epoch, another number of ranks, other shapes, another key,
            timings, state keywords or targets.
        """
        self._state = self._store.restore(self._state, path)

    def save_trajstates(self, path: str | os.PathLike[str]) -> Path:
        """Write the trajectories alone. Collective; rank zero writes, failures reach every rank."""
        return self._store.save_trajectories(self._state, path)

    def load_trajstates(self, path: str | os.PathLike[str]) -> None:
        """Take the trajectories of ``save_trajstates``, written under any number of ranks. Collective.

        Raises
        ------
        CheckpointError
            On every rank: other shapes, timings or state keywords.
        """
        self._state.trajectories = self._store.load_trajectories(self._state, path)

    def _run_all(self, params: Params, trajectories: list[Trajectory], num_runs: int) -> list[Trajectory]:
        watch, everything = Stopwatch(), range(self._points.count)
        with progress_bar(self._shows(), "trajectories", num_runs) as bar:
            for _ in range(num_runs):
                self._state.runs += 1
                run = self._state.runs
                new = self._points.recompute(everything, params, trajectories, self._state.epoch, watch, run)
                trajectories = [new[k] for k in everything]
                bar.update()
        if self._comm.rank == 0:
            _log.info("trajectories of %d state points: %.1f s", self._points.count, watch.seconds["simulating"])
        return trajectories

    def _epoch(self, bar: tqdm) -> None:
        state = self._state
        epoch, start, losses = state.epoch + 1, state.params, []
        stale = None
        if self._bucket:
            stale = self._rule.stale(state, range(self._points.count), Stopwatch())
        for batch in epoch_batches(self._points.batch_key(epoch), self._points.count, self._batch_size, stale):
            try:
                entry = self._rule.update(state, batch, epoch)
            except NonFiniteError as error:
                self._store.save_error_state(state, epoch, batch, error)
                raise
            losses.append((entry["loss"], len(batch)))
            with self._comm.named("record the update"), agree(self._comm, "recording the update"):
                self._history.add(entry)
            bar.set_postfix_str(f"loss {entry['loss']:.4g}, recomputed {len(entry['recomputed'])}/{len(batch)}")
            bar.update()
        loss = sum(value * count for value, count in losses) / self._points.count
        state.epoch = epoch
        state.epoch_losses.append(loss)
        if loss <= state.best_loss:
            state.best_loss, state.best_params = loss, start
        state.mid_epoch = False

    def _converged(self, threshold: float | None) -> bool:
        return threshold is not None and self._criterion is not None and (
            self._criterion(self._state.epoch_losses) < threshold
        )

    def _log_memory(self, trajectories: list[Trajectory]) -> None:
        if self._comm.rank:
            return
        first, snapshots = trajectories[0], self._sampler.timings.snapshots
        stored = sum(leaf.nbytes for leaf in jax.tree.leaves(first.state)) * (snapshots + 1)
        # A rank keeps the lists of all state points that were ever its share, until their next trajectory.
        lists = self._sampler.neighbors(first).idx.nbytes * (snapshots + 1)
        _log.info(
            "memory on every rank: %.1f MB of trajectories and, at first capacity, up to %.1f MB of neighbour lists",
            stored * self._points.count / 1e6,
            lists * self._points.count / 1e6,
        )

    def _shows(self) -> bool | None:
        return False if self._comm.rank else self._progress
