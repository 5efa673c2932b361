"""Every error this package raises on purpose."""

from __future__ import annotations


class ChemtrainError(Exception):
    """Base of all errors of this package. The message says what is wrong, with the figures, and the remedy."""


class ArgumentError(ChemtrainError, ValueError):
    """An argument has no meaning, does not fit the others, or is not available; found before any work is done."""


class MissingExtraError(ChemtrainError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class OrderError(ChemtrainError):
    """Ranks entered different collective operations; the message names each rank's."""


class OverflowRetriesError(ChemtrainError):
    """A neighbour list overflowed more often than ``max_neighbor_retries`` allows."""


class NonFiniteError(ChemtrainError, FloatingPointError):
    """A loss, gradient, trajectory or parameter is not finite; the update was rejected on every rank."""


class NotInitializedError(ChemtrainError, RuntimeError):
    """Training or prediction was asked for before trajectories exist."""
