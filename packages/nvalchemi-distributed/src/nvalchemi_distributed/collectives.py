"""What every collective goes through: one name for one that torch has renamed, and the roll call of debug mode."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from nvalchemi_distributed.errors import TransportError

# One fixed size, so that the roll calls of different operations fit each other.
_NAME_BYTES = 120


def all_gather_equal(out: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill ``out`` (W·n, …) with every rank's ``mine`` (n, …). All ranks give the same shape."""
    # torch 2.13 deprecates all_gather_into_tensor in favour of all_gather_single; 2.6 has only the former.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, mine, group=group)


class RollCall:
    """Debug mode of one group: before each operation all ranks say which one they enter, by number and name.

    Ranks that enter different operations would wait for each other until the group's time limit, or mistake each
    other's data. Here all of them learn it at once and raise the same error. One small gather more an operation.

    Args:
        group: the ranks; ``None`` is the default group.
        size: how many they are.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        self._group, self._size = group, size
        self.number = 0

    def __call__(self, name: str) -> None:
        """Announce the next operation. Collective.

        Raises:
            TransportError: the ranks are about to enter different ones (on every rank, with all names), or some rank
                entered none within the group's time limit.
        """
        self.number += 1
        mine = torch.zeros(8 + _NAME_BYTES, dtype=torch.uint8)
        mine[:8] = torch.tensor([self.number]).view(torch.uint8)
        text = name.encode()[:_NAME_BYTES]
        mine[8 : 8 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        table = torch.empty(self._size * mine.numel(), dtype=torch.uint8)
        try:
            all_gather_equal(table, mine, self._group)
        except RuntimeError as error:
            raise TransportError(
                f"operation {self.number} {name!r} found no answer: another rank has left or entered none ({error})"
            ) from error
        rows = table.reshape(self._size, -1)
        if bool((rows == mine).all()):
            return
        entered = ", ".join(f"rank {r}: operation {_describe(row)}" for r, row in enumerate(rows))
        raise TransportError(
            f"the ranks entered different collective operations ({entered}); look for a branch that some ranks take "
            "and others do not, and decide it from a reduced value"
        )


def _describe(row: Tensor) -> str:
    number = int(row[:8].clone().view(torch.int64))
    return f"{number} {bytes(row[8:].tolist()).rstrip(bytes(1)).decode(errors='replace')!r}"


def no_roll_call(name: str) -> None:
    """Outside debug mode nothing is announced."""
