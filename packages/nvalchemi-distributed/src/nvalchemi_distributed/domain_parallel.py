"""Runs an integrator on a system decomposed over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch

from distmd_protocol import Comm, LocalComm, agree, check_environment, rank_zero
from nvalchemi_distributed.checks import check_batch, check_dynamics, refuse_per_atom_state, tensor_state
from nvalchemi_distributed.collectives import no_roll_call
from nvalchemi_distributed.comm import comm_for
from nvalchemi_distributed.config import DomainConfig
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.distributed_model import DistributedModel
from nvalchemi_distributed.domain.epoch import cast_vote
from nvalchemi_distributed.domain.geometry import Boxes, choose_grid
from nvalchemi_distributed.domain.rebuild import Domain, first_boxes, rebalanced, start_epoch
from nvalchemi_distributed.domain.reduce import LocalReducer, MeshReducer
from nvalchemi_distributed.domain.scatter import gather_batch, scatter_batch
from nvalchemi_distributed.domain.transport import Traffic, Transport
from nvalchemi_distributed.dynamics.base import BaseDynamics, check_steps, is_global, store_outputs, take_step
from nvalchemi_distributed.errors import ConfigError, InputError, NonFiniteError, NotPartitionedError
from nvalchemi_distributed.hooks.context import DynamicsContext, Hook, check_hook, runs_at
from nvalchemi_distributed.hooks.neighbor_list import NeighborListHook
from nvalchemi_distributed.mesh import group_of, roll_call_of
from nvalchemi_distributed.minimum_image import check_minimum_image
from nvalchemi_distributed.neighbors.cells import complete_cell
from nvalchemi_distributed.precision import warn_if_reduced
from nvalchemi_distributed.restart import load_dynamics, save_dynamics
from nvalchemi_distributed.sharded_batch import ShardedBatch
from nvalchemi_distributed.spec import MLIPSpec
from nvalchemi_distributed.stages import DynamicsStage
from nvalchemi_distributed.version import package_version


class DomainParallel:
    """Drives an integrator on each rank's owned atoms: halo, neighbour list, model, reductions, migration.

    All methods are collective: every rank calls them in the same order.

    Args:
        dynamics: any :class:`~nvalchemi_distributed.dynamics.base.BaseDynamics`; its hooks see this rank's owned atoms.
        config: see :class:`DomainConfig`.
        n_steps: steps of :meth:`run`; wins over the integrator's.
        hooks: called after the integrator's at each stage; with ``scope = HookScope.GLOBAL`` they see the whole
            system in ``atom_id`` order (within each system) on every rank.
        spec: how the model behaves, such as one read with ``MLIPSpec.load``; its own ``distribution_spec`` when left
            out.

    Raises:
        ConfigError, ModelError: what cannot work, before the first step, on every rank.
    """

    def __init__(
        self,
        dynamics: BaseDynamics,
        config: DomainConfig,
        n_steps: int | None = None,
        hooks: Iterable[Hook] | None = None,
        spec: MLIPSpec | None = None,
    ) -> None:
        self.dynamics, self.config = dynamics, config
        self.hooks: list[Hook] = list(hooks or ())
        for hook in self.hooks:
            check_hook(hook)
        check_steps(n_steps)
        self.n_steps = dynamics.n_steps if n_steps is None else n_steps
        list_hook = check_dynamics(dynamics, config, list(self.hooks), spec)
        group = group_of(config)
        roll_call = roll_call_of(group) if config.debug_collectives else no_roll_call
        self._transport = Transport(group, roll_call)
        self._reducer = MeshReducer(self._transport, dynamics.reduce.registered)
        self.comm: Comm = comm_for(group, roll_call)
        dynamics.reduce, dynamics.comm = self._reducer, self.comm
        self.model = DistributedModel(dynamics.model, self._transport, self._reducer, spec)
        if config.grid_dims is not None:
            choose_grid(self._transport.size, torch.eye(3, dtype=torch.float64), config.grid_dims)
        self._domain = Domain(
            config=config,
            neighbors=dynamics.model.neighbor_config,
            hops=self.model.spec.hops,
            # The vote uses the number the list was built with.
            list_skin=min(list_hook.skin, config.skin) if list_hook is not None else config.skin,
            transport=self._transport,
            reducer=self._reducer,
            comm=self.comm,
        )
        self._boxes: Boxes | None = None
        self._batch: ShardedBatch | None = None
        self._seen_state: set[str] = set()
        self._evaluated = False
        self._closed = False
        self.rebuilds = 0

    # -- life of a run -----------------------------------------------------------------------------------------------

    def partition(self, batch: Batch | None) -> ShardedBatch:
        """Distribute the full batch, which rank zero holds; the other ranks pass ``None``.

        Atoms without ``atom_id`` get their row number. Returns this rank's owned atoms.

        Raises:
            RankError: on every rank, for input that cannot be simulated; it names the atoms or numbers and the remedy.
        """
        self._refuse_closed()
        check_environment(self.comm)
        warn_if_reduced("DomainParallel")
        with agree(self.comm, "partition"):
            if self.comm.rank == 0 and not isinstance(batch, Batch):
                raise InputError(f"partition needs the full Batch on rank zero, got {type(batch).__name__}")
            if self.comm.rank != 0 and batch is not None:
                raise InputError("partition takes the batch on rank zero only; pass None on the other ranks")
        full: list[tuple[Batch, Boxes]] = []
        rank_zero(self.comm, self._prepare, batch, full)
        ready, boxes = full[0] if full else (None, None)
        sharded, self._boxes = scatter_batch(ready, boxes, self.comm, self._transport)
        self._adopt(sharded)
        start_epoch(sharded, self._boxes, self._domain, 0)
        self.rebuilds = 1
        self._evaluated = False
        return sharded

    def _prepare(self, batch: Batch | None, out: list[tuple[Batch, Boxes]]) -> None:
        assert batch is not None
        check_batch(batch)
        check_minimum_image(self.dynamics.model, batch, self.config.cutoff)
        self.dynamics.check_system(batch)
        full = batch.clone()
        for name in self.dynamics.model.model_config.outputs:
            if name != "forces":
                full.discard(name)
        if full.atom_id is None:
            full.atom_id = torch.arange(full.num_nodes)
        if full.image is None:
            full.image = torch.zeros(full.num_nodes, 3, dtype=torch.int64)
        for name, value in self.dynamics.model.system_fields(full).items():
            full.add_key(name, value, level="system", overwrite=True)
        cell = complete_cell(full.cell, full.pbc)
        # One grid serves all systems; the largest decides its shape.
        grid = choose_grid(
            self._transport.size, cell[int(torch.bincount(full.batch_idx).argmax())], self.config.grid_dims
        )
        boxes = first_boxes(full.positions, full.cell, full.pbc, full.batch_idx, grid, self.config.rebalance_above)
        out.append((full, boxes))

    def _adopt(self, batch: ShardedBatch) -> None:
        self._batch = batch
        with agree(self.comm, "partition"):
            refuse_per_atom_state(self.dynamics, batch.num_nodes, batch.num_graphs)
        self._seen_state = tensor_state(self.dynamics)

    def step(self, batch: ShardedBatch) -> ShardedBatch:
        """One step; before the first one the model is evaluated at the given positions."""
        batch = self._mine(batch)
        if not self._evaluated:
            self._evaluate(batch)
            self._evaluated = True
        take_step(self.dynamics, batch, self._evaluate, self._fire)
        return batch

    def run(self, batch: ShardedBatch, n_steps: int | None = None) -> ShardedBatch:
        """``n_steps`` steps (the constructor's when left out), or fewer when every system has converged.

        Raises:
            NonFiniteError: on every rank, when energies, forces or positions stop being finite.
            LostAtomsError: on every rank, when a migration does not add up.
        """
        batch = self._mine(batch)
        steps = self.n_steps if n_steps is None else n_steps
        if steps is None:
            raise ConfigError("n_steps is not set; give it to DomainParallel, to the integrator, or to run()")
        check_steps(steps)
        with ExitStack() as stack:
            for hook in [*self.dynamics.hooks, *self.hooks]:
                check_hook(hook)
                if isinstance(hook, AbstractContextManager):
                    stack.enter_context(hook)
            for _ in range(steps):
                self.step(batch)
                if self.dynamics.converged(batch):
                    self._fire(DynamicsStage.ON_CONVERGE, batch)
                    break
        return batch

    def evaluate(self, batch: ShardedBatch) -> ShardedBatch:
        """The model at the present positions, without a step; outputs are stored in ``batch``."""
        batch = self._mine(batch)
        self._evaluate(batch)
        self._evaluated = True
        return batch

    def gather(self, batch: ShardedBatch | None = None) -> Batch:
        """All systems, each in ``atom_id`` order, on every rank."""
        return gather_batch(self._mine(batch), self._transport)

    def save(self, path: str | Path, *, keep_last: int | None = None) -> Path:
        """Write a checkpoint of kind ``dynamics``, one shard a rank; changes nothing in the run.

        Args:
            path: FOLDER/NAME on a file system that all ranks share.
            keep_last: how many checkpoints of this kind to keep in FOLDER; all when left out.

        Raises:
            CheckpointError, RankError: on every rank, when any rank cannot write.
        """
        batch = self._mine(None)
        assert self._boxes is not None
        domain = self._domain
        meta = {
            "dynamics": self.dynamics.state_dict(),
            "evaluated": self._evaluated,
            "rebuilds": self.rebuilds,
            "cutoff": self.config.cutoff,
            "list_skin": domain.list_skin,
            "ghost_width": domain.ghost_width,
        }
        packages = {"nvalchemi-distributed": package_version(), "torch": torch.__version__}
        return save_dynamics(
            path,
            batch,
            self._boxes,
            self.comm,
            step=self.step_count,
            meta=meta,
            keep_last=keep_last,
            packages=packages,
        )

    def restore(self, path: str | Path) -> ShardedBatch:
        """Continue from :meth:`save`, instead of :meth:`partition`. Returns this rank's owned atoms.

        On the number of ranks that wrote it the continued run is bitwise the one that was saved; on another number
        it is equal to rounding.

        Raises:
            CheckpointError, RankError: on every rank, when it cannot be read.
            ConfigError: another integrator, or other list settings.
        """
        self._refuse_closed()
        check_environment(self.comm)
        warn_if_reduced("DomainParallel")
        batch, self._boxes, meta = load_dynamics(path, self._domain)
        with agree(self.comm, "restoring the integrator"):
            check_minimum_image(self.dynamics.model, batch, self.config.cutoff)
            self.dynamics.check_system(batch)
            self.dynamics.load_state_dict(meta["dynamics"])
        whole = gather_batch(batch, self._transport)
        # What the model derives from the whole system is this model's, not that of the model that was saved.
        with agree(self.comm, "restoring the fields of the model"):
            for name, value in self.dynamics.model.system_fields(whole).items():
                batch.add_key(name, value, level="system", overwrite=True)
        self._adopt(batch)
        self.rebuilds = int(meta["rebuilds"])
        self._evaluated = bool(meta["evaluated"])
        return batch

    def close(self) -> None:
        """End the run: nothing can be stepped afterwards. The process group is the caller's to destroy."""
        self._batch = None
        self._closed = True
        self._transport.close()
        self.comm = LocalComm()
        self.dynamics.reduce, self.dynamics.comm = LocalReducer(self._reducer.registered), LocalComm()

    def __enter__(self) -> DomainParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- counters ----------------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and reduced so far."""
        return self._transport.traffic

    @property
    def step_count(self) -> int:
        """Completed steps."""
        return self.dynamics.step_count

    @property
    def reduce(self) -> MeshReducer:
        """Sums and maxima over the mesh."""
        return self._reducer

    # -- one evaluation ----------------------------------------------------------------------------------------------

    def _evaluate(self, batch: Batch) -> None:
        assert isinstance(batch, ShardedBatch)
        assert self._boxes is not None
        narrow = self._narrow_cell(batch)
        vote = cast_vote(batch.epoch, batch.positions, batch.cell, batch.pbc, self._reducer, anyway=narrow is not None)
        if vote.non_finite:
            bad = ~torch.isfinite(batch.positions).all(-1)
            ids = self._transport.all_gather(batch.atom_id[bad], "non_finite").sort().values.tolist()
            raise NonFiniteError(
                f"positions of atoms {ids[:20]} are not finite at step {self.step_count}; a time step too long, or bad "
                "forces. No frame was written after the last valid step"
            )
        if vote.rebuild:
            with agree(self.comm, "a rebuild"):
                if narrow is not None:
                    raise narrow
                refuse_per_atom_state(self.dynamics, batch.num_nodes, batch.num_graphs, self._seen_state)
            # What has been looked at once is no per-atom state: a later match is a coincidence of sizes.
            self._seen_state |= tensor_state(self.dynamics)
            self._boxes = rebalanced(batch, self._boxes, self._domain)
            start_epoch(batch, self._boxes, self._domain, batch.epoch.number + 1)
            self.rebuilds += 1
        self._before_compute(batch)
        outputs = self.model(batch, step=self.step_count)
        store_outputs(batch, outputs, self.dynamics.model, self.model.spec)
        self._fire(DynamicsStage.AFTER_COMPUTE, batch)

    def _before_compute(self, batch: ShardedBatch) -> None:
        """The hooks of that stage, which come after the ranks have agreed on the list and must not outdate it."""
        stage, own = DynamicsStage.BEFORE_COMPUTE, [*self.dynamics.hooks, *self.hooks]
        if not any(runs_at(h, stage, self.step_count) for h in own if not isinstance(h, NeighborListHook)):
            return
        before = {"positions": batch.positions.clone(), "cell": batch.cell.clone()}
        self._fire(stage, batch)
        for name, value in before.items():
            if not torch.equal(value, getattr(batch, name)):
                raise ConfigError(
                    f"a hook changed {name} at {stage} of step {self.step_count}, after the neighbour list was found "
                    f"valid; let it do that at {DynamicsStage.AFTER_PRE_UPDATE}"
                )

    def _narrow_cell(self, batch: ShardedBatch) -> InputError | None:
        """What is wrong with a cell that the integrator or a hook has changed since the last rebuild.

        It goes through the vote, so that it costs no collective of its own and a rank alone with it does not hang.
        """
        model = self.dynamics.model
        if not model.model_config.minimum_image or torch.equal(batch.cell, batch.epoch.given_cell):
            return None
        try:
            check_minimum_image(model, batch, self.config.cutoff)
        except InputError as error:
            return error
        return None

    def _fire(self, stage: DynamicsStage, batch: Batch) -> None:
        assert isinstance(batch, ShardedBatch)
        whole: Batch | None = None
        for hook in [*self.dynamics.hooks, *self.hooks]:
            # The neighbour list belongs to the epoch; the hook only declares it.
            if isinstance(hook, NeighborListHook) or not runs_at(hook, stage, self.step_count):
                continue
            if is_global(hook):
                whole = gather_batch(batch, self._transport) if whole is None else whole
                hook(self._context(whole, everything=True), stage)
            else:
                hook(self._context(batch, everything=False), stage)

    def _context(self, batch: Batch, *, everything: bool) -> DynamicsContext:
        return DynamicsContext(
            batch=batch,
            model=self.dynamics.model,
            global_rank=self.comm.rank,
            workflow=self,
            comm=self.comm,
            reduce=LocalReducer(self._reducer.registered) if everything else self._reducer,
            step_count=self.step_count,
            converged_mask=self.dynamics.converged_mask,
        )

    def _mine(self, batch: ShardedBatch | None) -> ShardedBatch:
        self._refuse_closed()
        if self._batch is None:
            raise NotPartitionedError("no batch yet; call partition(full batch on rank zero, None elsewhere) first")
        if batch is not None and batch is not self._batch:
            raise NotPartitionedError(
                f"got a {type(batch).__name__} that this DomainParallel did not partition; pass what partition returned"
            )
        return self._batch

    def _refuse_closed(self) -> None:
        if self._closed:
            raise NotPartitionedError("this DomainParallel is closed; make a new one")
