"""Random numbers that depend on (seed, step, draw, atom_id) and on nothing else.

Philox4x32-10 (Salmon et al., SC11, "Parallel random numbers: as easy as 1, 2, 3") in int64 arithmetic, then Box–Muller.
A Langevin trajectory therefore does not depend on the number of ranks or on the order of rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def philox4x32(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Four 32-bit words a counter.

    Args:
        counter: (N, 4) int64 holding 32-bit words.
        key: two 32-bit words.

    Returns:
        (N, 4) int64 in [0, 2³²).
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(10):
        # The product of two 32-bit words wraps int64, but its 64 bits are right; the mask drops the sign extension.
        p0, p1 = c0 * _M0, c2 * _M1
        high0, high1 = (p0 >> 32) & _MASK, (p1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & _MASK, high0 ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack([c0, c1, c2, c3], dim=-1)


def normal(seed: int, step: int, draw: int, atom_id: Tensor) -> Tensor:
    """Three independent standard normal numbers an atom.

    Args:
        seed: 64 bits.
        step: 0 … 2⁴⁰ − 1.
        draw: number of the draw within the step, 0 … 2²³ − 1.
        atom_id: (N,) int64, 0 … 2³² − 1.

    Returns:
        (N, 3) float64; from 32-bit uniforms, so at most 6.8 in magnitude.
    """
    n = atom_id.shape[0]
    counter = torch.empty((n, 4), dtype=torch.int64, device=atom_id.device)
    counter[:, 0] = atom_id & _MASK
    counter[:, 1] = step & _MASK
    counter[:, 2] = (step >> 32) & 0xFF | (draw << 8) & _MASK
    counter[:, 3] = (atom_id >> 32) & _MASK
    words = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    uniform = (words.to(torch.float64) + 0.5) / 4294967296.0
    radius = torch.sqrt(-2.0 * torch.log(uniform[:, 0::2]))
    angle = (2.0 * math.pi) * uniform[:, 1::2]
    return torch.stack(
        [
            radius[:, 0] * torch.cos(angle[:, 0]),
            radius[:, 0] * torch.sin(angle[:, 0]),
            radius[:, 1] * torch.cos(angle[:, 1]),
        ],
        dim=-1,
    )
