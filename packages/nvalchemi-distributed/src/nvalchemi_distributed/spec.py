"""What a model declares, so that the framework knows how to run it on one rank's atoms and ghosts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from nvalchemi_distributed.errors import ModelError

SPEC_VERSION = 1


class OutputKind(StrEnum):
    """How an output of the rank-local forward becomes the output of the whole system.

    ``NODE_OWNED``: rows of owned atoms are complete; ghost rows are dropped.
    ``NODE_FOLD``: rows of ghosts hold parts that belong to their owners; they are added there.
    ``SYSTEM_SUM``: a per-system partial; summed over ranks in float64, once.
    ``SYSTEM_REPLICATED``: the same on every rank already.
    """

    NODE_OWNED = "node_owned"
    NODE_FOLD = "node_fold"
    SYSTEM_SUM = "system_sum"
    SYSTEM_REPLICATED = "system_replicated"


class HaloStorage(StrEnum):
    """How ghost features stay right inside the model.

    ``RECEIVER_OWNED``: edges have owned receivers, so owned rows are complete after a local scatter.
    """

    RECEIVER_OWNED = "receiver_owned"


@dataclass(frozen=True)
class MLIPSpec:
    """Frozen declaration of one model's behaviour under decomposition. Change a copy with ``dataclasses.replace``.

    Attributes:
        name: for messages.
        storage: see :class:`HaloStorage`.
        hops: message-passing layers that read ghosts without a refresh; the ghost region is ``hops × cutoff`` wide.
        outputs: kind of each output.
    """

    name: str
    storage: HaloStorage = HaloStorage.RECEIVER_OWNED
    hops: int = 1
    outputs: Mapping[str, OutputKind] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.hops < 1:
            raise ModelError(
                f"spec {self.name!r}: hops={self.hops}; a model reads at least its neighbours, give 1 or more"
            )
        object.__setattr__(self, "storage", HaloStorage(self.storage))
        outputs = {k: OutputKind(v) for k, v in self.outputs.items()}
        object.__setattr__(self, "outputs", MappingProxyType(outputs))

    def to_json(self) -> str:
        """The spec as JSON; :meth:`from_json` gives an equal one."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["storage"] = self.storage.value
        plain["outputs"] = {k: v.value for k, v in self.outputs.items()}
        return json.dumps({"version": SPEC_VERSION, "spec": plain}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> MLIPSpec:
        """Read what :meth:`to_json` wrote.

        Raises:
            ModelError: another version, an unknown or missing field, or an unknown kind.
        """
        try:
            document = json.loads(text)
            version, plain = document["version"], dict(document["spec"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"not a spec written by to_json: {error}") from error
        if version != SPEC_VERSION:
            raise ModelError(f"spec version {version!r}; this release reads version {SPEC_VERSION}")
        known = {f.name for f in dataclasses.fields(cls)}
        if set(plain) != known:
            raise ModelError(f"spec fields {sorted(set(plain) ^ known)} are unknown or missing")
        return _build(cls, plain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MLIPSpec) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())


def _build(cls: type[MLIPSpec], plain: dict[str, Any]) -> MLIPSpec:
    try:
        return cls(**plain)
    except ValueError as error:
        raise ModelError(f"spec holds an unknown kind: {error}") from error
