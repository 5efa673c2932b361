"""Constant energy: velocity Verlet.

| equation | code |
|---|---|
| v ← v + Δt/2 · f/m | ``kick`` |
| x ← x + Δt · v | ``pre_update`` |

Swope, Andersen, Berens, Wilson, J. Chem. Phys. 76, 637 (1982).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.dynamics.base import BaseDynamics
from nvalchemi_distributed.dynamics.convergence import ConvergenceHook
from nvalchemi_distributed.dynamics.steps import internal_time, kick
from nvalchemi_distributed.hooks.context import Hook
from nvalchemi_distributed.models.base import BaseModelMixin


class NVE(BaseDynamics):
    """Velocity Verlet. Exact under decomposition: per-atom operations only.

    Args:
        model: the wrapped model.
        dt: time step, fs.
        hooks, n_steps, convergence_hook: see :class:`BaseDynamics`.
    """

    def __init__(
        self,
        model: BaseModelMixin,
        dt: float,
        *,
        hooks: Iterable[Hook] | None = None,
        n_steps: int | None = None,
        convergence_hook: ConvergenceHook | None = None,
    ) -> None:
        super().__init__(model, hooks=hooks, n_steps=n_steps, convergence_hook=convergence_hook)
        self.dt = float(dt)
        self._step = internal_time(dt)

    @torch.no_grad()
    def pre_update(self, batch: Batch) -> None:
        """Half kick, drift."""
        kick(batch, 0.5 * self._step)
        batch.positions.add_(batch.velocities, alpha=self._step)

    @torch.no_grad()
    def post_update(self, batch: Batch) -> None:
        """Half kick with the new forces."""
        kick(batch, 0.5 * self._step)

    def state_dict(self) -> dict[str, Any]:
        """The base's state and the time step."""
        return {**super().state_dict(), "dt": self.dt}
