"""Hooks for any workflow, and what they are given."""

from nvalchemi_distributed.hooks.context import DynamicsContext, Hook, HookContext
from nvalchemi_distributed.hooks.neighbor_list import NeighborListHook

__all__ = ["DynamicsContext", "Hook", "HookContext", "NeighborListHook"]
