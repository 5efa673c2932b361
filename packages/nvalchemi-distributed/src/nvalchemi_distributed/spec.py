"""What a model declares, so that the framework knows how to run it on one rank's atoms and ghosts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from nvalchemi_distributed.adapters import (
    FunctionAdapter,
    JitAdapter,
    MethodAdapter,
    OpAdapter,
    PythonAdapter,
    ScriptAdapter,
)
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.policy import GatherMode, HaloStoragePolicy, ScatterMode
from nvalchemi_distributed.spec_io import from_plain, to_plain
from nvalchemi_distributed.transforms import (
    AllReduceSum,
    GatherInputs,
    KeepRows,
    RefreshInputs,
    RefreshOutputs,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
)

__all__ = [
    "DistributionSpec",
    "FunctionAdapter",
    "GatherMode",
    "HaloStoragePolicy",
    "JitAdapter",
    "MLIPSpec",
    "MethodAdapter",
    "OpAdapter",
    "OutputKind",
    "OutputSpec",
    "PythonAdapter",
    "Reduce",
    "ScatterMode",
    "ScriptAdapter",
]

SPEC_VERSION = 2

Adapter: TypeAlias = MethodAdapter | FunctionAdapter | PythonAdapter | JitAdapter | ScriptAdapter


class OutputKind(StrEnum):
    """``PER_NODE``: one row an atom. ``PER_GRAPH``: one row a system. ``GLOBAL``: whole and equal on every rank."""

    PER_NODE = "per_node"
    PER_GRAPH = "per_graph"
    GLOBAL = "global"


class Reduce(StrEnum):
    """How the ranks' values of an output become the output.

    ``NONE``: the kind's own way. Per node: (N + G) rows whose ghosts hold parts, which are added to their owners. Per
    graph: this rank's part, summed over ranks. Global: as it is.
    ``ALL_REDUCE``: this rank's part, summed over ranks, in any case.
    ``OWNED_ONLY``: owned rows are complete (N or N + G rows, ghosts dropped); a per-graph value is whole on every rank.

    A :class:`~nvalchemi_distributed.shard_tensor.ShardTensor` knows itself whether it is a part, and goes by that.
    """

    NONE = "none"
    ALL_REDUCE = "all_reduce"
    OWNED_ONLY = "owned_only"


@dataclass(frozen=True)
class OutputSpec:
    """Kind of one output, and how it is combined.

    Raises:
        ModelError: an unknown kind, or a per-node output to be all-reduced (rows of different atoms).
    """

    kind: OutputKind
    reduce: Reduce = Reduce.NONE

    def __post_init__(self) -> None:
        for name, kinds in (("kind", OutputKind), ("reduce", Reduce)):
            value = getattr(self, name)
            if value not in list(kinds):
                raise ModelError(f"output {name} {value!r} is an unknown kind; use one of {[str(k) for k in kinds]}")
            object.__setattr__(self, name, kinds(value))
        if self.kind is OutputKind.PER_NODE and self.reduce is Reduce.ALL_REDUCE:
            raise ModelError("a per-node output cannot be all-reduced: ranks hold rows of different atoms; use NONE")

    @property
    def summed(self) -> bool:
        """Whether a plain value is this rank's part of a sum over ranks."""
        return self.reduce is Reduce.ALL_REDUCE or (self.reduce is Reduce.NONE and self.kind is OutputKind.PER_GRAPH)


