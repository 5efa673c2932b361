"""The forward that is running: what code inside a model may ask about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nvalchemi_distributed.domain.halo import fold, pad, refresh
from nvalchemi_distributed.domain.plan import HaloPlan
from nvalchemi_distributed.domain.total import total
from nvalchemi_distributed.domain.transport import Transport
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.policy import HaloStoragePolicy


@dataclass(frozen=True, eq=False)
class DistributedContext:
    """One rank's view of one forward. Outside a decomposed forward every operation is the identity.

    Attributes:
        plan: routing of the epoch; ``None`` outside a decomposed forward.
        transport: the mesh; ``None`` outside.
        policy: how ghost rows are kept right.
        custom_ops: handlers of adapted custom ops by qualified name.
    """

    plan: HaloPlan | None = None
    transport: Transport | None = None
    policy: HaloStoragePolicy = field(default_factory=HaloStoragePolicy)
    custom_ops: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def is_distributed(self) -> bool:
        """Whether a decomposed forward is running."""
        return self.plan is not None

    @property
    def rank(self) -> int:
        """Rank within the mesh; 0 outside."""
        return 0 if self.transport is None else self.transport.rank

    @property
    def size(self) -> int:
        """Ranks of the mesh; 1 outside."""
        return 1 if self.transport is None else self.transport.size

    @property
    def n_owned(self) -> int:
        """Rows of owned atoms, which come first.

        Raises:
            ModelError: outside a decomposed forward, where every row is owned and only the model knows how many.
        """
        return self._plan.n_owned

    @property
    def n_padded(self) -> int:
        """Rows of owned atoms and ghosts.

        Raises:
            ModelError: outside a decomposed forward.
        """
        return self._plan.n_padded

    @property
    def _plan(self) -> HaloPlan:
        if self.plan is None:
            raise ModelError("no decomposed forward is running; ask current_dd_context().is_distributed first")
        return self.plan

    def refresh(self, x: Tensor) -> Tensor:
        """(N + G, …) rows with ghosts equal to their owners. Differentiable; collective among ranks that share a halo.

        Raises:
            ModelError: another number of rows.
        """
        if self.plan is None or self.transport is None:
            return x
        self._check(x, "refresh")
        return refresh(x.contiguous(), self.plan, self.transport)

    def refresh_owned(self, x: Tensor) -> Tensor:
        """(N, …) owned rows to (N + G, …)."""
        if self.plan is None or self.transport is None:
            return x
        return refresh(pad(x.contiguous(), self.plan), self.plan, self.transport)

    def fold(self, x: Tensor) -> Tensor:
        """(N + G, …) rows with the parts in ghost rows added to their owners; ghost rows become zero."""
        if self.plan is None or self.transport is None:
            return x
        self._check(x, "fold")
        return fold(x.contiguous(), self.plan, self.transport)

    def total(self, x: Tensor) -> Tensor:
        """Sum of every rank's ``x``. Differentiable; collective over the mesh."""
        return x if self.transport is None else total(x, self.transport)

    def _check(self, x: Tensor, what: str) -> None:
        if x.dim() == 0 or x.shape[0] != self.n_padded:
            raise ModelError(
                f"{what} needs {self.n_padded} rows, {self.n_owned} owned and {self.n_padded - self.n_owned} ghosts, "
                f"and got shape {tuple(x.shape)}; give one row an atom and ghost"
            )


NOT_DISTRIBUTED = DistributedContext()
"""What :func:`current_dd_context` gives outside a decomposed forward."""

# Scoped, not global: set for the length of one forward and its gradient, one value a thread.
_CURRENT: ContextVar[DistributedContext] = ContextVar("dd_context", default=NOT_DISTRIBUTED)


def current_dd_context() -> DistributedContext:
    """The decomposed forward that is running, or :data:`NOT_DISTRIBUTED`."""
    return _CURRENT.get()


@contextmanager
def activate(context: DistributedContext) -> Iterator[DistributedContext]:
    """Make ``context`` the current one for a block.

    Raises:
        ModelError: under ``torch.inference_mode``, where in-place changes leave no trace.
    """
    if torch.is_inference_mode_enabled():
        raise ModelError("a decomposed forward cannot run under torch.inference_mode; use torch.no_grad")
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)
