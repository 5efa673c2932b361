"""Sums of a pair potential over a padded row matrix: one fused pass by ``torch.compile`` where that is asked for, else
block by block.

Letters: R rows, M receivers, K neighbours, S species.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.models.pair_forms import PairForm

PairSums = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Kernel = Callable[..., PairSums]

# Pairs a block. Its intermediates then stay in the cache and below the allocator's mmap threshold, which makes the
# eager form several times faster.
_BLOCK = 20_000


def make_kernel(form: PairForm, n_species: int, *, with_virial: bool, compiled: bool) -> Kernel:
    """A kernel ``(x, y, z, matrix, cutoff2, shift, params, shared, types) -> (energy, fx, fy, fz, virial)``.

    Energy (M,) is half of each pair; forces (M,) are complete; virial is (M, 6) in the order xx yy zz yz xz xy, half
    of each pair, or (M, 0). ``types`` (R + 1,) are species numbers, ignored when there is one species.
    """
    function, one = form.function, n_species == 1

    def sums(
        x: Tensor,
        y: Tensor,
        z: Tensor,
        rows: Tensor,
        matrix: Tensor,
        cutoff2: Tensor,
        shift: Tensor,
        params: tuple[Tensor, ...],
        shared: tuple[Tensor, ...],
        types: Tensor,
    ) -> PairSums:
        # Separations x_j − x_i; index_select of a flat index is three times as fast as x[matrix].
        flat = matrix.reshape(-1)
        dx = x.index_select(0, flat).view(matrix.shape).sub_(x[rows].unsqueeze(1))
        dy = y.index_select(0, flat).view(matrix.shape).sub_(y[rows].unsqueeze(1))
        dz = z.index_select(0, flat).view(matrix.shape).sub_(z[rows].unsqueeze(1))
        r2 = (dx * dx).addcmul_(dy, dy).addcmul_(dz, dz)
        mask = (r2 < cutoff2).to(r2.dtype)
        # Outside pairs are computed at the cutoff, so that masking never meets an infinity. A NaN goes through both: it
        # must come out, never be masked away.
        safe = torch.minimum(r2, cutoff2)
        if one:
            values, offset = tuple(p[0] for p in params), shift[0]
        else:
            pair = types[rows].unsqueeze(1) * n_species + types[matrix]
            values, offset = tuple(p[pair] for p in params), shift[pair]
        energy, w = function(safe, (*values, *shared))
        energy = (energy - offset).mul_(mask)
        w = w.mul(mask)
        dot = torch.linalg.vecdot
        half = 0.5 * energy.sum(1)
        if not with_virial:
            return half, -dot(w, dx), -dot(w, dy), -dot(w, dz), x.new_zeros((matrix.shape[0], 0))
        wx, wy, wz = w * dx, w * dy, w * dz
        terms = (dot(wx, dx), dot(wy, dy), dot(wz, dz), dot(wy, dz), dot(wx, dz), dot(wx, dy))
        return half, -wx.sum(1), -wy.sum(1), -wz.sum(1), 0.5 * torch.stack(terms, dim=1)

    # The spline's search and table lookup gain nothing from fusion.
    if compiled and not form.uses_pair_index:
        fused = torch.compile(sums, dynamic=True)

        def whole(x: Tensor, y: Tensor, z: Tensor, matrix: Tensor, *rest: Any) -> PairSums:
            return fused(x, y, z, torch.arange(matrix.shape[0], device=x.device), matrix, *rest)

        return whole

    def blocked(x: Tensor, y: Tensor, z: Tensor, matrix: Tensor, *rest: Any) -> PairSums:
        size = max(1, _BLOCK // max(1, matrix.shape[1]))
        every = torch.arange(matrix.shape[0], device=x.device)
        blocks = zip(every.split(size), matrix.split(size), strict=True)
        parts = [sums(x, y, z, rows, part, *rest) for rows, part in blocks]
        energy, fx, fy, fz, virial = (torch.cat(column) for column in zip(*parts, strict=True))
        return energy, fx, fy, fz, virial

    return blocked