@dataclass(frozen=True)
class DistributionSpec:
    """How the inside of a model is run over ranks; no chemistry in it.

    Attributes:
        policy: how ghost rows are kept right.
        custom_ops: meanings of custom ops.
        third_party_helpers: changes to methods and helpers.
        adapters: both kinds mixed, for convenience; sorted into the two fields above.
        shard_tensors: whether the wrapper gets :class:`~nvalchemi_distributed.shard_tensor.ShardTensor` fields. With
            ``False`` it gets plain tensors, and adapters (or a wide ghost region) are all there is.

    Raises:
        ModelError: an adapter of an unknown type.
    """

    policy: HaloStoragePolicy = field(default_factory=HaloStoragePolicy)
    custom_ops: tuple[OpAdapter, ...] = ()
    third_party_helpers: tuple[Adapter, ...] = ()
    adapters: tuple[Adapter | OpAdapter, ...] = ()
    shard_tensors: bool = True

    def __post_init__(self) -> None:
        every = (*self.custom_ops, *self.third_party_helpers, *self.adapters)
        wrong = [a for a in every if not isinstance(a, OpAdapter | Adapter)]
        if wrong:
            raise ModelError(f"{wrong[0]!r} is no adapter; use OpAdapter, MethodAdapter, FunctionAdapter, "
                             "PythonAdapter, "
                             "JitAdapter or ScriptAdapter")  # fmt: skip
        object.__setattr__(self, "custom_ops", tuple(a for a in every if isinstance(a, OpAdapter)))
        object.__setattr__(self, "third_party_helpers", tuple(a for a in every if not isinstance(a, OpAdapter)))
        object.__setattr__(self, "adapters", ())


@dataclass(frozen=True)
class MLIPSpec:
    """Frozen declaration of one model's behaviour under decomposition. Change a copy with ``dataclasses.replace``.

    Attributes:
        distribution: what happens inside the model.
        outputs: kind of each output; a bare :class:`OutputKind` means the kind's own way of combining.
        hops: message-passing layers that read ghosts without a refresh; the ghost region is ``hops × cutoff`` wide.
        name: for messages.

    Raises:
        ModelError: ``hops`` below 1, or an unknown kind.
    """

    distribution: DistributionSpec = field(default_factory=DistributionSpec)
    outputs: Mapping[str, OutputSpec] = field(default_factory=dict)
    hops: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.distribution, DistributionSpec):
            raise ModelError(f"distribution is a {type(self.distribution).__name__}; give a DistributionSpec")
        if self.hops < 1:
            raise ModelError(
                f"spec {self.name!r}: hops={self.hops}; a model reads at least its neighbours, give 1 or more"
            )
        outputs = {k: v if isinstance(v, OutputSpec) else OutputSpec(v) for k, v in self.outputs.items()}
        object.__setattr__(self, "outputs", MappingProxyType(outputs))

    def to_json(self) -> str:
        """The spec as JSON; :meth:`from_json` gives an equal one."""
        return json.dumps({"version": SPEC_VERSION, "spec": to_plain(self)}, sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str) -> MLIPSpec:
        """Read what :meth:`to_json` wrote.

        Raises:
            ModelError: another version, an unknown or missing field, or an unknown type or kind.
        """
        try:
            document = json.loads(text)
            version, plain = document["version"], document["spec"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"not a spec written by to_json: {error}") from error
        if version != SPEC_VERSION:
            raise ModelError(f"spec version {version!r}; this release reads version {SPEC_VERSION}")
        spec = from_plain(plain, _TYPES)
        if not isinstance(spec, MLIPSpec):
            raise ModelError(f"not a spec written by to_json: it holds a {type(spec).__name__}")
        return spec

    def save(self, path: str | Path) -> Path:
        """Write the spec as JSON. A file that is there is replaced as a whole. Returns the path."""
        path = Path(path)
        part = path.with_name(f".{path.name}.part")
        part.write_text(self.to_json() + "\n", encoding="utf-8")
        os.replace(part, path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> MLIPSpec:
        """Read what :meth:`save` wrote.

        Raises:
            ModelError: as :meth:`from_json`; the message names the file.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MLIPSpec) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())


_TYPES: Mapping[str, type] = {
    t.__name__: t
    for t in (
        MLIPSpec, DistributionSpec, HaloStoragePolicy, OutputSpec,
        OpAdapter, MethodAdapter, FunctionAdapter, PythonAdapter, JitAdapter, ScriptAdapter,
        GatherInputs, RefreshInputs, SliceOwned, ScatterOutputs, RefreshOutputs, SliceOutputsOwned,
        AllReduceSum, KeepRows,
    )
}  # fmt: skip
