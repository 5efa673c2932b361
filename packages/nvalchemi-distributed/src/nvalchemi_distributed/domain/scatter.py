"""A full batch on rank zero becomes everybody's share, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distmd_protocol import Comm
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.domain.geometry import Boxes
from nvalchemi_distributed.domain.migrate import id_checksum, row_order
from nvalchemi_distributed.domain.transport import Transport, pack, unpack
from nvalchemi_distributed.neighbors.cells import complete_cell, fractional, wrap
from nvalchemi_distributed.sharded_batch import Census, ShardedBatch

SHARED_DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


def broadcast_tensors(tensors: dict[str, Tensor] | None, comm: Comm) -> dict[str, Tensor]:
    """Rank zero's tensors by name on every rank; small ones (cells, cuts, per-system fields)."""
    header: list[Any] | None = None
    body = b""
    if comm.rank == 0:
        assert tensors is not None
        header = [[k, str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in tensors.items()]
        body = b"".join(_to_bytes(v) for v in tensors.values())
    header = comm.broadcast(header)
    body = comm.broadcast(body)
    out, at = {}, 0
    for name, dtype, shape in header or []:
        template = torch.empty(shape, dtype=SHARED_DTYPES[dtype])
        size = template.numel() * template.element_size()
        raw = (
            torch.frombuffer(bytearray(body[at : at + size]), dtype=torch.uint8)
            if size
            else torch.empty(0, dtype=torch.uint8)
        )
        at += size
        kind = torch.uint8 if template.dtype is torch.bool else template.dtype
        out[name] = raw.view(kind).reshape(shape).to(template.dtype)
    return out


def _to_bytes(value: Tensor) -> bytes:
    flat = value.detach().cpu().contiguous()
    flat = flat.to(torch.uint8) if flat.dtype is torch.bool else flat
    return flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def scatter_batch(
    batch: Batch | None, boxes: Boxes | None, comm: Comm, transport: Transport
) -> tuple[ShardedBatch, Boxes]:
    """Give every rank the atoms in its boxes. Collective; ``batch`` and ``boxes`` on rank zero only.

    ``batch`` has ``atom_id`` and ``image`` by now.
    """
    system: dict[str, Tensor] | None = None
    fields: dict[str, Tensor] = {}
    owner = torch.zeros(0, dtype=torch.int64)
    if batch is not None:
        assert boxes is not None
        wrapped, whole = wrap(batch.positions.detach(), batch.cell, batch.pbc, batch.batch_idx)
        fields = {k: v.detach() for k, v in batch.node_fields.items()}
        fields.update(positions=wrapped, image=batch.image + whole, batch_idx=batch.batch_idx)
        cell = complete_cell(batch.cell, batch.pbc)
        owner = boxes.owner(fractional(wrapped, cell, batch.batch_idx), batch.batch_idx)
        ids = batch.atom_id.sort().values
        standard = torch.equal(ids, torch.arange(ids.numel()))
        system = {f"system/{k}": v for k, v in batch.system_fields.items()}
        system |= {"cuts/x": boxes.cuts_x, "cuts/y": boxes.cuts_y, "cuts/z": boxes.cuts_z, "cuts/pbc": boxes.pbc}
        system |= {"grid": torch.tensor(boxes.grid), "checksum": id_checksum(ids)}
        system |= {} if standard else {"all_ids": ids}
        system |= {f"like/{k}": v[:0] for k, v in fields.items()}
    shared = broadcast_tensors(system, comm)
    like = {k.removeprefix("like/"): v for k, v in shared.items() if k.startswith("like/")}
    grid = tuple(shared["grid"].tolist())
    boxes = Boxes((grid[0], grid[1], grid[2]), *(shared[f"cuts/{a}"] for a in ("x", "y", "z", "pbc")))
    order = owner.argsort(stable=True)
    send = torch.bincount(owner, minlength=transport.size).tolist()
    block = pack(fields)[order] if batch is not None else pack(like)
    mine, _ = transport.all_to_all(block, send, "partition")
    rows = unpack(mine, like)
    ordered = row_order(rows["batch_idx"], rows["atom_id"])
    rows = {k: v[ordered] for k, v in rows.items()}
    batch_idx = rows.pop("batch_idx")
    system_fields = {k.removeprefix("system/"): v for k, v in shared.items() if k.startswith("system/")}
    census = Census(shared["checksum"], shared.get("all_ids"))
    return ShardedBatch(rows, system_fields, batch_idx, census), boxes


def gather_batch(batch: ShardedBatch, transport: Transport) -> Batch:
    """All systems, each in ``atom_id`` order, on every rank. Collective."""
    fields = {**batch.node_fields, "batch_idx": batch.batch_idx}
    rows = unpack(transport.all_gather(pack(fields), "gather"), fields)
    order = row_order(rows["batch_idx"], rows["atom_id"])
    rows = {k: v[order] for k, v in rows.items()}
    batch_idx = rows.pop("batch_idx")
    return Batch(rows, {k: v.clone() for k, v in batch.system_fields.items()}, batch_idx)
