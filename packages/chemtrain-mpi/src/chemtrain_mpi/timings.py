"""When a trajectory is equilibrated, when it is sampled, and how long it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chemtrain_mpi.errors import ArgumentError

_WHOLE = 1e-6


@dataclass(frozen=True)
class Timings:
    """A trajectory in whole steps.

    Attributes
    ----------
    time_step
        Integration step, in the user's time unit.
    equilibration_steps
        Steps that are run and thrown away.
    steps_per_snapshot
        Steps between two stored snapshots.
    snapshots
        Number of stored snapshots ``T``.
    """

    time_step: float
    equilibration_steps: int
    steps_per_snapshot: int
    snapshots: int

    @property
    def total_steps(self) -> int:
        """Steps of one trajectory, equilibration included."""
        return self.equilibration_steps + self.steps_per_snapshot * self.snapshots


def process_printouts(time_step: float, total_time: float, t_equilib: float, print_every: float) -> Timings:
    """Turn times into whole steps.

    The trajectory lasts ``total_time``, of which the first ``t_equilib`` is thrown away; afterwards a snapshot is kept
    after every ``print_every``, the first one ``print_every`` after equilibration ends.

    Parameters
    ----------
    time_step, total_time, t_equilib, print_every
        All in the same time unit. The last three must be whole multiples of ``time_step``, and the sampled part a
        whole multiple of ``print_every``.

    Raises
    ------
    ArgumentError
        If a time is not positive, finite and a whole multiple, or nothing would be sampled.
    """
    if not (math.isfinite(time_step) and time_step > 0):
        raise ArgumentError(f"time_step is {time_step}; it must be positive and finite")
    equilibration = _whole("t_equilib", t_equilib, "time_step", time_step, minimum=0)
    every = _whole("print_every", print_every, "time_step", time_step, minimum=1)
    total = _whole("total_time", total_time, "time_step", time_step, minimum=1)
    sampled = total - equilibration
    if sampled < every:
        raise ArgumentError(
            f"total_time {total_time} leaves {sampled} steps after t_equilib {t_equilib}, fewer than the {every} of "
            "one print_every; lengthen total_time"
        )
    if sampled % every:
        raise ArgumentError(
            f"the {sampled} steps after equilibration are no whole multiple of the {every} steps of print_every; "
            f"set total_time to {(equilibration + sampled // every * every) * time_step:g}"
        )
    return Timings(float(time_step), equilibration, every, sampled // every)


def _whole(name: str, value: float, unit_name: str, unit: float, minimum: int) -> int:
    if not math.isfinite(value):
        raise ArgumentError(f"{name} is {value}; it must be finite")
    count = round(value / unit)
    if abs(value / unit - count) > _WHOLE * max(1, count):
        raise ArgumentError(f"{name} {value} is no whole multiple of {unit_name} {unit}; use {count * unit:g}")
    if count < minimum:
        raise ArgumentError(f"{name} {value} is {count} steps of {unit_name} {unit}; it must be at least {minimum}")
    return count
