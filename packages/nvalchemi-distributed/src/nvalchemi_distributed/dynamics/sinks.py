"""Where snapshots go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.data.extxyz import append_extxyz
from nvalchemi_distributed.errors import ConfigError, SinkFullError


class Sink(Protocol):
    """Anything that takes a snapshot."""

    def write(self, batch: Batch, *, step: int | None = None) -> None:
        """Store a copy of ``batch``; later changes to it must not reach what was stored."""
        ...


class HostMemory:
    """Keeps copies of up to ``capacity`` snapshots in memory.

    Args:
        capacity: how many snapshots fit.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity={capacity}; give 1 or more snapshots")
        self.capacity = int(capacity)
        self._frames: list[Batch] = []
        self._steps: list[int | None] = []

    def write(self, batch: Batch, *, step: int | None = None) -> None:
        """Copy ``batch``.

        Raises:
            SinkFullError: ``capacity`` snapshots are held already.
        """
        if len(self._frames) >= self.capacity:
            raise SinkFullError(f"HostMemory holds its {self.capacity} snapshots; give a larger capacity or clear() it")
        self._frames.append(batch.clone().to("cpu"))
        self._steps.append(step)

    def clear(self) -> None:
        """Forget all snapshots."""
        self._frames.clear()
        self._steps.clear()

    @property
    def steps(self) -> list[int | None]:
        """Step of each snapshot."""
        return list(self._steps)

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, index: int) -> Batch:
        return self._frames[index]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._frames)


class ExtxyzSink:
    """Appends frames to an extended XYZ file that ASE opens; flushed after each frame.

    Args:
        path: of the file; a new sink starts it anew unless ``append``. For several systems in a batch, frames follow
            each other and carry ``system``.
        append: keep what is there.
        digits: significant digits of floating-point columns.
    """

    def __init__(self, path: str | Path, *, append: bool = False, digits: int = 17) -> None:
        self.path, self.digits = Path(path), digits
        self._started = append

    def write(self, batch: Batch, *, step: int | None = None) -> None:
        """Append one frame a system."""
        if not self._started:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("", encoding="utf-8")
            self._started = True
        for k, data in enumerate(batch.to_data_list()):
            info: dict[str, float | int | str] = {} if step is None else {"step": step}
            if batch.num_graphs > 1:
                info["system"] = k
            append_extxyz(self.path, data, info=info, digits=self.digits)
