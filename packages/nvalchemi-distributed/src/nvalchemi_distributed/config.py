"""How a system is decomposed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from torch.distributed.device_mesh import DeviceMesh

from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.stages import HookScope

__all__ = ["DomainConfig", "HookScope", "StrategyKind"]


class StrategyKind(StrEnum):
    """How per-atom fields are laid out over ranks. ``HALO`` is built; ``GRAPH_PARTITION`` is refused for now."""

    HALO = "halo"
    GRAPH_PARTITION = "graph_partition"


@dataclass(frozen=True)
class DomainConfig:
    """What every rank needs to know. Lengths in Å.

    Attributes:
        cutoff: the model's interaction cutoff; at least the model's own.
        skin: how much farther ghosts and neighbours are kept, so that they need no rebuild at every step. 0 rebuilds
            whenever an atom has moved.
        mesh: a one-dimensional mesh over the ranks; ``None`` is one mesh over the whole default group, or one rank
            where no group exists.
        compile: compiled distributed forward. Refused until it exists.
        strategy: see :class:`StrategyKind`.
        ghost_width: width of the ghost region; ``None`` is what is needed, ``hops × cutoff + skin +
        migration_hysteresis``.
        grid_dims: ranks along each lattice vector; ``None`` chooses the least ghost surface.
        require_nondegenerate: refuse a decomposition in which some rank's owned atoms and ghosts are the whole system.
        migration_hysteresis: an atom changes owner only once it is this far outside its owner's box (at a rebuild).
        rebalance_above: cuts follow the atoms where equal boxes have max/mean owned atoms above this.
        debug_collectives: ranks announce each collective operation by number and name before they enter it, so that
            ranks that go different ways are told apart by an error instead of waiting for each other. Slower.

    Raises:
        ConfigError: a value that cannot work; the message names it.
    """

    cutoff: float
    skin: float = 0.0
    mesh: DeviceMesh | None = None
    compile: bool = False
    strategy: StrategyKind = StrategyKind.HALO
    ghost_width: float | None = None
    grid_dims: tuple[int, int, int] | None = None
    require_nondegenerate: bool = False
    migration_hysteresis: float = 0.0
    rebalance_above: float = 1.1
    debug_collectives: bool = False

    def __post_init__(self) -> None:
        _positive("cutoff", self.cutoff)
        _not_negative("skin", self.skin)
        _not_negative("migration_hysteresis", self.migration_hysteresis)
        try:
            object.__setattr__(self, "strategy", StrategyKind(self.strategy))
        except ValueError:
            raise ConfigError(f"strategy={self.strategy!r}; use StrategyKind.HALO") from None
        if self.compile:
            raise ConfigError("compile=True: compiled distributed runs are not built yet; leave compile at False")
        if self.strategy is StrategyKind.GRAPH_PARTITION:
            raise ConfigError("strategy=GRAPH_PARTITION is not built yet; use StrategyKind.HALO")
        if self.rebalance_above < 1.0 or math.isnan(self.rebalance_above):
            raise ConfigError(f"rebalance_above={self.rebalance_above}; max/mean is never below 1, give 1.0 or more")
        if self.grid_dims is not None:
            grid = tuple(self.grid_dims)
            if len(grid) != 3 or any(int(g) != g or g < 1 for g in grid):
                raise ConfigError(f"grid_dims={grid}; give three positive integers, ranks along each lattice vector")
            object.__setattr__(self, "grid_dims", tuple(int(g) for g in grid))
        if self.ghost_width is not None:
            need = self.needed_width(1)
            if not self.ghost_width >= need:
                raise ConfigError(
                    f"ghost_width={self.ghost_width} is below cutoff + skin + migration_hysteresis = {need}: edges "
                    f"would go missing; give at least {need}, or leave it out"
                )

    def needed_width(self, hops: int) -> float:
        """Ghost width in Å that a model with that many hops needs."""
        return hops * self.cutoff + self.skin + self.migration_hysteresis


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}={value}; give a positive length in Å")


def _not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name}={value}; give a length in Å, 0 or more")
