"""Specs for three kinds of models, for the page about them; a test runs it."""

# ruff: noqa: E402 — each snippet brings its imports
from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

# --8<-- [start:modules]
from nvalchemi_distributed import SPEC_MPNN_HALO, DistributionSpec, MethodAdapter, MLIPSpec, OutputKind, OutputSpec
from nvalchemi_distributed.ops import GatherInputs

layers = [MethodAdapter(f"model.interactions.{k}", transforms=(GatherInputs("node_feats"),)) for k in (1, 2)]
modules = MLIPSpec(
    distribution=DistributionSpec(shard_tensors=False, adapters=tuple(layers)),
    outputs=SPEC_MPNN_HALO.outputs,
    name="three interactions",
)
# --8<-- [end:modules]

# --8<-- [start:opaque]
opaque = MLIPSpec(DistributionSpec(shard_tensors=False), outputs=SPEC_MPNN_HALO.outputs, hops=3)
# --8<-- [end:opaque]

# --8<-- [start:script]
from nvalchemi_distributed import ScriptAdapter

scripted = DistributionSpec(
    shard_tensors=False, adapters=tuple(ScriptAdapter("model", f"interactions.{k}", "node_feats") for k in (1, 2))
)
# --8<-- [end:script]

# --8<-- [start:op]
from nvalchemi_distributed import OpAdapter
from nvalchemi_distributed.ops import AllReduceSum, ScatterOutputs

kernels = DistributionSpec(
    custom_ops=(
        # Each edge writes to both of its ends: parts in ghost rows go to their owners.
        OpAdapter("mymodel::fused_message", output_transforms={0: ScatterOutputs()}),
        # A structure factor: this rank's part of a sum that the next lines read.
        OpAdapter("mymodel::structure_factor", output_transforms={0: AllReduceSum()}),
    )
)
# --8<-- [end:op]

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(".")
# --8<-- [start:save]
charges = {**modules.outputs, "charges": OutputSpec(OutputKind.PER_NODE, "owned_only")}
spec = dataclasses.replace(modules, outputs=charges)  # everything else is kept
spec.save(folder / "my_model_spec.json")
assert MLIPSpec.load(folder / "my_model_spec.json") == spec
# --8<-- [end:save]
