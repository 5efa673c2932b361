"""Halo strategy: refresh ghosts, run the wrapper on owned and ghost rows, consolidate outputs by kind."""

from __future__ import annotations

import torch
from torch import Tensor

from nvalchemi_distributed._typing import ModelOutputs
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.domain.halo import copy_to_ghosts, fold, refresh_owned
from nvalchemi_distributed.domain.reduce import Reducer
from nvalchemi_distributed.domain.transport import Transport
from nvalchemi_distributed.errors import ModelError, NonFiniteError
from nvalchemi_distributed.models.base import BaseModelMixin
from nvalchemi_distributed.sharded_batch import ShardedBatch
from nvalchemi_distributed.spec import MLIPSpec, OutputKind

_NODE = (OutputKind.NODE_OWNED, OutputKind.NODE_FOLD)


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
        config = self.model.model_config
        active = config.check_active()
        undeclared = active - set(self.spec.outputs)
        if undeclared:
            raise ModelError(
                f"outputs {sorted(undeclared)} have no kind in the spec {self.spec.name!r}; declare them there"
            )
        if config.autograd_outputs & active:
            outputs = self._with_autograd(batch, active)
        else:
            padded = self._view(batch, copy_to_ghosts(batch.positions, batch.epoch.plan, self.transport), batch.cell)
            outputs = dict(self.model(padded))  # type: ignore[operator]
        return self._consolidate(batch, {k: v for k, v in outputs.items() if k in active}, active, step)

    def _view(self, batch: ShardedBatch, positions: Tensor, cell: Tensor) -> Batch:
        """The owned and ghost rows as the wrapper sees them."""
        epoch = batch.epoch
        outputs = self.model.model_config.outputs
        system = {k: v for k, v in batch.system_fields.items() if k not in outputs}
        view = Batch({**epoch.static, "positions": positions}, {**system, "cell": cell}, epoch.batch_idx)
        view.neighbors = epoch.neighbors
        return view

    def _with_autograd(self, batch: ShardedBatch, active: frozenset[str]) -> ModelOutputs:
        wanted = self.model.model_config.autograd_outputs & active
        unknown = wanted - {"forces", "virial", "stress"}
        if unknown:
            raise ModelError(
                f"autograd_outputs {sorted(unknown)} cannot be taken from the energy; the model must give them"
            )
        plan = batch.epoch.plan
        owned = batch.positions.detach().clone().requires_grad_(True)
        strain = torch.zeros_like(batch.cell).requires_grad_(True)
        deformed = owned + torch.bmm(owned.unsqueeze(1), strain[batch.batch_idx]).squeeze(1)
        cell = batch.cell + batch.cell @ strain
        padded = refresh_owned(deformed, plan, self.transport)
        outputs = dict(self.model(self._view(batch, padded, cell)))  # type: ignore[operator]
        energy = outputs["energy"]
        # The zero term puts every rank into the same exchanges, one without atoms included.
        total = energy.sum() + 0.0 * padded.sum() + 0.0 * strain.sum()
        gradient, strained = torch.autograd.grad(total, [owned, strain])
        if "forces" in wanted:
            outputs["forces"] = -gradient
        virial = -strained.to(torch.float64)
        virial = 0.5 * (virial + virial.transpose(-1, -2))
        if "virial" in wanted:
            outputs["virial"] = virial
        if "stress" in wanted:
            volume = batch.cell.to(torch.float64).det().abs().reshape(-1, 1, 1)
            outputs["stress"] = torch.where(volume > 0, -virial / volume, torch.zeros_like(virial))
        return outputs

    def _consolidate(
        self, batch: ShardedBatch, outputs: ModelOutputs, active: frozenset[str], step: int
    ) -> ModelOutputs:
        missing = active - set(outputs)
        if missing:
            raise ModelError(
                f"the model did not give {sorted(missing)}, which are active; narrow active_outputs or give them"
            )
        plan = batch.epoch.plan
        final: ModelOutputs = {}
        partial: list[Tensor] = []
        bad = torch.zeros(batch.num_nodes, dtype=torch.bool, device=batch.device)
        for name in sorted(outputs):
            kind, value = self.spec.outputs[name], outputs[name].detach()
            if kind in _NODE:
                if kind is OutputKind.NODE_FOLD:
                    if value.shape[0] != plan.n_padded:
                        raise ModelError(
                            f"{name} has {value.shape[0]} rows; NODE_FOLD needs {plan.n_padded}, one an owned atom or "
                            "ghost; give them, or declare NODE_OWNED"
                        )
                    value = fold(value, plan, self.transport)
                if value.shape[0] not in (plan.n_owned, plan.n_padded):
                    raise ModelError(f"{name} has {value.shape[0]} rows; expected {plan.n_owned} or {plan.n_padded}")
                final[name] = value[: plan.n_owned]
                bad |= ~torch.isfinite(final[name].reshape(plan.n_owned, -1)).all(-1) if plan.n_owned else bad
            else:
                if value.shape[0] != batch.num_graphs:
                    raise ModelError(
                        f"{name} has {value.shape[0]} rows; expected one for each of {batch.num_graphs} systems"
                    )
                if kind is OutputKind.SYSTEM_SUM:
                    partial.append(value.to(torch.float64).reshape(-1))
                else:
                    final[name] = value
        # One reduction a step: every per-system partial, and how many atoms went wrong.
        flat = torch.cat([*partial, bad.sum().to(torch.float64).reshape(1)])
        summed = self.reducer.sum(flat, "outputs")
        at = 0
        for name in sorted(outputs):
            if self.spec.outputs[name] is OutputKind.SYSTEM_SUM:
                like = outputs[name]
                final[name] = summed[at : at + like.numel()].reshape(like.shape)
                at += like.numel()
        if not bool(torch.isfinite(summed).all()) or float(summed[-1]) > 0:
            self._raise_non_finite(batch, bad, final, step)
        return final

    def _raise_non_finite(self, batch: ShardedBatch, bad: Tensor, final: ModelOutputs, step: int) -> None:
        """Every rank takes this branch: it was chosen from the reduced vector."""
        ids = self.transport.all_gather(batch.atom_id[bad], "non_finite").sort().values.tolist()
        names = sorted(k for k, v in final.items() if not bool(torch.isfinite(v).all()))
        raise NonFiniteError(
            f"not finite at step {step}: {len(ids)} atoms, ids {ids[:20]}{'…' if len(ids) > 20 else ''}"
            f"{', outputs ' + str(names) if names else ''}; atoms too close, a time step too long, or a faulty model. "
            "No frame was written after the last valid step"
        )
