"""Writes the state into a sink every so many steps."""

from __future__ import annotations

from enum import Enum

from distmd_protocol import rank_zero
from nvalchemi_distributed.dynamics.sinks import Sink
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.hooks.context import DynamicsContext
from nvalchemi_distributed.stages import DynamicsStage, HookScope


class SnapshotHook:
    """Snapshots after steps whose number is a multiple of ``frequency``.

    With the default scope each rank writes its owned atoms, with ``atom_id``, into its own sink. With
    ``HookScope.GLOBAL`` (on the outer ``DomainParallel``) rank zero writes all systems, each in ``atom_id`` order, and
    a failure of its sink is an error on every rank.

    Args:
        sink: where to.
        frequency: steps between snapshots.
        scope: see above.
        stage: when in the step.
    """

    def __init__(
        self,
        sink: Sink,
        frequency: int = 1,
        *,
        scope: HookScope = HookScope.LOCAL,
        stage: DynamicsStage = DynamicsStage.AFTER_STEP,
    ) -> None:
        if frequency < 1:
            raise ConfigError(f"frequency={frequency}; give 1 or more steps")
        self.sink, self.frequency, self.scope, self.stage = sink, int(frequency), scope, stage

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        """Write one snapshot."""
        if self.scope is HookScope.GLOBAL:
            rank_zero(ctx.comm, self.sink.write, ctx.batch, step=ctx.step_count)
        else:
            self.sink.write(ctx.batch, step=ctx.step_count)
