"""Saves a decomposed run every so many steps."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.hooks.context import DynamicsContext
from nvalchemi_distributed.stages import DynamicsStage


class CheckpointHook:
    """Calls ``DomainParallel.save(folder/step-…)`` after steps whose number is a multiple of ``frequency``.

    Register it on the outer ``DomainParallel``. ``distmd_protocol.latest(folder)`` finds the newest.

    Args:
        folder: on a file system that all ranks share.
        frequency: steps between checkpoints.
        keep_last: how many to keep; all when left out.
    """

    stage = DynamicsStage.AFTER_STEP

    def __init__(self, folder: str | Path, frequency: int, *, keep_last: int | None = None) -> None:
        if frequency < 1:
            raise ConfigError(f"frequency={frequency}; give 1 or more steps")
        self.folder, self.frequency, self.keep_last = Path(folder), int(frequency), keep_last

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        """Save. Collective."""
        save = getattr(ctx.workflow, "save", None)
        if save is None:
            raise ConfigError("CheckpointHook saves decomposed runs; run the integrator under DomainParallel")
        save(self.folder / f"step-{ctx.step_count:010d}", keep_last=self.keep_last)
