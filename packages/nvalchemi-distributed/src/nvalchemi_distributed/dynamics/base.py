"""The step that every integrator shares. Integrators are written for one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from distmd_protocol import Comm, LocalComm
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.data.fields import NODE_FIELDS, SYSTEM_FIELDS, Level
from nvalchemi_distributed.domain.reduce import LocalReducer, Reducer
from nvalchemi_distributed.dynamics.convergence import ConvergenceHook
from nvalchemi_distributed.errors import ConfigError, InputError, ModelError, NonFiniteError
from nvalchemi_distributed.hooks.context import DynamicsContext, Hook, check_hook, runs_at
from nvalchemi_distributed.hooks.neighbor_list import NeighborListHook
from nvalchemi_distributed.minimum_image import check_minimum_image
from nvalchemi_distributed.models.base import BaseModelMixin, ModelOutputs
from nvalchemi_distributed.models.gradient import evaluate
from nvalchemi_distributed.spec import MLIPSpec, OutputKind
from nvalchemi_distributed.stages import DynamicsStage, HookScope

__all__ = ["BaseDynamics", "ConvergenceHook", "DynamicsStage"]


class BaseDynamics:
    """Base of integrators and optimizers. Subclasses override :meth:`pre_update` and :meth:`post_update`.

    One step is ``pre_update``, the model, ``post_update``; both updates modify the batch in place. Before the first
    step of a run the model is evaluated once, so that ``batch.forces`` are those of the given positions.
    Whatever sums or compares over all atoms goes through ``self.reduce``: the identity on one process, the sum over
    ranks under ``DomainParallel``. Per-atom state belongs into the batch (``batch.add_key``), where it travels with its
    atom.

    Args:
        model: the wrapped model.
        hooks: called at their stage, in this order.
        n_steps: steps of :meth:`run`.
        convergence_hook: ends the run when every system has converged.

    Raises:
        ConfigError: hooks or steps that cannot work.
        ModelError: the model lacks an output that this integrator reads (``__needs_keys__``).
    """

    __needs_keys__: ClassVar[set[str]] = {"forces"}
    __provides_keys__: ClassVar[set[str]] = {"positions", "velocities"}

    def __init__(
        self,
        model: BaseModelMixin,
        *,
        hooks: Iterable[Hook] | None = None,
        n_steps: int | None = None,
        convergence_hook: ConvergenceHook | None = None,
    ) -> None:
        self.model = model
        self.hooks: list[Hook] = list(hooks or ())
        for hook in self.hooks:
            check_hook(hook)
        check_steps(n_steps)
        missing = set(self.__needs_keys__) - set(model.model_config.outputs)
        if missing:
            raise ModelError(
                f"{type(self).__name__} reads {sorted(missing)}, which {type(model).__name__} does not give"
            )
        self.n_steps = n_steps
        self.convergence_hook = convergence_hook
        self.step_count = 0
        self.reduce: Reducer = LocalReducer()
        self.comm: Comm = LocalComm()
        self.converged_mask: Tensor | None = None
        self._evaluated: Batch | None = None

    # -- what a subclass writes --------------------------------------------------------------------------------------

    def pre_update(self, batch: Batch) -> None:
        """Before the model: usually half a kick and the drift."""

    def post_update(self, batch: Batch) -> None:
        """After the model: usually the other half kick."""

    def check_system(self, batch: Batch) -> None:
        """Refuse a batch that does not fit this integrator's arguments; called before the first step.

        Under ``DomainParallel`` ``batch`` is the whole system, or this rank's atoms after a restart.
        """

    # -- one process -------------------------------------------------------------------------------------------------

    def compute(self, batch: Batch) -> None:
        """Evaluate the model on ``batch`` and store its outputs there, with the hooks before and after.

        Raises:
            NonFiniteError: NaN or infinite outputs or positions; names atoms and step.
        """
        bad = (~torch.isfinite(batch.positions.detach()).all(-1)).nonzero().squeeze(-1)
        if bad.numel():
            raise NonFiniteError(f"positions of atoms {bad[:20].tolist()} are not finite at step {self.step_count}")
        self._call_hooks(DynamicsStage.BEFORE_COMPUTE, batch)
        self._refresh_list(batch)
        # At every step: integrator and hooks may change the cell.
        check_minimum_image(self.model, batch)
        outputs = evaluate(self.model, batch)
        check_finite(outputs, batch, self.step_count)
        store_outputs(batch, outputs, self.model)
        self._call_hooks(DynamicsStage.AFTER_COMPUTE, batch)

    def __enter__(self) -> Self:
        """For ``with NVE(…) as md``; a run closes its own hooks, so there is nothing left to do at the end."""
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is held open between runs."""

    def step(self, batch: Batch) -> Batch:
        """One step; evaluates the model first when this batch has not been."""
        if self._evaluated is not batch:
            self.check_system(batch)
            self.compute(batch)
            self._evaluated = batch
        take_step(self, batch, self.compute, self._call_hooks)
        return batch

    def run(self, batch: Batch, n_steps: int | None = None) -> Batch:
        """``n_steps`` steps (the constructor's when left out), or fewer when everything has converged."""
        steps = self.n_steps if n_steps is None else n_steps
        if steps is None:
            raise ConfigError("n_steps is not set; give it to the constructor or to run()")
        check_steps(steps)
        check_batch_for_run(batch)
        with ExitStack() as stack:
            for hook in self.hooks:
                check_hook(hook)
                if isinstance(hook, AbstractContextManager):
                    stack.enter_context(hook)
            for _ in range(steps):
                self.step(batch)
                if self.converged(batch):
                    self._call_hooks(DynamicsStage.ON_CONVERGE, batch)
                    break
        return batch

    def converged(self, batch: Batch) -> bool:
        """Whether every system has converged, decided over all ranks; false without a convergence hook."""
        if self.convergence_hook is None:
            return False
        self.converged_mask = self.convergence_hook.converged(batch, self.reduce)
        return bool(self.converged_mask.all())

    def context(self, batch: Batch) -> DynamicsContext:
        """What hooks are given."""
        return DynamicsContext(
            batch=batch,
            model=self.model,
            global_rank=self.comm.rank,
            workflow=self,
            comm=self.comm,
            reduce=self.reduce,
            step_count=self.step_count,
            converged_mask=self.converged_mask,
        )

    def _call_hooks(self, stage: DynamicsStage, batch: Batch) -> None:
        for hook in self.hooks:
            if runs_at(hook, stage, self.step_count):
                hook(self.context(batch), stage)

    def _refresh_list(self, batch: Batch) -> None:
        """Once more for a list hook that others came after: they may have moved atoms or changed the cell."""
        due = [hook for hook in self.hooks if runs_at(hook, DynamicsStage.BEFORE_COMPUTE, self.step_count)]
        for hook in due[:-1]:
            if isinstance(hook, NeighborListHook):
                hook.update(batch)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state for a checkpoint; subclasses add their own to it."""
        return {"step_count": self.step_count, "class": type(self).__name__}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        if state.get("class") != type(self).__name__:
            raise ConfigError(f"the checkpoint is of {state.get('class')}, this integrator is {type(self).__name__}")
        self.step_count = int(state["step_count"])


def take_step(
    dynamics: BaseDynamics,
    batch: Batch,
    evaluate: Callable[[Batch], None],
    fire: Callable[[DynamicsStage, Batch], None],
) -> None:
    """The order of one step, the same on one process and decomposed."""
    fire(DynamicsStage.BEFORE_STEP, batch)
    fire(DynamicsStage.BEFORE_PRE_UPDATE, batch)
    dynamics.pre_update(batch)
    fire(DynamicsStage.AFTER_PRE_UPDATE, batch)
    evaluate(batch)
    fire(DynamicsStage.BEFORE_POST_UPDATE, batch)
    dynamics.post_update(batch)
    fire(DynamicsStage.AFTER_POST_UPDATE, batch)
    dynamics.step_count += 1
    fire(DynamicsStage.AFTER_STEP, batch)


def store_outputs(batch: Batch, outputs: ModelOutputs, model: BaseModelMixin, spec: MLIPSpec | None = None) -> None:
    """Put outputs into the batch, and take away those of earlier evaluations that this one did not give.

    Args:
        batch: what was evaluated.
        outputs: of the model.
        model: which outputs there may be.
        spec: says which outputs are per atom; the model's own when left out.

    Raises:
        ModelError: an output that may be per atom or per system, and no spec that says which.
    """
    spec = model.distribution_spec if spec is None else spec
    for name in model.model_config.outputs - set(outputs):
        if name != "forces":
            batch.discard(name)
    for name, value in outputs.items():
        value = value.detach()
        if name == "forces":
            batch.forces = value.to(batch.dtype)
        else:
            batch.add_key(name, value, level=_level(name, value, batch, spec), overwrite=True)


def _level(name: str, value: Tensor, batch: Batch, spec: MLIPSpec | None) -> Level:
    if name in NODE_FIELDS or name in SYSTEM_FIELDS:
        return "node" if name in NODE_FIELDS else "system"
    if spec is not None and name in spec.outputs:
        return "node" if spec.outputs[name].kind is OutputKind.PER_NODE else "system"
    # One process, and a model that declares nothing: only the number of rows is left.
    if batch.num_graphs == batch.num_nodes:
        raise ModelError(
            f"{name} has {value.shape[0]} rows for {batch.num_graphs} systems of one atom each, so it may be per atom "
            "or per system; declare its kind in the model's distribution_spec"
        )
    return "system" if value.shape[0] == batch.num_graphs else "node"


def check_finite(outputs: ModelOutputs, batch: Batch, step: int) -> None:
    """Raise NonFiniteError, naming atoms and step, when an output is NaN or infinite."""
    for name, value in outputs.items():
        ok = torch.isfinite(value.detach())
        if not bool(ok.all()):
            rows = (~ok.reshape(ok.shape[0], -1).all(-1)).nonzero().squeeze(-1)[:20].tolist()
            what = "atoms" if name == "forces" else "rows"
            raise NonFiniteError(
                f"{name} is not finite at step {step}, {what} {rows}; atoms too close, or a time step too long"
            )


def check_steps(n_steps: int | None) -> None:
    """Refuse a negative number of steps."""
    if n_steps is not None and n_steps < 0:
        raise ConfigError(f"n_steps={n_steps}; give 0 or more")


def check_batch_for_run(batch: Batch) -> None:
    """Refuse what is not a batch."""
    if not isinstance(batch, Batch):
        raise InputError(f"run needs a Batch, got {type(batch).__name__}; use Batch.from_data_list([data])")


def is_global(hook: Hook) -> bool:
    """Whether a hook wants the whole system."""
    scope = getattr(hook, "scope", HookScope.LOCAL)
    return isinstance(scope, Enum) and HookScope(scope) is HookScope.GLOBAL
