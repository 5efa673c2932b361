"""The errors this package raises. Each message names the number that is wrong and the remedy."""

from __future__ import annotations


class DistributedSimulationError(Exception):
    """Base of every error raised here."""


class ConfigError(DistributedSimulationError, ValueError):
    """A configuration that cannot work: refused before the first step."""


class InputError(DistributedSimulationError, ValueError):
    """A batch that cannot be simulated: bad positions, cell, masses, dtype or fields."""


class NotPartitionedError(DistributedSimulationError, RuntimeError):
    """``step``, ``run``, ``gather`` or ``save`` was called before ``partition``."""


class LostAtomsError(DistributedSimulationError, RuntimeError):
    """Atoms are missing or doubled after a migration."""


class NonFiniteError(DistributedSimulationError, FloatingPointError):
    """A model returned NaN or infinite energy, forces or virial, or positions became so."""


class ModelError(DistributedSimulationError, TypeError):
    """A model that does not declare what the framework needs, or whose output has the wrong kind or shape."""


class UnsupportedRowOp(DistributedSimulationError, RuntimeError):
    """An operation on row-distributed tensors whose meaning over ranks is not declared.

    No TypeError: torch's operators take one for a sign that the other operand may know better, and lose the message.
    """


class AdapterError(ModelError):
    """An adapter that cannot be installed or applied: its target, argument or output does not exist."""


class SummedTwiceError(ModelError):
    """An output declared as a part of a sum that is whole already: it would come out × ranks."""


class NotSummedError(ModelError):
    """An output declared whole that is one rank's part."""


class SinkFullError(DistributedSimulationError, RuntimeError):
    """A sink of fixed capacity is full."""


class TransportError(DistributedSimulationError, RuntimeError):
    """Rows that were announced did not arrive, or ranks disagree about an exchange."""
