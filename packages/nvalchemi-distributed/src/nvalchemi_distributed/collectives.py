"""One name for a collective that torch has renamed."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_gather_equal(out: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill ``out`` (W·n, …) with every rank's ``mine`` (n, …). All ranks give the same shape."""
    # torch 2.13 deprecates all_gather_into_tensor in favour of all_gather_single; 2.6 has only the former.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, mine, group=group)
