"""What a model asks of a neighbour list."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from nvalchemi_distributed.errors import ConfigError


class NeighborListFormat(StrEnum):
    """``COO``: edges (receiver, sender, image). ``MATRIX``: one padded line of row numbers a receiver, images as
    rows."""

    COO = "coo"
    MATRIX = "matrix"


@dataclass(frozen=True)
class NeighborConfig:
    """Cutoff (Å) and format of the list a model reads.

    Every edge is listed once for each of its two ends (a full list).

    Raises:
        ConfigError: a cutoff that is not a positive finite number, or an unknown format.
    """

    cutoff: float
    format: NeighborListFormat = NeighborListFormat.COO

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cutoff) and self.cutoff > 0):
            raise ConfigError(f"cutoff is {self.cutoff}; give a positive length in Å")
        try:
            object.__setattr__(self, "format", NeighborListFormat(self.format))
        except ValueError:
            raise ConfigError(f"neighbour list format {self.format!r}; use 'coo' or 'matrix'") from None
