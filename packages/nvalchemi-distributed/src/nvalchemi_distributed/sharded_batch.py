"""One rank's share of a decomposed batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.domain.epoch import Epoch
from nvalchemi_distributed.errors import NotPartitionedError


@dataclass(frozen=True)
class Census:
    """What the whole system holds; the same on every rank.

    Attributes:
        checksum: :func:`~nvalchemi_distributed.domain.migrate.id_checksum` of all atoms.
        all_ids: the sorted ids where they are not 0 … n − 1, else ``None``.
    """

    checksum: Tensor
    all_ids: Tensor | None

    @property
    def n_atoms(self) -> int:
        """Atoms in all systems."""
        return int(self.checksum[0])


class ShardedBatch(Batch):
    """The atoms this rank owns, as a :class:`Batch`: no ghosts, every field, ``atom_id`` ascending within
    each system.

    Per-system fields (cell, energy, …) are the whole system's and equal on every rank. ``energy`` is global: never
    sum it over ranks.
    """

    def __init__(
        self, node: Mapping[str, Tensor], system: Mapping[str, Tensor], batch_idx: Tensor, census: Census
    ) -> None:
        super().__init__(node, system, batch_idx)
        self._census = census
        self._epoch: Epoch | None = None

    @property
    def census(self) -> Census:
        """What the whole system holds."""
        return self._census

    @property
    def epoch(self) -> Epoch:
        """Ownership, ghosts and neighbour list in force.

        Raises:
            NotPartitionedError: before the first halo is built.
        """
        if self._epoch is None:
            raise NotPartitionedError("this batch has no halo yet; get it from DomainParallel.partition")
        return self._epoch

    @property
    def has_epoch(self) -> bool:
        """Whether a halo has been built."""
        return self._epoch is not None

    @property
    def n_owned(self) -> int:
        """Atoms this rank owns."""
        return self.num_nodes

    @property
    def n_ghost(self) -> int:
        """Copies of other ranks' atoms that this rank reads."""
        return self.epoch.plan.n_ghost

    def replace_rows(self, node: Mapping[str, Tensor], batch_idx: Tensor) -> None:
        """Take over the rows that a migration brought."""
        self._node = dict(node)
        self._batch_idx = batch_idx
        self.neighbors = None

    def set_epoch(self, epoch: Epoch) -> None:
        """Enter an epoch."""
        self._epoch = epoch

    def unwrapped_positions(self) -> Tensor:
        """(N, 3) Å positions with the whole cells that wrapping took off put back."""
        if self.image is None or not bool(self.image.any()):
            return self.positions
        shift = torch.bmm(self.image.to(self.dtype).unsqueeze(1), self.cell.to(self.dtype)[self.batch_idx]).squeeze(1)
        return self.positions + shift
