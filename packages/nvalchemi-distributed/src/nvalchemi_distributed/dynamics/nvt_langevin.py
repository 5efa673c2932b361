"""Constant temperature: Langevin dynamics in the BAOAB splitting.

| equation | code |
|---|---|
| B: v ← v + Δt/2 · f/m | ``kick`` |
| A: x ← x + Δt/2 · v | ``pre_update`` |
| O: v ← e^{−γΔt} v + √((1 − e^{−2γΔt}) k_BT/m) ξ | ``pre_update`` |

Leimkuhler and Matthews, Appl. Math. Res. Express 2013, 34 (2013), eq. for BAOAB. ξ depends on (seed, step, atom_id)
only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.dynamics.base import BaseDynamics
from nvalchemi_distributed.dynamics.convergence import ConvergenceHook
from nvalchemi_distributed.dynamics.noise import normal
from nvalchemi_distributed.dynamics.steps import internal_time, kick
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.hooks.context import Hook
from nvalchemi_distributed.models.base import BaseModelMixin
from nvalchemi_distributed.units import BOLTZMANN


class NVTLangevin(BaseDynamics):
    """BAOAB Langevin dynamics. Exact under decomposition: the noise of an atom does not depend on who owns it.

    Args:
        model: the wrapped model.
        dt: time step, fs.
        temperature: K; one number, or (S,) one for each system.
        friction: 1/fs.
        seed: of the noise, 64 bits.
        hooks, n_steps, convergence_hook: see :class:`BaseDynamics`.

    Raises:
        ConfigError: a negative temperature or friction; at the first batch, another number of temperatures than of
            systems.
    """

    def __init__(
        self,
        model: BaseModelMixin,
        dt: float,
        temperature: float | Tensor,
        friction: float,
        *,
        seed: int = 0,
        hooks: Iterable[Hook] | None = None,
        n_steps: int | None = None,
        convergence_hook: ConvergenceHook | None = None,
    ) -> None:
        super().__init__(model, hooks=hooks, n_steps=n_steps, convergence_hook=convergence_hook)
        kelvin = torch.as_tensor(temperature, dtype=torch.float64)
        if kelvin.dim() > 1 or not bool((torch.isfinite(kelvin) & (kelvin >= 0)).all()):
            raise ConfigError(f"temperature={temperature}; give K, 0 or more, one number or one a system")
        if not (math.isfinite(friction) and friction >= 0):
            raise ConfigError(f"friction={friction}; give 1/fs, 0 or more")
        self.dt, self.temperature, self.friction, self.seed = float(dt), kelvin, float(friction), int(seed)
        self._step = internal_time(dt)

    def check_system(self, batch: Batch) -> None:
        """As many temperatures as systems.

        Raises:
            ConfigError: names both numbers.
        """
        if self.temperature.dim() == 1 and self.temperature.shape[0] != batch.num_graphs:
            raise ConfigError(
                f"temperature holds {self.temperature.shape[0]} numbers for {batch.num_graphs} systems; give one "
                "number, or one a system"
            )

    @torch.no_grad()
    def pre_update(self, batch: Batch) -> None:
        """B, A, O, A."""
        kick(batch, 0.5 * self._step)
        batch.positions.add_(batch.velocities, alpha=0.5 * self._step)
        self._thermostat(batch)
        batch.positions.add_(batch.velocities, alpha=0.5 * self._step)

    @torch.no_grad()
    def post_update(self, batch: Batch) -> None:
        """B with the new forces."""
        kick(batch, 0.5 * self._step)

    def _thermostat(self, batch: Batch) -> None:
        keep = math.exp(-self.friction * self.dt)
        ids = batch.atom_id
        if ids is None:
            ids = torch.arange(batch.num_nodes, device=batch.device)
        kelvin = self.temperature if self.temperature.dim() == 0 else self.temperature[batch.batch_idx]
        width = torch.sqrt((1.0 - keep * keep) * BOLTZMANN * kelvin / batch.atomic_masses.to(torch.float64))
        noise = width.unsqueeze(-1) * normal(self.seed, self.step_count, 0, ids)
        batch.velocities.mul_(keep).add_(noise.to(batch.dtype))

    def state_dict(self) -> dict[str, Any]:
        """The base's state and everything the noise depends on."""
        mine = {"dt": self.dt, "temperature": self.temperature.tolist(), "friction": self.friction, "seed": self.seed}
        return {**super().state_dict(), **mine}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore step and seed; time step, temperature and friction stay those of the constructor."""
        super().load_state_dict(state)
        self.seed = int(state["seed"])


def maxwell_boltzmann(batch: Batch, temperature: float, *, seed: int = 0, zero_momentum: bool = True) -> None:
    """Draw ``batch.velocities`` at ``temperature`` K, in place; call it on the full batch, before ``partition``.

    Args:
        batch: the whole systems.
        temperature: K.
        seed: of the draw; independent of the noise of a run with the same seed.
        zero_momentum: remove each system's centre-of-mass velocity.
    """
    ids = batch.atom_id if batch.atom_id is not None else torch.arange(batch.num_nodes, device=batch.device)
    masses = batch.atomic_masses.to(torch.float64)
    v = normal(seed, 0, 1, ids) * torch.sqrt(BOLTZMANN * temperature / masses).unsqueeze(-1)
    if zero_momentum:
        idx, s = batch.batch_idx, batch.num_graphs
        p = v.new_zeros(s, 3).index_add(0, idx, v * masses.unsqueeze(-1))
        v = v - (p / v.new_zeros(s).index_add(0, idx, masses).unsqueeze(-1))[idx]
    batch.velocities = v.to(batch.dtype)
