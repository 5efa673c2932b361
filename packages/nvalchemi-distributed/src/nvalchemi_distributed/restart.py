"""Checkpoints of a decomposed run, kind ``dynamics``.

Each rank writes its shard: owned rows in their order, and the epoch as the positions and cell that it was built from
with the cuts. Restoring builds plan and list from these and then loads the present positions: neither saving nor
restoring is a rebuild, so a restart on the same number of ranks is bitwise, and saving changes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distmd_protocol import Checkpoint, Comm, load_checkpoint, rank_zero, read_manifest, save_checkpoint
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.domain.geometry import Boxes, choose_grid
from nvalchemi_distributed.domain.migrate import row_order
from nvalchemi_distributed.domain.rebuild import Domain, enter_epoch, first_boxes, start_epoch
from nvalchemi_distributed.domain.scatter import scatter_batch
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.neighbors.cells import complete_cell
from nvalchemi_distributed.sharded_batch import Census, ShardedBatch

KIND = "dynamics"


def save_dynamics(
    path: str | Path,
    batch: ShardedBatch,
    boxes: Boxes,
    comm: Comm,
    *,
    step: int,
    meta: dict[str, Any],
    keep_last: int | None,
    packages: dict[str, str],
) -> Path:
    """Write one shard a rank. Collective; returns the checkpoint's path."""
    epoch = batch.epoch
    arrays = {f"node/{k}": v for k, v in batch.node_fields.items()}
    arrays |= {f"system/{k}": v for k, v in batch.system_fields.items()}
    arrays |= {
        "batch_idx": batch.batch_idx,
        "epoch/positions": epoch.reference,
        "epoch/cell": epoch.reference_cell,
        "census/checksum": batch.census.checksum,
        **({} if batch.census.all_ids is None else {"census/all_ids": batch.census.all_ids}),
    }
    arrays |= {f"cuts/{a}": getattr(boxes, f"cuts_{a}") for a in ("x", "y", "z")}
    document = {**meta, "grid": list(boxes.grid), "epoch_number": epoch.number}
    pending = save_checkpoint(
        path,
        arrays,
        kind=KIND,
        step=step,
        comm=comm,
        meta=document,
        packages=packages,
        replicated=False,
        keep_last=keep_last,
    )
    return pending.wait()


def load_dynamics(path: str | Path, domain: Domain) -> tuple[ShardedBatch, Boxes, dict[str, Any]]:
    """This rank's batch in its epoch, the boxes and the checkpoint's meta. Collective.

    On another number of ranks than it was written by, the atoms are distributed anew: equal to rounding, not bitwise.
    """
    comm = domain.comm
    world_size = rank_zero(comm, _world_size, path)
    if world_size != comm.size:
        return _redistribute(path, world_size, domain)
    checkpoint = load_checkpoint(path, kind=KIND, comm=comm, shard=comm.rank)
    arrays = _tensors(checkpoint)
    meta = dict(checkpoint.meta)
    _check_lists(meta, domain)
    node, system = _level(arrays, "node/"), _level(arrays, "system/")
    census = Census(arrays["census/checksum"], arrays.get("census/all_ids"))
    batch = ShardedBatch(node, system, arrays["batch_idx"], census)
    grid = tuple(int(g) for g in meta["grid"])
    boxes = Boxes((grid[0], grid[1], grid[2]), arrays["cuts/x"], arrays["cuts/y"], arrays["cuts/z"], batch.pbc)
    positions, cell = batch.positions, batch.cell
    batch.positions, batch.cell = arrays["epoch/positions"], arrays["epoch/cell"]
    enter_epoch(batch, boxes, domain, int(meta["epoch_number"]))
    batch.positions, batch.cell = positions, cell
    return batch, boxes, meta


def _world_size(path: str | Path) -> int:
    return int(read_manifest(path).world_size)


def _check_lists(meta: dict[str, Any], domain: Domain) -> None:
    mine = {"cutoff": domain.config.cutoff, "list_skin": domain.list_skin, "ghost_width": domain.ghost_width}
    other = {k: (meta.get(k), v) for k, v in mine.items() if meta.get(k) != v}
    if other:
        raise ConfigError(
            f"the checkpoint was written with other list settings (written, now): {other}; use the same ones to restart"
        )


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The arrays in the dtype that was saved; numpy carries bfloat16 and float8 as integers."""
    out = {}
    for key, layout in checkpoint.layouts.items():
        value, dtype = torch.from_numpy(checkpoint.arrays[key].copy()), getattr(torch, layout.dtype)
        out[key] = value if value.dtype is dtype else value.view(dtype)
    return out


def _level(arrays: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def _redistribute(path: str | Path, world_size: int, domain: Domain) -> tuple[ShardedBatch, Boxes, dict[str, Any]]:
    comm, found = domain.comm, []

    def read() -> dict[str, Any]:
        shards = [load_checkpoint(path, kind=KIND, shard=r) for r in range(world_size)]
        parts = [_tensors(s) for s in shards]
        node = {k: torch.cat([_level(p, "node/")[k] for p in parts]) for k in _level(parts[0], "node/")}
        idx = torch.cat([p["batch_idx"] for p in parts])
        order = row_order(idx, node["atom_id"])
        full = Batch({k: v[order] for k, v in node.items()}, _level(parts[0], "system/"), idx[order])
        cell = complete_cell(full.cell, full.pbc)
        config = domain.config
        grid = choose_grid(comm.size, cell[int(torch.bincount(full.batch_idx).argmax())], config.grid_dims)
        boxes = first_boxes(full.positions, full.cell, full.pbc, full.batch_idx, grid, config.rebalance_above)
        found.append((full, boxes))
        return dict(shards[0].meta)

    meta = rank_zero(comm, read)
    full, boxes = found[0] if found else (None, None)
    batch, boxes = scatter_batch(full, boxes, comm, domain.transport)
    start_epoch(batch, boxes, domain, int(meta["epoch_number"]) + 1)
    return batch, boxes, meta
