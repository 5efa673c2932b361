"""Specs for common model families."""

from __future__ import annotations

from nvalchemi_distributed.spec import HaloStorage, MLIPSpec, OutputKind

SPEC_LJ_HALO = MLIPSpec(
    name="pair potential, halo",
    storage=HaloStorage.RECEIVER_OWNED,
    hops=1,
    outputs={
        "energy": OutputKind.SYSTEM_SUM,
        "forces": OutputKind.NODE_OWNED,
        "virial": OutputKind.SYSTEM_SUM,
        "stress": OutputKind.SYSTEM_SUM,
    },
)
"""Lennard-Jones and other pair potentials: every edge on the rank that owns its receiver, no fold."""
