"""What a step sends, on paper: a uniform system in an orthogonal periodic box, equal domains, one hop.

Letters: W ranks, N atoms, S systems. The counters of a run are :class:`.transport.Traffic`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nvalchemi_distributed.errors import ConfigError


@dataclass(frozen=True)
class StepTraffic:
    """One rank's share of a step without a rebuild, mean over ranks.

    Attributes:
        owned: atoms a rank owns.
        ghosts: copies of other ranks' atoms it reads.
        messages: messages it sends.
        bytes_sent: in these messages.
        reductions: all-reduces it takes part in.
        reduced_bytes: what each rank puts into them.
    """

    owned: float
    ghosts: float
    messages: int
    bytes_sent: float
    reductions: int
    reduced_bytes: int


def step_traffic(
    n_atoms: int,
    edges: tuple[float, float, float],
    grid: tuple[int, int, int],
    ghost_width: float,
    *,
    itemsize: int = 8,
    n_systems: int = 1,
    summed: int = 1,
) -> StepTraffic:
    """Owned atoms, ghosts, messages and bytes of a step without a rebuild.

    A domain widened by the ghost width, but never beyond the whole box along an axis, holds its owned atoms and its
    ghosts; each ghost is one row of three numbers from its owner, and each owner sends as much as it receives. A
    message goes to every rank whose domain meets the widened one.

    Args:
        n_atoms: N.
        edges: of the box, Å.
        grid: ranks along each edge.
        ghost_width: cutoff + skin + hysteresis, Å.
        itemsize: bytes of a coordinate.
        n_systems: S.
        summed: numbers a system that the model gives as sums over ranks: 1 for the energy, 9 more for the virial.

    Raises:
        ConfigError: a box or a width that is not positive.
    """
    if min(edges) <= 0 or ghost_width <= 0 or min(grid) < 1:
        raise ConfigError(f"edges={edges}, grid={grid}, ghost_width={ghost_width}; give positive lengths and ranks")
    ranks = math.prod(grid)
    domain = [e / g for e, g in zip(edges, grid, strict=True)]
    # Along an undivided axis nothing is a ghost; along a divided one the domain grows on both sides.
    widened = [d if g == 1 else min(e, d + 2.0 * ghost_width) for d, e, g in zip(domain, edges, grid, strict=True)]
    density = n_atoms / math.prod(edges)
    owned = n_atoms / ranks
    ghosts = density * math.prod(widened) - owned
    # Domains met along an axis: this one and, on each side, as many as the width reaches into.
    met = [
        1 if g == 1 else min(g, 1 + 2 * math.ceil(ghost_width / d - 1e-9)) for d, g in zip(domain, grid, strict=True)
    ]
    return StepTraffic(
        owned=owned,
        ghosts=ghosts,
        messages=math.prod(met) - 1,
        bytes_sent=3.0 * itemsize * ghosts,
        reductions=2,
        reduced_bytes=8 * (n_systems + 1) + 8 * (n_systems * summed + 1),
    )
