"""An integrator of one's own, for the page about them; a test runs it on one process and on two ranks."""

from __future__ import annotations

# --8<-- [start:class]
from typing import Any

import numpy as np
import torch

from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.dynamics import NVE
from nvalchemi_distributed.observables import atom_counts, kinetic_energy
from nvalchemi_distributed.units import BOLTZMANN


class VelocityRescale(NVE):
    """Velocity Verlet with stochastic velocity rescaling: the kinetic energy of the canonical ensemble.

    Bussi, Donadio, Parrinello, J. Chem. Phys. 126, 014101 (2007). The total momentum is kept; start with none.

    Args:
        model: the wrapped model.
        dt: time step, fs.
        temperature: K, of every system of the batch.
        relaxation: time over which the kinetic energy is drawn anew, fs.
        seed: of the noise.
        hooks: as any integrator's.
    """

    def __init__(self, model: Any, dt: float, temperature: float, relaxation: float, *, seed: int, hooks: Any = None):
        super().__init__(model, dt, hooks=hooks)
        self.temperature, self.relaxation, self.seed = temperature, relaxation, seed

    @torch.no_grad()
    def post_update(self, batch: Batch) -> None:
        """Half kick with the new forces, then one factor for all velocities of a system."""
        super().post_update(batch)
        # Sums over all atoms of all ranks: (S,) each.
        kinetic = kinetic_energy(batch, self.reduce)
        freedom = 3 * atom_counts(batch, self.reduce) - 3
        kept = float(np.exp(-self.dt / self.relaxation))
        # The same numbers on every rank: they depend on seed and step, never on rows.
        noise = np.random.default_rng([self.seed, self.step_count])
        one = torch.from_numpy(noise.standard_normal(len(kinetic)))
        rest = torch.from_numpy(noise.chisquare(freedom.numpy() - 1))
        share = (1 - kept) * BOLTZMANN * self.temperature / (2 * kinetic)
        square = kept + share * (one**2 + rest) + 2 * one * (kept * share).sqrt()
        batch.velocities *= square.sqrt().to(batch.dtype)[batch.batch_idx].unsqueeze(-1)

    def state_dict(self) -> dict[str, Any]:
        """What a restart must find again."""
        own = {"temperature": self.temperature, "relaxation": self.relaxation, "seed": self.seed}
        return {**super().state_dict(), **own}
# --8<-- [end:class]


def main() -> None:
    """A run on the ranks of ``torchrun``."""
    # --8<-- [start:run]
    from nvalchemi_distributed import DomainConfig, DomainParallel, world_comm
    from nvalchemi_distributed.data import AtomicData
    from nvalchemi_distributed.dynamics import maxwell_boltzmann
    from nvalchemi_distributed.hooks import NeighborListHook
    from nvalchemi_distributed.models import LennardJonesModelWrapper

    comm = world_comm()
    model = LennardJonesModelWrapper(0.0104, 3.4, 8.5)
    batch = None
    if comm.rank == 0:
        from ase.build import bulk

        batch = Batch.from_data_list([AtomicData.from_atoms(bulk("Ar", a=5.4, cubic=True).repeat((8, 4, 4)))])
        maxwell_boltzmann(batch, 80.0, seed=1)
    hooks = [NeighborListHook(model.neighbor_config, skin=1.0)]
    integrator = VelocityRescale(model, 2.0, 80.0, 100.0, seed=5, hooks=hooks)
    with DomainParallel(integrator, DomainConfig(cutoff=8.5, skin=1.0)) as parallel:
        owned = parallel.partition(batch)
        parallel.run(owned, 50)
        print(f"rank {comm.rank}: {owned.n_owned} atoms, {float(kinetic_energy(owned, parallel.reduce)):.4f} eV")
    # --8<-- [end:run]


if __name__ == "__main__":
    main()
