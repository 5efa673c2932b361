"""Records scalars of the whole system as a CSV file."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import torch

from distmd_protocol import rank_zero
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.hooks.context import DynamicsContext
from nvalchemi_distributed.observables import atom_counts, kinetic_energy, volume
from nvalchemi_distributed.stages import DynamicsStage
from nvalchemi_distributed.units import BOLTZMANN, EV_PER_CUBIC_ANGSTROM_IN_MPA

COLUMNS = ("step", "system", "potential_eV", "kinetic_eV", "temperature_K", "pressure_MPa")


class LoggingHook:
    """One line a system: step, system, potential and kinetic energy (eV), temperature (K), pressure (MPa).

    Sums run over all ranks, rank zero writes, and ``records`` holds the same rows on every rank. The pressure is NaN
    where the model gives no stress or the system has no volume.

    Args:
        path: of the CSV file, started anew; ``None`` keeps the rows in ``records`` only.
        frequency: steps between lines.
    """

    stage = DynamicsStage.AFTER_STEP

    def __init__(self, path: str | Path | None = None, frequency: int = 1) -> None:
        if frequency < 1:
            raise ConfigError(f"frequency={frequency}; give 1 or more steps")
        self.frequency = int(frequency)
        self.records: list[tuple[int, int, float, float, float, float]] = []
        self._path = None if path is None else Path(path)
        self._started = False

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        """Add one line a system. Collective under decomposition."""
        batch = ctx.batch
        kinetic = kinetic_energy(batch, ctx.reduce)
        counts = atom_counts(batch, ctx.reduce)
        v = volume(batch)
        pressure = torch.full_like(v, float("nan"))
        if batch.stress is not None:
            trace = batch.stress.to(torch.float64).diagonal(dim1=-2, dim2=-1).sum(-1)
            pressure = torch.where(v > 0, 2.0 * kinetic / (3.0 * v) - trace / 3.0, pressure)
        rows = [
            (
                ctx.step_count,
                s,
                float(batch.energy[s]) if batch.energy is not None else float("nan"),
                float(kinetic[s]),
                float(2.0 * kinetic[s] / (3.0 * counts[s].clamp_min(1.0) * BOLTZMANN)),
                float(pressure[s]) * EV_PER_CUBIC_ANGSTROM_IN_MPA,
            )
            for s in range(batch.num_graphs)
        ]
        self.records.extend(rows)
        if self._path is not None:
            rank_zero(ctx.comm, self._append, rows)

    def _append(self, rows: list[tuple[int, int, float, float, float, float]]) -> None:
        assert self._path is not None
        if not self._started:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
            self._started = True
        with open(self._path, "a", encoding="utf-8") as stream:
            for row in rows:
                stream.write(",".join(f"{v:.17g}" if isinstance(v, float) else str(v) for v in row) + "\n")
