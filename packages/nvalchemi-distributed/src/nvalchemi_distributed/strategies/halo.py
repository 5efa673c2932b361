"""Halo strategy: refresh ghosts, run the wrapper on owned and ghost rows, consolidate outputs by kind."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from nvalchemi_distributed._typing import ModelOutputs
from nvalchemi_distributed.context import DistributedContext
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.domain.halo import copy_to_ghosts, refresh_owned
from nvalchemi_distributed.domain.reduce import Reducer
from nvalchemi_distributed.domain.transport import Transport
from nvalchemi_distributed.errors import ModelError, NonFiniteError
from nvalchemi_distributed.models.base import BaseModelMixin
from nvalchemi_distributed.models.gradient import check_wanted, gradient_outputs, make_leaves
from nvalchemi_distributed.shard_tensor import ShardTensor
from nvalchemi_distributed.sharded_batch import ShardedBatch
from nvalchemi_distributed.spec import MLIPSpec
from nvalchemi_distributed.strategies.consolidate import consolidate, energy_share
from nvalchemi_distributed.strategies.scope import as_row_tensors, forward_scope


class HaloStrategy:
    """One rank's forward. A rank's energy is a partial; the energy is the sum over ranks.

    For a model with autograd outputs the owned positions and a strain per system are the leaves, padded positions are
    ``refresh`` of them, and one gradient of this rank's energy gives final forces: contributions that belong to other
    ranks' atoms come back through the adjoint of ``refresh``.
    """

    def __init__(self, model: BaseModelMixin, spec: MLIPSpec, transport: Transport, reducer: Reducer) -> None:
        self.model, self.spec, self.transport, self.reducer = model, spec, transport, reducer

    def run_forward(self, batch: ShardedBatch, step: int) -> ModelOutputs:
        """Outputs of the whole system: per-atom ones for owned atoms, per-system ones equal on every rank. Collective.

        Raises:
            ModelError: an active output without a kind, or of the wrong shape.
            NonFiniteError: on every rank, with atom ids and step.
        """
        active = self._active()
        gradients = self.model.model_config.autograd_outputs & active
        with self._scope(batch) as context:
            if gradients:
                outputs = self._with_autograd(batch, active, context)
            else:
                padded = copy_to_ghosts(batch.positions, batch.epoch.plan, self.transport)
                outputs = dict(self.model(self._view(batch, padded, batch.cell, context)))  # type: ignore[operator]
            _require(outputs, active)
            done = consolidate(
                {k: v for k, v in outputs.items() if k in active},
                dict(self.spec.outputs),
                gradients,
                batch.num_graphs,
                context,
                self.reducer,
            )
        if done.bad is not None:
            self._raise_non_finite(batch, done.bad, done.outputs, step)
        return done.outputs

    def with_graph(self, batch: ShardedBatch) -> ModelOutputs:
        """Outputs that can be differentiated again: forces of owned atoms, per-system parts of this rank. Collective.

        A loss is the sum of all ranks' losses; so is the gradient of a parameter.

        Raises:
            ModelError: as :meth:`run_forward`.
        """
        active = self._active()
        with self._scope(batch) as context:
            outputs = self._with_autograd(batch, active, context, create_graph=True)
        _require(outputs, active)
        return {k: v.to_local() if isinstance(v, ShardTensor) else v for k, v in outputs.items() if k in active}

    def _active(self) -> frozenset[str]:
        active = self.model.model_config.check_active()
        undeclared = active - set(self.spec.outputs)
        if undeclared:
            raise ModelError(
                f"outputs {sorted(undeclared)} have no kind in the spec {self.spec.name!r}; declare them there"
            )
        check_wanted(self.model.model_config.autograd_outputs & active)
        return active

    def _scope(self, batch: ShardedBatch) -> AbstractContextManager[DistributedContext]:
        assert isinstance(self.model, nn.Module)
        return forward_scope(self.model, self.spec.distribution, batch.epoch.plan, self.transport)

    def _view(self, batch: ShardedBatch, positions: Tensor, cell: Tensor, context: DistributedContext) -> Batch:
        """The owned and ghost rows as the wrapper sees them."""
        epoch = batch.epoch
        outputs = self.model.model_config.outputs
        system = {k: v for k, v in batch.system_fields.items() if k not in outputs}
        view = Batch({**epoch.static, "positions": positions}, {**system, "cell": cell}, epoch.batch_idx)
        view.neighbors = epoch.neighbors
        return as_row_tensors(view, context) if self.spec.distribution.shard_tensors else view

    def _with_autograd(
        self, batch: ShardedBatch, active: frozenset[str], context: DistributedContext, *, create_graph: bool = False
    ) -> ModelOutputs:
        wanted = self.model.model_config.autograd_outputs & active
        leaves = make_leaves(batch.positions, batch.cell, batch.batch_idx)
        padded = refresh_owned(leaves.deformed, batch.epoch.plan, self.transport)
        view = self._view(batch, padded, leaves.deformed_cell, context)
        outputs = dict(self.model(view))  # type: ignore[operator]
        if "energy" not in outputs:
            raise ModelError(
                f"the model gave {sorted(outputs)}; {sorted(wanted)} are taken from its energy, so give it"
            )
        share = energy_share(outputs["energy"], self.spec.outputs["energy"], context)
        # The zero term puts every rank into the same exchanges, one without atoms included.
        total = share + 0.0 * padded.sum() + 0.0 * leaves.strain.sum()
        outputs.update(gradient_outputs(total, leaves, wanted, create_graph=create_graph))
        return outputs

    def _raise_non_finite(self, batch: ShardedBatch, bad: Tensor, final: ModelOutputs, step: int) -> None:
        """Every rank takes this branch: it was chosen from the reduced vector."""
        ids = self.transport.all_gather(batch.atom_id[bad], "non_finite").sort().values.tolist()
        names = sorted(k for k, v in final.items() if not bool(torch.isfinite(v).all()))
        raise NonFiniteError(
            f"not finite at step {step}: {len(ids)} atoms, ids {ids[:20]}{'…' if len(ids) > 20 else ''}"
            f"{', outputs ' + str(names) if names else ''}; atoms too close, a time step too long, or a faulty model. "
            "No frame was written after the last valid step"
        )


def _require(outputs: ModelOutputs, active: frozenset[str]) -> None:
    missing = active - set(outputs)
    if missing:
        raise ModelError(
            f"the model did not give {sorted(missing)}, which are active; narrow active_outputs or give them"
        )
