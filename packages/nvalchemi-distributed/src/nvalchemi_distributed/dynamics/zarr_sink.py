"""A sink for long trajectories: one Zarr (version 3) group that grows. Needs the ``zarr`` extra.

Layout, for F snapshots with ΣN rows in all: ``steps`` (F,) int64 (−1 where no step was given), ``ptr`` (F + 1,)
first row of each snapshot, ``batch_idx`` (ΣN,), ``node/NAME`` (ΣN, …), ``system/NAME`` (F, S, …).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import ConfigError

_ROWS_A_CHUNK = 65_536
_NOT_WRITTEN = -1


class ZarrData:
    """Appends snapshots to a Zarr group; ``len``, indexing and iteration read them back.

    All snapshots have the fields of the first; the number of atoms may change from one to the next. Each rank writes
    its own group, or rank zero writes the whole system with a ``HookScope.GLOBAL`` hook: the group is made by the first
    ``write``, so that the other ranks' sinks of the same path touch nothing. Chunks are replaced, never written over,
    and the pointer comes last; one that was not written does not count. So a killed run leaves whole snapshots only.

    Args:
        path: of the group; must not exist unless ``append``.
        append: continue an existing group.

    Raises:
        ConfigError: the path exists and ``append`` is not set.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and not append:
            raise ConfigError(f"{self.path} exists; pass append=True to continue it, or another path")
        self._opened: Any = None

    @property
    def _group(self) -> Any:
        if self._opened is None:
            self._opened = zarr.open_group(self.path, mode="r+")
        return self._opened

    def _make(self) -> None:
        """Open the group for writing, and lay it out when it is new."""
        if self._opened is None:
            self._opened = zarr.open_group(self.path, mode="a")
        if "steps" not in self._opened:
            self._opened.create_array("steps", shape=(0,), chunks=(1024,), dtype="int64")
        if "ptr" not in self._opened:
            self._opened.create_array("ptr", shape=(0,), chunks=(1024,), dtype="int64", fill_value=_NOT_WRITTEN)
        if self._opened["ptr"].shape[0] == 0 or int(self._opened["ptr"][0]) == _NOT_WRITTEN:
            self._grow("ptr", np.array([0]), 0)

    def write(self, batch: Batch, *, step: int | None = None) -> None:
        """Append one snapshot.

        Raises:
            ConfigError: fields other than those of the first snapshot.
        """
        self._make()
        rows = {f"node/{k}": v for k, v in batch.node_fields.items()} | {"batch_idx": batch.batch_idx}
        systems = {f"system/{k}": v.unsqueeze(0) for k, v in batch.system_fields.items()}
        frames = len(self)
        have = {k for k, _ in self._fields()}
        if not frames:
            # What a run left that was killed inside its first snapshot.
            for name in have:
                del self._group[name]
        elif have != set(rows) | set(systems):
            raise ConfigError(
                f"snapshot and group differ in {sorted(have ^ (set(rows) | set(systems)))}; write the same fields"
            )
        end = int(self._group["ptr"][frames])
        for name, value in rows.items():
            self._append(name, value, end, _ROWS_A_CHUNK)
        for name, value in systems.items():
            self._append(name, value, frames, 256)
        self._grow("steps", np.array([-1 if step is None else step]), frames)
        self._grow("ptr", np.array([end + batch.num_nodes]), frames + 1)

    def _append(self, name: str, value: Tensor, at: int, chunk: int) -> None:
        array = value.detach().cpu().numpy()
        if name not in self._group:
            shape, chunks = (0, *array.shape[1:]), (chunk, *(max(1, d) for d in array.shape[1:]))
            self._group.create_array(name, shape=shape, chunks=chunks, dtype=array.dtype)
        self._grow(name, array, at)

    def _grow(self, name: str, array: np.ndarray, at: int) -> None:
        target = self._group[name]
        target.resize((at + array.shape[0], *target.shape[1:]))
        target[at:] = array

    def _fields(self) -> Iterator[tuple[str, zarr.Array]]:
        for level in ("node", "system"):
            if level in self._group:
                for name, array in self._group[level].arrays():
                    yield f"{level}/{name}", array
        if "batch_idx" in self._group:
            yield "batch_idx", self._group["batch_idx"]

    @property
    def steps(self) -> list[int | None]:
        """Step of each snapshot."""
        if not len(self):
            return []
        return [None if s < 0 else int(s) for s in self._group["steps"][: len(self)]]

    def __len__(self) -> int:
        if self._opened is None and not self.path.exists():
            return 0
        if "ptr" not in self._group or self._group["ptr"].shape[0] < 2:
            return 0
        pointer = self._group["ptr"]
        frames = int(pointer.shape[0]) - 1
        # A run that was killed between growing the pointer and writing it leaves one entry that never was.
        before, last = (int(p) for p in pointer[frames - 1 :])
        return frames if last >= before else frames - 1

    def __getitem__(self, index: int) -> Batch:
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"snapshot {index} of {size}")
        index %= size
        low, high = (int(p) for p in self._group["ptr"][index : index + 2])
        node, system = {}, {}
        batch_idx = torch.zeros(0, dtype=torch.int64)
        for name, array in self._fields():
            if name == "batch_idx":
                batch_idx = torch.from_numpy(np.asarray(array[low:high]))
            elif name.startswith("node/"):
                node[name.removeprefix("node/")] = torch.from_numpy(np.asarray(array[low:high]))
            else:
                system[name.removeprefix("system/")] = torch.from_numpy(np.asarray(array[index]))
        return Batch(node, system, batch_idx)

    def __iter__(self) -> Iterator[Batch]:
        return (self[k] for k in range(len(self)))
