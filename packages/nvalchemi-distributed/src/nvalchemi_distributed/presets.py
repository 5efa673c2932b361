"""Specs for common model families."""

from __future__ import annotations

from nvalchemi_distributed.spec import DistributionSpec, HaloStoragePolicy, MLIPSpec, OutputKind, OutputSpec, Reduce

SPEC_LJ_HALO = MLIPSpec(
    name="pair potential, halo",
    distribution=DistributionSpec(policy=HaloStoragePolicy(), shard_tensors=False),
    outputs={
        "energy": OutputSpec(OutputKind.PER_GRAPH),
        "forces": OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY),
        "virial": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
        "stress": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
    },
)
"""Lennard-Jones and other pair potentials that give forces themselves: every edge on the rank that owns its receiver,
so owned rows are complete; plain tensors."""

SPEC_MPNN_HALO = MLIPSpec(
    name="message passing, halo",
    distribution=DistributionSpec(policy=HaloStoragePolicy()),
    outputs={
        "energy": OutputSpec(OutputKind.PER_GRAPH),
        "forces": OutputSpec(OutputKind.PER_NODE),
        "virial": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
        "stress": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
    },
)
"""Message-passing models in plain torch: node rows are refreshed when they are gathered and corrected when they are
scattered to, energies summed over owned atoms, forces and stress from the gradient of the energy."""
