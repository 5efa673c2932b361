"""What a hook is, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from distmd_protocol import Comm
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.domain.reduce import Reducer
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.models.base import BaseModelMixin


@dataclass(kw_only=True)
class HookContext:
    """The state a hook sees.

    Attributes:
        batch: this rank's owned atoms, or the whole system for a ``HookScope.GLOBAL`` hook.
        model: the model.
        global_rank: this rank in the mesh.
        workflow: the integrator or ``DomainParallel`` that calls.
        comm: the communicator of the mesh, for ``rank_zero`` and ``agree``.
        reduce: sums and maxima over the mesh; the identity where ``batch`` is the whole system already.
    """

    batch: Batch
    model: BaseModelMixin
    global_rank: int
    workflow: Any
    comm: Comm
    reduce: Reducer


@dataclass(kw_only=True)
class DynamicsContext(HookContext):
    """A :class:`HookContext` of a dynamics run.

    Attributes:
        step_count: completed steps.
        converged_mask: (S,) systems that have converged, where a convergence hook has looked.
    """

    step_count: int
    converged_mask: Tensor | None = None


@runtime_checkable
class Hook(Protocol):
    """Anything with a stage, a frequency and a call. ``scope`` (default LOCAL) and ``_runs_on_stage(stage)`` are
    optional."""

    stage: Enum
    frequency: int

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        """Do the hook's work; ``ctx.step_count`` is a multiple of ``frequency``."""
        ...


def check_hook(hook: object) -> None:
    """Refuse what is not a hook.

    Raises:
        ConfigError: names what is missing, or the frequency.
    """
    if not isinstance(hook, Hook):
        raise ConfigError(f"{hook!r} is not a hook: it needs stage, frequency and __call__(ctx, stage)")
    if hook.frequency < 1:
        raise ConfigError(f"{type(hook).__name__} has frequency={hook.frequency}; give 1 or more steps")


def runs_at(hook: Hook, stage: Enum, step_count: int) -> bool:
    """Whether ``hook`` is due."""
    if hook.frequency < 1:
        check_hook(hook)
    own = getattr(hook, "_runs_on_stage", None)
    due = own(stage) if callable(own) else hook.stage == stage
    return bool(due) and step_count % int(hook.frequency) == 0
