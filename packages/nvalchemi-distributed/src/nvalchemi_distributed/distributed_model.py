"""One forward on a decomposed batch, without an integrator."""

from __future__ import annotations

from nvalchemi_distributed._typing import ModelOutputs
from nvalchemi_distributed.domain.reduce import Reducer
from nvalchemi_distributed.domain.transport import Transport
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.models.base import BaseModelMixin
from nvalchemi_distributed.sharded_batch import ShardedBatch
from nvalchemi_distributed.spec import MLIPSpec
from nvalchemi_distributed.strategies.halo import HaloStrategy


class DistributedModel:
    """A single-process wrapper, its spec and the strategy: ``model(sharded_batch) -> ModelOutputs``.

    Args:
        model: the wrapper.
        transport: the mesh.
        reducer: sums over the mesh.
        spec: how the model behaves; its own ``distribution_spec`` when left out.

    Raises:
        ModelError: a model without a spec.
    """

    def __init__(
        self, model: BaseModelMixin, transport: Transport, reducer: Reducer, spec: MLIPSpec | None = None
    ) -> None:
        spec = model.distribution_spec if spec is None else spec
        if spec is None:
            raise ModelError(
                f"{type(model).__name__} has no distribution_spec, so nothing says how it behaves under decomposition; "
                "declare one (a preset such as SPEC_LJ_HALO, or an MLIPSpec)"
            )
        self.model, self.spec, self.transport = model, spec, transport
        self._strategy = HaloStrategy(model, spec, transport, reducer)

    def __call__(self, batch: ShardedBatch, *, step: int = 0) -> ModelOutputs:
        """Per-atom outputs for owned atoms, per-system outputs for the whole system on every rank. Collective."""
        return self._strategy.run_forward(batch, step)

    def with_graph(self, batch: ShardedBatch) -> ModelOutputs:
        """Outputs that can be differentiated again, for a loss on energies, forces or stress. Collective.

        Per-atom outputs are complete for owned atoms; per-system ones are this rank's part. The loss is the sum of all
        ranks' losses, so each term is written for owned atoms (or once a system), and gradients of parameters are
        summed over ranks: ``transport``-wide sums such as ``DomainParallel.reduce.sum``.
        """
        return self._strategy.with_graph(batch)
