"""Hooks of dynamics runs."""

from nvalchemi_distributed.dynamics.convergence import ConvergenceHook
from nvalchemi_distributed.dynamics.hooks.checkpoint import CheckpointHook
from nvalchemi_distributed.dynamics.hooks.logging import LoggingHook
from nvalchemi_distributed.dynamics.hooks.snapshot import SnapshotHook

__all__ = ["CheckpointHook", "ConvergenceHook", "LoggingHook", "SnapshotHook"]
