"""Where in a step a hook may run, and what it sees."""

from __future__ import annotations

from enum import Enum


class DynamicsStage(Enum):
    """Points of one step, in the order in which they come.

    ``step_count`` is the number of completed steps: before and during step 1 it is 0, and at ``AFTER_STEP`` it is 1.
    """

    BEFORE_STEP = "before_step"
    BEFORE_PRE_UPDATE = "before_pre_update"
    AFTER_PRE_UPDATE = "after_pre_update"
    BEFORE_COMPUTE = "before_compute"
    AFTER_COMPUTE = "after_compute"
    BEFORE_POST_UPDATE = "before_post_update"
    AFTER_POST_UPDATE = "after_post_update"
    AFTER_STEP = "after_step"
    ON_CONVERGE = "on_converge"


class HookScope(Enum):
    """What a hook's ``ctx.batch`` holds under :class:`~nvalchemi_distributed.DomainParallel`.

    ``LOCAL``: the atoms this rank owns (the default). ``GLOBAL``: all systems, each in ``atom_id`` order, on every
    rank; the hook is called on every rank and must be registered on the outer ``DomainParallel``.
    """

    LOCAL = "local"
    GLOBAL = "global"
