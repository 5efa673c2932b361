"""Named tolerances: one place that says how closely what must agree with what, and why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TOL: Mapping[str, float] = MappingProxyType(
    {
        # Relative; the same formula in another library or order of summation.
        "energy-f64": 1e-10,
        "force-f64": 1e-10,
        "virial-f64": 1e-10,
        # Relative to the sum of absolute pair terms; a decomposed run against a single process.
        "decomposed-f64": 1e-12,
        "decomposed-f32": 1e-6,
        # Relative; float32 against float64.
        "energy-f32": 1e-5,
        "force-f32": 1e-4,
        # Relative; an analytic derivative against a central difference in float64.
        "finite-difference-f64": 1e-6,
        # Relative; a conversion of units there and back.
        "units-f64": 1e-14,
    }
)
"""Relative tolerances by name."""
