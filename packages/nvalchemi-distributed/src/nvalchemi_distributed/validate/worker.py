"""One rank's share of a validation: the same forward as in production, recorded."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distmd_protocol import Comm
from nvalchemi_distributed.config import DomainConfig
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.domain.halo import copy_to_ghosts
from nvalchemi_distributed.domain.transport import Transport
from nvalchemi_distributed.domain_parallel import DomainParallel
from nvalchemi_distributed.dynamics.base import BaseDynamics
from nvalchemi_distributed.errors import ModelError, UnsupportedRowOp
from nvalchemi_distributed.hooks.neighbor_list import NeighborListHook
from nvalchemi_distributed.models.base import BaseModelMixin
from nvalchemi_distributed.neighbors.neighbor_list import NeighborList
from nvalchemi_distributed.sharded_batch import ShardedBatch
from nvalchemi_distributed.spec import MLIPSpec
from nvalchemi_distributed.validate.trace import Event, Recorder, caller, recording


class Evaluation(BaseDynamics):
    """Evaluates a model; reads none of its outputs."""

    __needs_keys__: ClassVar[set[str]] = set()


def find_factory(module: str, name: str, file: str | None) -> Callable[[], BaseModelMixin]:
    """The function that makes the model, in this process.

    Raises:
        ModelError: there is none of that name.
    """
    if module == "__main__" or (module not in sys.modules and not _importable(module)):
        # A script, under another name, so that what stands under `if __name__ == "__main__"` does not run.
        module = f"validated_{Path(str(file)).stem.lstrip('0123456789_')}"
        if module not in sys.modules:
            spec = importlib.util.spec_from_file_location(module, str(file))
            assert spec is not None
            assert spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            sys.modules[module] = loaded
            spec.loader.exec_module(loaded)
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ModelError(f"{module} has no function {name!r}; give a function at the top level of a module")
    return found  # type: ignore[no-any-return]


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def save_batch(path: Path, batch: Batch) -> None:
    """Every field, for the ranks to read."""
    arrays = {f"node/{k}": v.detach().numpy() for k, v in batch.node_fields.items()}
    arrays |= {f"system/{k}": v.detach().numpy() for k, v in batch.system_fields.items()}
    np.savez(path, batch_idx=batch.batch_idx.numpy(), **arrays)  # type: ignore[arg-type]


def load_batch(path: Path) -> Batch:
    """The reverse of :func:`save_batch`."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {k: torch.from_numpy(file[k]) for k in file.files}
    node = {k[5:]: v for k, v in arrays.items() if k.startswith("node/")}
    system = {k[7:]: v for k, v in arrays.items() if k.startswith("system/")}
    return Batch(node, system, arrays["batch_idx"])


def save_events(path: Path, events: list[Event], extra: dict[str, Tensor]) -> None:
    """Events and arrays of one run, in one file."""
    notes = [[e.what, e.module, e.caller, e.kind, e.partial] for e in events]
    arrays = {f"event/{k}": e.value.numpy() for k, e in enumerate(events)}
    arrays |= {f"extra/{k}": v.detach().numpy() for k, v in extra.items()}
    np.savez(path, notes=np.frombuffer(json.dumps(notes).encode(), dtype=np.uint8), **arrays)  # type: ignore[arg-type]


def run(comm: Comm, folder: str, factory: list[Any], spec: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the model on this rank's atoms; events go to a file, the rest is returned.

    Args:
        comm: of the ranks.
        folder: where the batch lies and the events go.
        factory: module, name and file of the function that makes the model.
        spec: the declaration, as JSON.
        settings: ``skin``, ``extra_width`` (Å added to the ghost region) and ``seed``.
    """
    torch.manual_seed(settings["seed"])
    model = find_factory(*factory)()
    hooks: list[Any] = (
        [] if model.neighbor_config is None else [NeighborListHook(model.neighbor_config, skin=settings["skin"])]
    )
    cutoff = settings["cutoff"]
    declared = MLIPSpec.from_json(spec)
    base = DomainConfig(cutoff=cutoff, skin=settings["skin"])
    width = base.needed_width(declared.hops) + settings["extra_width"]
    config = DomainConfig(cutoff=cutoff, skin=settings["skin"], ghost_width=width)
    parallel = DomainParallel(Evaluation(model, hooks=hooks), config, spec=declared)
    batch = load_batch(Path(folder) / "batch.npz")
    owned = parallel.partition(batch if comm.rank == 0 else None)
    epoch = owned.epoch
    out: dict[str, Any] = {"n_owned": owned.n_owned, "n_ghost": owned.n_ghost, "edges": 0}
    if isinstance(epoch.neighbors, NeighborList):
        out["edges"] = within_cutoff(epoch.neighbors, owned, parallel.model.transport, cutoff)
    raw: dict[str, Tensor] = {}
    recorder: Recorder | None = None
    try:
        with recording(model) as recorder:  # type: ignore[arg-type]
            outputs = parallel.model(owned, step=0)
        raw = {f"output/{k}": v for k, v in outputs.items()}
    except (ModelError, UnsupportedRowOp) as error:
        # A matter of declarations, which are the same on every rank: none waits for another.
        return out | {"error": describe(error, recorder)}
    except Exception as error:
        # For the launcher, with the place in the model's code.
        found = json.dumps(describe(error, recorder))
        (Path(folder) / f"error{comm.rank}.json").write_text(found, encoding="utf-8")
        raise
    extra = {"ids": epoch.static["atom_id"], "batch_idx": epoch.batch_idx, **raw}
    save_events(Path(folder) / f"rank{comm.rank}.npz", recorder.events if recorder else [], extra)
    return out


def within_cutoff(edges: NeighborList, batch: ShardedBatch, transport: Transport, cutoff: float) -> int:
    """Edges of owned receivers no longer than the cutoff itself."""
    padded = copy_to_ghosts(batch.positions, batch.epoch.plan, transport)
    return count_edges(edges, padded, batch.cell, batch.epoch.batch_idx, cutoff)


def count_edges(edges: NeighborList, positions: Tensor, cell: Tensor, batch_idx: Tensor, cutoff: float) -> int:
    """Edges of the rows that count, no longer than ``cutoff`` Å."""
    shift = torch.bmm(edges.images.to(cell.dtype).unsqueeze(1), cell[batch_idx[edges.senders]]).squeeze(1)
    r = (positions[edges.senders] + shift - positions[edges.receivers]).norm(dim=-1)
    return int(((r <= cutoff) & (edges.receivers < edges.n_receivers)).sum())


def describe(error: Exception, recorder: Recorder | None) -> dict[str, str]:
    """Type, text and place of an error in the model's code."""
    where = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = caller(frame)
        where = found if found and f" {frame.f_code.co_qualname}" in found else where
    return {
        "type": type(error).__name__,
        "message": str(error),
        "where": where,
        "module": recorder.failed if recorder is not None else "",
    }
