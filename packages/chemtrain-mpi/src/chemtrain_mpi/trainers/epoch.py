"""One epoch: its batches in turn, and what it leaves in the trainer's state."""

from __future__ import annotations

from tqdm import tqdm

from chemtrain_mpi.collectives import Collectives
from chemtrain_mpi.errors import NonFiniteError
from chemtrain_mpi.trainers.batching import epoch_batches
from chemtrain_mpi.trainers.history import History, Stopwatch
from chemtrain_mpi.trainers.points import Points
from chemtrain_mpi.trainers.state import TrainerState
from chemtrain_mpi.trainers.store import Store
from chemtrain_mpi.trainers.update import UpdateRule
from distmd_protocol import agree


class Epochs:
    """Runs epochs. Collective.

    Parameters
    ----------
    comm, points, rule, store, history
        Of the trainer.
    batch
        State points an update.
    bucket
        Put state points that need a new trajectory into the same batches.
    """

    def __init__(
        self,
        comm: Collectives,
        points: Points,
        rule: UpdateRule,
        store: Store,
        history: History,
        batch: int,
        bucket: bool,
    ) -> None:
        self._comm = comm
        self._points = points
        self._rule = rule
        self._store = store
        self._history = history
        self._batch = batch
        self._bucket = bucket and batch < points.count

    @property
    def updates(self) -> int:
        """Updates an epoch."""
        return self._points.count // self._batch

    def run(self, state: TrainerState, bar: tqdm) -> None:
        """Change ``state`` by one epoch.

        Raises
        ------
        NonFiniteError
            On every rank, after the error state has been written.
        """
        epoch, start, losses = state.epoch + 1, state.params, []
        stale = None
        if self._bucket:
            stale = self._rule.stale(state, range(self._points.count), Stopwatch())
        for batch in epoch_batches(self._points.batch_key(epoch), self._points.count, self._batch, stale):
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
