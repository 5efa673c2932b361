"""Sums of a pair potential over a padded row matrix: one fused pass by ``torch.compile`` where that is asked for, else
block by block.

Letters: R rows, M receivers (the first M rows), K places for neighbours, S species.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from nvalchemi_distributed.models.pair_forms import PairForm

PairSums = tuple[Tensor, Tensor]
Kernel = Callable[..., PairSums]

_logger = logging.getLogger(__name__)

# Pairs a block. Its intermediates then stay in the cache and below the allocator's mmap threshold, which makes the
# eager form several times faster.
_BLOCK = 20_000


def make_kernel(form: PairForm, n_species: int, *, with_energy: bool, with_virial: bool, compiled: bool) -> Kernel:
    """A kernel ``(x, y, z, matrix, receivers, constants, lookup, shared, types) -> (forces, sums)``.

    ``forces`` (M, 3) are complete, and in the order of the atoms: line k of the matrix belongs to atom
    ``receivers[k]``. ``sums`` (C, M) are half of each pair, by line: the energy where asked for, then the virial's
    xx yy zz yz xz xy. ``constants`` (2 + P, S·S) holds the squared cutoff, the shift and the parameters by species
    pair, ``lookup`` what is no number. ``types`` (R + 1,) are species numbers, ignored when there is one species.
    """
    function, one = form.function, n_species == 1

    def lines(
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
    ) -> tuple[Tensor, ...]:
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
        half = (0.5 * (energy - offset).mul_(mask).sum(1),) if with_energy else ()
        if not with_virial:
            return -dot(w, dx), -dot(w, dy), -dot(w, dz), *half
        wx, wy, wz = w * dx, w * dy, w * dz
        virial = (dot(wx, dx), dot(wy, dy), dot(wz, dz), dot(wy, dz), dot(wx, dz), dot(wx, dy))
        return -wx.sum(1), -wy.sum(1), -wz.sum(1), *half, *(0.5 * v for v in virial)

    def centres(x: Tensor, y: Tensor, z: Tensor, matrix: Tensor, types: Tensor) -> tuple[Tensor, ...]:
        m = matrix.shape[0]
        return (x[:m], y[:m], z[:m]) if one else (x[:m], y[:m], z[:m], types[:m])

    def by_pair(constants: Tensor, lookup: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        cutoff2, shift, *params = constants.unbind(0)
        return cutoff2[0], shift, (*params, *lookup)

    def finished(columns: Sequence[Tensor], receivers: Tensor) -> PairSums:
        by_line = torch.stack(columns[:3], dim=1)
        forces = torch.empty_like(by_line).index_copy_(0, receivers, by_line)
        return forces, torch.stack(columns[3:]) if len(columns) > 3 else by_line.new_zeros((0, by_line.shape[0]))

    def blocked(
        x: Tensor,
        y: Tensor,
        z: Tensor,
        matrix: Tensor,
        receivers: Tensor,
        constants: Tensor,
        lookup: tuple[Tensor, ...],
        *rest: Any,
    ) -> PairSums:
        size = max(1, _BLOCK // max(1, matrix.shape[1]))
        columns = (c.split(size) for c in centres(x, y, z, matrix, rest[-1]))
        blocks = zip(zip(*columns, strict=True), matrix.split(size), strict=True)
        known = by_pair(constants, lookup)
        parts = [lines(x, y, z, centre, part, *known, *rest) for centre, part in blocks]
        return finished([torch.cat(column) for column in zip(*parts, strict=True)], receivers)

    # The spline's search and table lookup gain nothing from fusion.
    if not compiled or form.uses_pair_index:
        return blocked

    def whole(
        x: Tensor,
        y: Tensor,
        z: Tensor,
        matrix: Tensor,
        receivers: Tensor,
        constants: Tensor,
        lookup: tuple[Tensor, ...],
        *rest: Any,
    ) -> PairSums:
        known = by_pair(constants, lookup)
        return finished(lines(x, y, z, centres(x, y, z, matrix, rest[-1]), matrix, *known, *rest), receivers)

    # Row numbers are the list's own; checking each of them again costs a tenth of the kernel.
    fused = torch.compile(whole, dynamic=True, options={"assert_indirect_indexing": False})
    usable = True

    def fused_or_blocked(*arguments: Any) -> PairSums:
        nonlocal usable
        if usable:
            try:
                return fused(*arguments)
            except BackendCompilerFailed as error:
                usable = False
                _logger.warning(
                    "torch.compile cannot build the kernel of %s (%s); the model goes on without it, several times "
                    "slower: install a C++ compiler, or leave compile at False",
                    form.name,
                    str(error.inner_exception).strip().partition("\n")[0],
                )
        return blocked(*arguments)

    return fused_or_blocked
