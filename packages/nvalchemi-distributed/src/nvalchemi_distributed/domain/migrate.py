"""Atoms change owner: every per-atom field goes with its atom, in one packed exchange."""

from __future__ import annotations

import torch
from torch import Tensor

from nvalchemi_distributed.domain.reduce import Reducer
from nvalchemi_distributed.domain.transport import Transport, pack, unpack
from nvalchemi_distributed.errors import LostAtomsError

_CHECK = 1 << 20


def row_order(batch_idx: Tensor, atom_id: Tensor) -> Tensor:
    """(N,) the order of rows everywhere: system after system, by ``atom_id`` within each."""
    by_id = atom_id.argsort()
    return by_id[batch_idx[by_id].argsort(stable=True)]


def migrate(fields: dict[str, Tensor], owner: Tensor, transport: Transport) -> dict[str, Tensor]:
    """Send each atom to its owner. Collective.

    Args:
        fields: per-atom tensors (N, …) with ``atom_id`` and ``batch_idx``.
        owner: (N,) rank that is to own each atom.
        transport: the mesh.

    Returns:
        The fields of the atoms this rank owns now, in :func:`row_order`.
    """
    if transport.size == 1:
        return fields
    order = owner.argsort(stable=True)
    send = torch.bincount(owner, minlength=transport.size).tolist()
    block, _ = transport.all_to_all(pack(fields)[order], send, "migrate")
    arrived = unpack(block, fields)
    order = row_order(arrived["batch_idx"], arrived["atom_id"])
    return {name: value[order] for name, value in arrived.items()}


def id_checksum(atom_id: Tensor) -> Tensor:
    """(2,) float64: how many atoms, and a sum over their ids, which nearly always changes when one is swapped for
    another."""
    mixed = (atom_id * 2654435761 + (atom_id >> 7)) % _CHECK
    return torch.stack([torch.tensor(float(atom_id.numel()), dtype=torch.float64), mixed.sum().to(torch.float64)])


def check_complete(
    atom_id: Tensor,
    expected: Tensor,
    reducer: Reducer,
    transport: Transport,
    positions: Tensor,
    all_ids: Tensor | None,
    last_seen: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Every atom is owned exactly once. One reduction; the same error on every rank.

    Args:
        atom_id: (N,) owned ids.
        expected: :func:`id_checksum` of the whole system.
        reducer: sums over the mesh.
        transport: the mesh, for the list of ids when something is wrong.
        positions: (N, 3) owned positions, for the message.
        all_ids: the complete set where it is not 0 … n − 1.
        last_seen: ids and positions of the atoms this rank owned at the last rebuild, for the message.

    Raises:
        LostAtomsError: names the ids that are missing or doubled, where the missing were last and the doubled are now.
    """
    total = reducer.sum(id_checksum(atom_id), "check_ids")
    if bool(torch.equal(total, expected)):
        return
    ids = transport.all_gather(atom_id, "lost.ids")
    where = transport.all_gather(positions, "lost.positions")
    complete = torch.arange(int(expected[0])) if all_ids is None else all_ids
    missing = complete[~torch.isin(complete, ids)].tolist()
    unique, counts = ids.unique(return_counts=True)
    doubled = unique[counts > 1].tolist()
    places = {i: where[ids == i].tolist() for i in doubled[:5]}
    last: dict[int, list[float]] = {}
    if last_seen is not None:
        before = transport.all_gather(last_seen[0], "lost.last_ids")
        seen = transport.all_gather(last_seen[1], "lost.last_positions")
        last = {i: seen[before == i][0].tolist() for i in missing[:5] if bool((before == i).any())}
    raise LostAtomsError(
        f"{int(expected[0])} atoms expected, {ids.numel()} found after migration: missing ids {missing[:20]}, "
        f"last at {last}, doubled ids {doubled[:20]} at {places}; restart from the last checkpoint with a smaller "
        "time step"
    )
