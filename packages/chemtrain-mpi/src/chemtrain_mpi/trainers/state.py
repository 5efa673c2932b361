"""All that training changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chemtrain_mpi.errors import NotInitializedError
from chemtrain_mpi.trajectories import Params, Trajectory


@dataclass
class TrainerState:
    """Parameters, optimiser, trajectories and counters of a trainer.

    Attributes
    ----------
    params, opt_state, best_params
        Current parameters, the optimiser's state, and the parameters of the best epoch.
    best_loss
        Its loss.
    epoch, update
        Completed epochs and updates.
    epoch_losses
        Loss of each epoch.
    trajectories
        One a state point; ``None`` before they are initialised.
    runs
        Runs of trajectories outside of updates; the number goes into their keys, so that no two share one.
    mid_epoch
        An update of an epoch that is not completed has been applied.
    """

    params: Params
    opt_state: Any
    best_params: Params
    # Not infinity: the checkpoint's meta data is strict JSON.
    best_loss: float = float(np.finfo(np.float64).max)
    epoch: int = 0
    update: int = 0
    epoch_losses: list[float] = field(default_factory=list)
    trajectories: list[Trajectory] | None = None
    runs: int = 0
    mid_epoch: bool = False

    def arrays(self) -> dict[str, Any]:
        """What of this is arrays, trajectories apart."""
        return {"params": self.params, "opt_state": self.opt_state, "best_params": self.best_params}

    def require_trajectories(self) -> list[Trajectory]:
        """The trajectories.

        Raises
        ------
        NotInitializedError
            If there are none yet, naming the calls that make some.
        """
        if self.trajectories is None:
            raise NotInitializedError(
                "there are no trajectories yet; call initialize_trajstates(), load_trajstates(path) or restore(path)"
            )
        return self.trajectories
