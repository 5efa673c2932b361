"""Sums, maxima and reductions of one's own over ranks: the only file that reduces scalars. Everything in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from nvalchemi_distributed.collectives import all_gather_equal
from nvalchemi_distributed.domain.transport import Transport
from nvalchemi_distributed.errors import ConfigError

Combine: TypeAlias = Callable[[Tensor], Tensor]
"""From every rank's values, (W, …) float64 in rank order, to the reduced ones, (…)."""


class Reducer(Protocol):
    """What integrators and hooks reduce with. On one process it is the identity."""

    def sum(self, value: Tensor, name: str = "sum") -> Tensor:
        """Sum over ranks of a detached tensor."""
        ...

    def max(self, value: Tensor, name: str = "max") -> Tensor:
        """Largest over ranks, elementwise."""
        ...

    def register(self, name: str, combine: Combine) -> None:
        """Add a reduction of one's own under ``name``; :meth:`apply` then does it.

        An integrator registers in its constructor; under ``DomainParallel`` its reductions go over the mesh.

        Args:
            name: not taken yet.
            combine: from every rank's values, (W, …) float64, to (…); the same function on every rank.

        Raises:
            ConfigError: the name is taken.
        """
        ...

    def apply(self, name: str, value: Tensor) -> Tensor:
        """Reduce a detached tensor, of the same shape on every rank, with what was registered under ``name``.

        Raises:
            ConfigError: nothing was registered under that name.
        """
        ...

    @property
    def registered(self) -> Mapping[str, Combine]:
        """Reductions by name."""
        ...


class Registry:
    """The reductions that were registered under a name.

    Args:
        registered: those of an earlier registry.
    """

    def __init__(self, registered: Mapping[str, Combine] | None = None) -> None:
        self._registered = dict(registered or {})

    @property
    def registered(self) -> Mapping[str, Combine]:
        """Reductions by name."""
        return self._registered

    def register(self, name: str, combine: Combine) -> None:
        """Add a reduction; see :meth:`Reducer.register`."""
        if name in self._registered or name in ("sum", "max"):
            raise ConfigError(f"a reduction named {name!r} exists already; give another name")
        self._registered[name] = combine

    def _combined(self, name: str, rows: Tensor, like: Tensor) -> Tensor:
        """``combine`` of (W, …) rows; the shape must be that of one rank's values."""
        result = self._registered[name](rows)
        if result.shape != like.shape:
            raise ConfigError(
                f"the reduction {name!r} made {tuple(result.shape)} of {tuple(rows.shape)}; it must reduce the first "
                f"dimension, to {tuple(like.shape)}"
            )
        return result.to(like.dtype)

    def _known(self, name: str) -> None:
        if name not in self._registered:
            raise ConfigError(
                f"no reduction named {name!r} ({', '.join(sorted(self._registered)) or 'none is registered'}); "
                "register(name, combine) it in the integrator's constructor"
            )


class LocalReducer(Registry):
    """The identity: one process holds every atom. A registered reduction is given that process's values alone."""

    def sum(self, value: Tensor, name: str = "sum") -> Tensor:
        """``value`` itself."""
        return value

    def max(self, value: Tensor, name: str = "max") -> Tensor:
        """``value`` itself."""
        return value

    def apply(self, name: str, value: Tensor) -> Tensor:
        """The registered reduction of (1, …) values."""
        self._known(name)
        return self._combined(name, value.detach().to(torch.float64).unsqueeze(0), value)


class MeshReducer(Registry):
    """Reductions over the ranks of one mesh.

    Args:
        transport: the mesh.
        registered: reductions to begin with, those of the integrator.
    """

    def __init__(self, transport: Transport, registered: Mapping[str, Combine] | None = None) -> None:
        super().__init__(registered)
        self._transport = transport

    def sum(self, value: Tensor, name: str = "sum") -> Tensor:
        """Sum over ranks; accumulated in float64, returned in the dtype of ``value``."""
        return self._reduce(value, torch.add, name)

    def max(self, value: Tensor, name: str = "max") -> Tensor:
        """Largest over ranks, elementwise; NaN is the caller's to exclude."""
        return self._reduce(value, torch.maximum, name)

    def apply(self, name: str, value: Tensor) -> Tensor:
        """The registered reduction, of every rank's values in rank order: the same result on every rank."""
        self._known(name)
        mine = value.detach().to(torch.float64).reshape(-1).contiguous()
        rows = mine
        if self._transport.size > 1:
            self._count(name)
            rows = mine.new_empty(self._transport.size * mine.numel())
            all_gather_equal(rows, mine, self._transport.group)
        return self._combined(name, rows.reshape(self._transport.size, *value.shape), value)

    def _reduce(self, value: Tensor, combine: Callable[[Tensor, Tensor], Tensor], name: str) -> Tensor:
        if self._transport.size == 1:
            return value.detach()
        self._count(name)
        buffer = value.detach().to(torch.float64).contiguous()
        return self._transport.all_reduce(buffer, combine).to(value.dtype)

    def _count(self, name: str) -> None:
        self._transport.roll_call(name)
        self._transport.traffic.reductions += 1
        self._transport.traffic.note(name)
