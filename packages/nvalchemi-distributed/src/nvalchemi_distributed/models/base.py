"""The interface between a model and the framework."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from nvalchemi_distributed._typing import ModelOutputs
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.neighbors.config import NeighborConfig, NeighborListFormat
from nvalchemi_distributed.spec import MLIPSpec

__all__ = ["BaseModelMixin", "ModelConfig", "ModelOutputs", "NeighborConfig", "NeighborListFormat"]


@dataclass
class ModelConfig:
    """What a model can give, and what it is asked for.

    Attributes:
        outputs: every output the model has.
        autograd_outputs: those that the framework takes from the energy: ``forces``, and ``virial`` or ``stress``.
            Empty for a model that returns them itself.
        neighbor_config: what its neighbour list must be, or ``None`` when it needs none.
        minimum_image: the model sees one image of each atom only, by a minimum-image convention or a list of its own;
            a periodic cell narrower than twice the cutoff is then refused. Otherwise such cells are ordinary input.
        active_outputs: what the next forward computes; all of ``outputs`` when left out. May be changed at any time.

    Raises:
        ModelError: an active or autograd output that is not in ``outputs``.
    """

    outputs: frozenset[str] = frozenset({"energy"})
    autograd_outputs: frozenset[str] = frozenset()
    neighbor_config: NeighborConfig | None = None
    minimum_image: bool = False
    active_outputs: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.outputs = frozenset(self.outputs)
        self.autograd_outputs = frozenset(self.autograd_outputs)
        self.active_outputs = set(self.active_outputs) or set(self.outputs)
        if not self.autograd_outputs <= self.outputs:
            raise ModelError(
                f"autograd_outputs {sorted(self.autograd_outputs - self.outputs)} are not among the outputs"
            )
        self.check_active()

    def check_active(self) -> frozenset[str]:
        """The active outputs; an error names those that the model does not have."""
        unknown = set(self.active_outputs) - self.outputs
        if unknown:
            raise ModelError(f"active_outputs {sorted(unknown)} are not outputs of this model ({sorted(self.outputs)})")
        return frozenset(self.active_outputs)


class BaseModelMixin:
    """What a wrapper adds to a ``torch.nn.Module``. It stays single-process; under decomposition it is given one rank's
    owned and ghost rows.

    A wrapper sets ``self.model_config`` in ``__init__``, implements ``forward(data) -> ModelOutputs``, and declares
    :attr:`distribution_spec` to run decomposed. ``data.neighbors`` holds the list asked for, whose first
    ``n_receivers`` rows are the atoms whose energy counts.

    Output shapes: ``energy`` (S, 1) eV; ``forces`` (M, 3) eV/Å for M receivers; ``virial`` (S, 3, 3) eV, positive for
    repulsion; ``stress`` (S, 3, 3) eV/Å³, ``−virial/V``.
    """

    model_config: ModelConfig

    @property
    def distribution_spec(self) -> MLIPSpec | None:
        """How the model behaves under decomposition; ``None`` refuses it."""
        return None

    @property
    def neighbor_config(self) -> NeighborConfig | None:
        """Shorthand for ``model_config.neighbor_config``."""
        return self.model_config.neighbor_config

    @property
    def cutoff(self) -> float:
        """The model's cutoff, Å."""
        if self.model_config.neighbor_config is None:
            raise ModelError(f"{type(self).__name__} declares no neighbor_config, so it has no cutoff")
        return self.model_config.neighbor_config.cutoff

    def system_fields(self, batch: Batch) -> dict[str, Tensor]:
        """Per-system fields that need the whole system (composition, total charge, …), computed once from it.

        Under decomposition they are computed on the full batch in ``partition`` and ``restore`` and are ordinary system
        fields.
        """
        return {}

    def restrict(self, names: Iterable[str]) -> None:
        """Compute only these outputs from now on."""
        self.model_config.active_outputs = set(names)
        self.model_config.check_active()
