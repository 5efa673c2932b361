"""The start of an epoch: wrap, decide owners, migrate, plan the halo, copy fixed fields to ghosts, list neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distmd_protocol import Comm, agree
from nvalchemi_distributed.config import DomainConfig
from nvalchemi_distributed.domain.epoch import Epoch
from nvalchemi_distributed.domain.geometry import Boxes, make_boxes, within
from nvalchemi_distributed.domain.halo import copy_to_ghosts
from nvalchemi_distributed.domain.migrate import check_complete, migrate
from nvalchemi_distributed.domain.plan import HaloPlan, build_plan
from nvalchemi_distributed.domain.reduce import Reducer
from nvalchemi_distributed.domain.transport import Transport, pack, unpack
from nvalchemi_distributed.errors import ConfigError, InputError
from nvalchemi_distributed.hooks.neighbor_list import make_neighbors
from nvalchemi_distributed.neighbors.cells import complete_cell, fractional, wrap
from nvalchemi_distributed.neighbors.config import NeighborConfig
from nvalchemi_distributed.neighbors.neighbor_list import NeighborList
from nvalchemi_distributed.neighbors.row_matrix import RowMatrix
from nvalchemi_distributed.sharded_batch import ShardedBatch

MOVING_FIELDS = frozenset({"positions", "velocities", "forces", "image"})
"""Per-atom fields that ghosts do not copy at a rebuild; positions are refreshed at every step."""


@dataclass(frozen=True)
class Domain:
    """What stays the same over all epochs of a run."""

    config: DomainConfig
    neighbors: NeighborConfig | None
    hops: int
    list_skin: float
    transport: Transport
    reducer: Reducer
    comm: Comm

    @property
    def ghost_width(self) -> float:
        """Å: as configured, or what is needed."""
        if self.config.ghost_width is not None:
            return self.config.ghost_width
        return self.config.needed_width(self.hops)


def start_epoch(batch: ShardedBatch, boxes: Boxes, domain: Domain, number: int) -> None:
    """Bring ``batch`` into a new epoch. Collective; every rank raises together.

    Raises:
        LostAtomsError, InputError, ConfigError: see the messages.
    """
    config, transport = domain.config, domain.transport
    positions, whole = wrap(batch.positions, batch.cell, batch.pbc, batch.batch_idx)
    batch.positions = positions
    batch.image = batch.image + whole
    cell = complete_cell(batch.cell, batch.pbc)
    owner = _owners(batch, boxes, cell, config.migration_hysteresis, transport.rank)
    last_seen = None
    if batch.has_epoch:
        last = batch.epoch
        last_seen = (last.static["atom_id"][: last.plan.n_owned], last.reference)
    fields = {**batch.node_fields, "batch_idx": batch.batch_idx}
    if transport.size > 1:
        fields = migrate(fields, owner, transport)
        batch.replace_rows({k: v for k, v in fields.items() if k != "batch_idx"}, fields["batch_idx"])
    census = batch.census
    check_complete(
        batch.atom_id, census.checksum, domain.reducer, transport, batch.positions, census.all_ids, last_seen
    )
    enter_epoch(batch, boxes, domain, number)


def enter_epoch(batch: ShardedBatch, boxes: Boxes, domain: Domain, number: int) -> None:
    """Plan and list for the atoms this rank owns, where they are now. Collective.

    A restart calls this with the reference positions of the epoch that was saved.
    """
    config, transport, census = domain.config, domain.transport, batch.census
    cell = complete_cell(batch.cell, batch.pbc)
    frac = fractional(batch.positions, cell, batch.batch_idx)
    plan = build_plan(frac, batch.batch_idx, boxes, cell, domain.ghost_width, transport, config.migration_hysteresis)
    static, padded_idx = _static_rows(batch, plan, transport)
    padded = copy_to_ghosts(batch.positions, plan, transport)
    neighbors = None
    with agree(domain.comm, "building the neighbour list"):
        if domain.neighbors is not None:
            neighbors = make_neighbors(
                domain.neighbors,
                padded,
                batch.cell,
                batch.pbc,
                padded_idx,
                config.cutoff + domain.list_skin,
                plan.n_owned if domain.hops == 1 else None,
            )
            if domain.hops > 1 and isinstance(neighbors, NeighborList):
                # A model that reads ghosts over several hops computes their features: ghosts receive too, and still
                # only the energies of owned rows count.
                neighbors = replace(neighbors, n_receivers=plan.n_owned)
            if number == 0:
                _refuse_overlap(neighbors, padded, batch.cell, padded_idx, static["atom_id"])
        if config.require_nondegenerate and plan.n_padded >= census.n_atoms:
            raise ConfigError(
                f"require_nondegenerate: this rank owns {plan.n_owned} atoms and reads {plan.n_ghost} ghosts, which is "
                f"the whole system of {census.n_atoms}; use fewer ranks, a larger system, or allow it"
            )
    epoch = Epoch(
        boxes=boxes,
        plan=plan,
        reference=batch.positions.detach().clone(),
        reference_cell=cell,
        given_cell=batch.cell.detach().clone(),
        static=static,
        batch_idx=padded_idx,
        neighbors=neighbors,
        cutoff=config.cutoff,
        skin=min(domain.list_skin, config.skin),
        number=number,
    )
    batch.set_epoch(epoch)


def rebalanced(batch: ShardedBatch, boxes: Boxes, domain: Domain) -> Boxes:
    """Boxes that follow the atoms again, where the present ones have become uneven. Collective.

    One reduction; positions are gathered only when max/mean atoms in the present boxes exceeds ``rebalance_above``, and
    new cuts are taken only when they are better by 5 %, so that what cannot be balanced is left alone. Counted are the
    atoms where they are now, not those owned: these would show an imbalance one epoch too late.
    """
    size, n_atoms = domain.transport.size, batch.census.n_atoms
    if size == 1:
        return boxes
    positions, _ = wrap(batch.positions, batch.cell, batch.pbc, batch.batch_idx)
    frac = fractional(positions, complete_cell(batch.cell, batch.pbc), batch.batch_idx)
    here = torch.bincount(boxes.owner(frac, batch.batch_idx), minlength=size).to(torch.float64)
    worst = float(domain.reducer.sum(here, "balance").max()) * size / n_atoms
    if worst <= domain.config.rebalance_above:
        return boxes
    rows = pack({"atom_id": batch.atom_id, "frac": frac, "idx": batch.batch_idx})
    like = {"atom_id": batch.atom_id, "frac": frac, "idx": batch.batch_idx}
    everyone = unpack(domain.transport.all_gather(rows, "rebalance"), like)
    order = everyone["atom_id"].argsort()
    frac, idx = everyone["frac"][order], everyone["idx"][order]
    new = make_boxes(frac, idx, batch.pbc, boxes.grid, balance_above=domain.config.rebalance_above)
    counts = torch.bincount(new.owner(frac, idx), minlength=size)
    return new if float(counts.max()) * size / n_atoms < 0.95 * worst else boxes


def _owners(batch: ShardedBatch, boxes: Boxes, cell: Tensor, hysteresis: float, rank: int) -> Tensor:
    frac = fractional(batch.positions, cell, batch.batch_idx)
    owner = boxes.owner(frac, batch.batch_idx)
    if hysteresis > 0 and batch.has_epoch:
        stays = within(frac, batch.batch_idx, boxes, cell, hysteresis, rank)
        owner = torch.where(stays, torch.full_like(owner, rank), owner)
    return owner


def _static_rows(batch: ShardedBatch, plan: HaloPlan, transport: Transport) -> tuple[dict[str, Tensor], Tensor]:
    fields = {k: v for k, v in batch.node_fields.items() if k not in MOVING_FIELDS}
    fields["batch_idx"] = batch.batch_idx
    if transport.size > 1:
        fields = unpack(copy_to_ghosts(pack(fields), plan, transport), fields)
    return {k: v for k, v in fields.items() if k != "batch_idx"}, fields["batch_idx"]


def _refuse_overlap(
    neighbors: NeighborList | RowMatrix, padded: Tensor, cell: Tensor, batch_idx: Tensor, atom_id: Tensor
) -> None:
    """Two atoms at the same place have no finite force; found at the start, by id."""
    if isinstance(neighbors, RowMatrix):
        table = neighbors.rows(padded, cell)
        lines = 500_000 // neighbors.matrix.shape[1]
        for at in range(0, neighbors.n_receivers, lines):
            part = neighbors.matrix[at : at + lines]
            square = torch.zeros((), dtype=padded.dtype)
            for c in table:
                square = square + (c[part] - c[at : at + part.shape[0]].unsqueeze(1)).square()
            hit = (square < 1.0e-12).nonzero()
            if hit.numel():
                i, k = hit[0].tolist()
                pair = neighbors.source[[at + i, int(part[i, k])]]
                raise InputError(_overlap(*sorted(atom_id[pair].tolist())))
        return
    shift = torch.bmm(neighbors.images.to(cell.dtype).unsqueeze(1), cell[batch_idx[neighbors.senders]]).squeeze(1)
    d = (padded[neighbors.senders] + shift - padded[neighbors.receivers]).square().sum(-1)
    hit = (d < 1.0e-12).nonzero()
    if hit.numel():
        e = int(hit[0])
        raise InputError(_overlap(int(atom_id[neighbors.receivers[e]]), int(atom_id[neighbors.senders[e]])))


def _overlap(i: int, j: int) -> str:
    return f"atoms {i} and {j} are at the same place (or an image of it); move one of them"


def first_boxes(
    positions: Tensor, cell: Tensor, pbc: Tensor, batch_idx: Tensor, grid: tuple[int, int, int], above: float
) -> Boxes:
    """Boxes for a full batch that one rank holds."""
    wrapped, _ = wrap(positions, cell, pbc, batch_idx)
    full = complete_cell(cell, pbc)
    return make_boxes(fractional(wrapped, full, batch_idx), batch_idx, pbc, grid, balance_above=above)
