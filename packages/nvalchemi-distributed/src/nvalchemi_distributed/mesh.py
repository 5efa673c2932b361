"""The process group that a configuration means."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from nvalchemi_distributed.collectives import RollCall, no_roll_call
from nvalchemi_distributed.config import DomainConfig
from nvalchemi_distributed.errors import ConfigError


def roll_call_of(group: dist.ProcessGroup | None) -> Callable[[str], None]:
    """Debug mode of a group; a single rank has nobody to disagree with."""
    if group is None:
        return no_roll_call
    return RollCall(None if group is dist.group.WORLD else group, dist.get_world_size(group))


def group_of(config: DomainConfig) -> dist.ProcessGroup | None:
    """The process group of the mesh, the default group, or none on a single process.

    Raises:
        ConfigError: a mesh that cannot be decomposed over, or without this rank.
    """
    mesh = config.mesh
    if mesh is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if mesh.ndim != 1:
        raise ConfigError(
            f"the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; pass the one to decompose over, mesh['domain']"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError("this rank is not part of the mesh; only ranks of the mesh make a DomainParallel")
    group = mesh.get_group()
    if dist.get_world_size(group) != mesh.size():
        raise ConfigError(
            f"the mesh has {mesh.size()} ranks, its group {dist.get_world_size(group)}; build it with init_device_mesh"
        )
    return group
