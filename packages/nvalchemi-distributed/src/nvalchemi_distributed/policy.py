"""How ghost rows are kept right inside a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nvalchemi_distributed.errors import ModelError


class ScatterMode(StrEnum):
    """What follows a scatter into node rows.

    ``HALO_CORRECTION``: parts that were written into ghost rows are folded back to their owners (where the index can
    hold ghosts at all: edges have owned receivers, so a scatter by receivers needs no exchange).
    ``LOCAL``: nothing.
    """

    HALO_CORRECTION = "halo_correction"
    LOCAL = "local"


class GatherMode(StrEnum):
    """What precedes a gather of node rows: ``HALO_READ`` refreshes ghosts that are out of date, ``LOCAL`` does not."""

    HALO_READ = "halo_read"
    LOCAL = "local"


@dataclass(frozen=True)
class HaloStoragePolicy:
    """Each rank holds the rows of its owned atoms, then those of its ghosts.

    ``local`` in both modes is for a model whose ghost region is ``hops × cutoff`` wide, so that it computes its ghosts
    itself.

    Attributes:
        scatter_mode: see :class:`ScatterMode`.
        gather_mode: see :class:`GatherMode`.

    Raises:
        ModelError: an unknown mode.
    """

    scatter_mode: ScatterMode = ScatterMode.HALO_CORRECTION
    gather_mode: GatherMode = GatherMode.HALO_READ

    def __post_init__(self) -> None:
        for name, kind in (("scatter_mode", ScatterMode), ("gather_mode", GatherMode)):
            value = getattr(self, name)
            if value not in list(kind):
                raise ModelError(f"{name}={value!r} is an unknown kind; use one of {[str(k) for k in kind]}")
            object.__setattr__(self, name, kind(value))
