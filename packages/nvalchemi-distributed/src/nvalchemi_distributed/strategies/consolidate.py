"""A rank's outputs become those of the whole system, each by its kind. One reduction in all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nvalchemi_distributed._typing import ModelOutputs
from nvalchemi_distributed.context import DistributedContext
from nvalchemi_distributed.domain.reduce import Reducer
from nvalchemi_distributed.errors import ModelError, NotSummedError, SummedTwiceError
from nvalchemi_distributed.shard_tensor import RowKind, ShardTensor
from nvalchemi_distributed.spec import OutputKind, OutputSpec, Reduce


@dataclass(frozen=True)
class Consolidated:
    """Outputs of the whole system, and where they are not finite.

    Attributes:
        outputs: per-atom ones for owned atoms, per-system ones equal on every rank.
        bad: (N,) owned atoms with a value that is not finite; None on every rank where all values are finite.
    """

    outputs: ModelOutputs
    bad: Tensor | None


def is_summed(name: str, value: Tensor, spec: OutputSpec) -> bool:
    """Whether ``value`` is this rank's part of a sum over ranks. A row tensor knows; a plain one is what the spec says.

    Raises:
        SummedTwiceError: a value that is whole already and declared to be summed: it would come out × ranks.
        NotSummedError: a part of a sum that is declared whole.
    """
    if not isinstance(value, ShardTensor):
        return spec.summed
    info = value.row_info
    if info.kind is not RowKind.SYSTEM:
        return spec.summed
    if spec.reduce is Reduce.ALL_REDUCE and not info.partial and not info.zero:
        raise SummedTwiceError(
            f"{name} is declared ALL_REDUCE, but the model has summed it over ranks already: the result would be too "
            "large by the number of ranks; declare OutputSpec(OutputKind.GLOBAL)"
        )
    if not spec.summed and info.partial:
        raise NotSummedError(
            f"{name} is declared whole on every rank, but it is this rank's part of a sum; declare "
            "OutputSpec(OutputKind.PER_GRAPH)"
        )
    return info.partial


def energy_share(value: Tensor, spec: OutputSpec, context: DistributedContext) -> Tensor:
    """The scalar that this rank differentiates: over all ranks they sum to the energy, once.

    A rank's part counts whole; an energy that every rank holds whole counts on rank zero.
    """
    part = is_summed("energy", value, spec)
    plain = value.to_local() if isinstance(value, ShardTensor) else value
    return plain.sum() * (1.0 if part or context.rank == 0 else 0.0)


def consolidate(
    outputs: ModelOutputs,
    specs: dict[str, OutputSpec],
    gradients: frozenset[str],
    n_systems: int,
    context: DistributedContext,
    reducer: Reducer,
) -> Consolidated:
    """Fold, slice or sum.

    Args:
        outputs: of this rank; detached here.
        specs: by name.
        gradients: those that the framework took from the energy: owned rows, complete, and parts of sums.
        n_systems: S.
        context: the forward they come from.
        reducer: sums over the mesh.

    Raises:
        ModelError: a number of rows that the declared kind does not have.
    """
    n_owned, n_padded = context.n_owned, context.n_padded
    final: ModelOutputs = {}
    summed: dict[str, Tensor] = {}
    probes: list[Tensor] = []
    for name in sorted(outputs):
        spec, value = specs[name], outputs[name]
        in_parts = name not in gradients and not isinstance(value, ShardTensor)
        if spec.kind is OutputKind.PER_NODE:
            rows = _plain(value)
            if in_parts and spec.reduce is Reduce.NONE:
                if rows.shape[:1] != (n_padded,):
                    raise ModelError(
                        f"{name} has {rows.shape[0] if rows.dim() else 0} rows; PER_NODE with Reduce.NONE needs "
                        f"{n_padded}, one an owned atom or ghost, whose parts are folded; give them, or declare "
                        "Reduce.OWNED_ONLY"
                    )
                rows = context.fold(rows)
            if rows.dim() == 0 or rows.shape[0] not in (n_owned, n_padded):
                raise ModelError(f"{name} has shape {tuple(rows.shape)}; expected {n_owned} or {n_padded} rows")
            final[name] = rows[:n_owned]
            probes.append(_probe(final[name]))
            continue
        part = True if name in gradients else is_summed(name, value, spec)
        rows = _plain(value)
        if spec.kind is OutputKind.PER_GRAPH and rows.shape[:1] != (n_systems,):
            raise ModelError(f"{name} has shape {tuple(rows.shape)}; expected one row for each of {n_systems} systems")
        if part:
            summed[name] = rows
        else:
            final[name] = rows
            probes.append(_probe(rows))
    # One reduction a step: every per-system part, and whether atoms went wrong.
    parts = [*(v.to(torch.float64).reshape(-1) for v in summed.values()), *probes]
    total = reducer.sum(torch.cat(parts), "outputs") if parts else torch.zeros(1, dtype=torch.float64)
    at = 0
    for name, like in summed.items():
        final[name] = total[at : at + like.numel()].view(like.shape)
        at += like.numel()
    if math.isfinite(float(total.sum())):
        return Consolidated(final, None)
    # Every rank comes here or none does. Finite numbers may still have a sum that is too large for their dtype.
    bad = torch.zeros(n_owned, dtype=torch.bool, device=total.device)
    wrong = total.new_zeros(1)
    for name, value in final.items():
        ok = torch.isfinite(value)
        wrong += (~ok).sum()
        if specs[name].kind is OutputKind.PER_NODE and n_owned:
            bad |= ~ok.reshape(n_owned, -1).all(-1)
    return Consolidated(final, bad if float(reducer.sum(wrong, "not_finite")) > 0 else None)


def _probe(value: Tensor) -> Tensor:
    """(1,): zero for finite values and NaN for others, which then is the total over ranks too."""
    return value.sum().to(torch.float64).reshape(1) * 0.0


def _plain(value: Tensor) -> Tensor:
    value = value.to_local() if isinstance(value, ShardTensor) else value
    return value.detach()
