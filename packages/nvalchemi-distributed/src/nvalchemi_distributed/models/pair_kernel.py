"""Sums of a pair potential over a padded row matrix: one fused pass by ``torch.compile`` where that is asked for, else
block by block.

Letters: R rows, M receivers (the first M rows), K places for neighbours, S species.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from nvalchemi_distributed.models.pair_forms import PairForm

PairSums = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Kernel = Callable[..., PairSums]

_logger = logging.getLogger(__name__)

# Pairs a block. Its intermediates then stay in the cache and below the allocator's mmap threshold, which makes the
# eager form several times faster.
_BLOCK = 20_000


def make_kernel(form: PairForm, n_species: int, *, with_energy: bool, with_virial: bool, compiled: bool) -> Kernel:
    """A kernel ``(x, y, z, matrix, cutoff2, shift, params, shared, types) -> (energy, fx, fy, fz, virial)``.

    Energy (M,) is half of each pair, or (0,); forces (M,) are complete; virial is (M, 6) in the order xx yy zz yz xz
    xy, half of each pair, or (M, 0). ``types`` (R + 1,) are species numbers, ignored when there is one species.
    """
    function, one = form.function, n_species == 1

    def sums(
        x: Tensor,
        y: Tensor,
        z: Tensor,
        centre: tuple[Tensor, ...],
        matrix: Tensor,
        cutoff2: Tensor,
        shift: Tensor,
        params: tuple[Tensor, ...],
        shared: tuple[Tensor, ...],
        types: Tensor,
    ) -> PairSums:
        # Separations x_j − x_i; index_select of a flat index is three times as fast as x[matrix].
        flat = matrix.reshape(-1)
        dx = x.index_select(0, flat).view(matrix.shape).sub_(centre[0].unsqueeze(1))
        dy = y.index_select(0, flat).view(matrix.shape).sub_(centre[1].unsqueeze(1))
        dz = z.index_select(0, flat).view(matrix.shape).sub_(centre[2].unsqueeze(1))
        r2 = (dx * dx).addcmul_(dy, dy).addcmul_(dz, dz)
        mask = (r2 < cutoff2).to(r2.dtype)
        # Outside pairs are computed at the cutoff, so that masking never meets an infinity. A NaN goes through both: it
        # must come out, never be masked away.
        safe = torch.minimum(r2, cutoff2)
        if one:
            values, offset = tuple(p[0] for p in params), shift[0]
        else:
            pair = centre[3].unsqueeze(1) * n_species + types[matrix]
            values, offset = tuple(p[pair] for p in params), shift[pair]
        energy, w = function(safe, (*values, *shared))
        w = w.mul(mask)
        dot = torch.linalg.vecdot
        half = 0.5 * (energy - offset).mul_(mask).sum(1) if with_energy else x.new_zeros(0)
        if not with_virial:
            return half, -dot(w, dx), -dot(w, dy), -dot(w, dz), x.new_zeros((matrix.shape[0], 0))
        wx, wy, wz = w * dx, w * dy, w * dz
        terms = (dot(wx, dx), dot(wy, dy), dot(wz, dz), dot(wy, dz), dot(wx, dz), dot(wx, dy))
        return half, -wx.sum(1), -wy.sum(1), -wz.sum(1), 0.5 * torch.stack(terms, dim=1)

    def centres(x: Tensor, y: Tensor, z: Tensor, matrix: Tensor, types: Tensor) -> tuple[Tensor, ...]:
        m = matrix.shape[0]
        return (x[:m], y[:m], z[:m]) if one else (x[:m], y[:m], z[:m], types[:m])

    def blocked(x: Tensor, y: Tensor, z: Tensor, matrix: Tensor, *rest: Any) -> PairSums:
        size = max(1, _BLOCK // max(1, matrix.shape[1]))
        columns = (c.split(size) for c in centres(x, y, z, matrix, rest[-1]))
        blocks = zip(zip(*columns, strict=True), matrix.split(size), strict=True)
        parts = [sums(x, y, z, centre, part, *rest) for centre, part in blocks]
        energy, fx, fy, fz, virial = (torch.cat(column) for column in zip(*parts, strict=True))
        return energy, fx, fy, fz, virial

    # The spline's search and table lookup gain nothing from fusion.
    if not compiled or form.uses_pair_index:
        return blocked

    # Row numbers are the list's own; checking each of them again costs a tenth of the kernel.
    fused = torch.compile(sums, dynamic=True, options={"assert_indirect_indexing": False})
    usable = True

    def whole(x: Tensor, y: Tensor, z: Tensor, matrix: Tensor, *rest: Any) -> PairSums:
        nonlocal usable
        if usable:
            try:
                return fused(x, y, z, centres(x, y, z, matrix, rest[-1]), matrix, *rest)
            except BackendCompilerFailed as error:
                usable = False
                _logger.warning(
                    "torch.compile cannot build the kernel of %s (%s); the model goes on without it, several times "
                    "slower: install a C++ compiler, or leave compile at False",
                    form.name,
                    str(error.inner_exception).strip().partition("\n")[0],
                )
        return blocked(x, y, z, matrix, *rest)

    return whole
