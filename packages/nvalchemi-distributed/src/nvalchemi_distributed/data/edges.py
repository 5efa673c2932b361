"""A batch's neighbour list under the names that model wrappers read.

Letters: N rows, E edges, M receivers, K most neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvalchemi_distributed.errors import InputError
from nvalchemi_distributed.neighbors.cells import cartesian_shift
from nvalchemi_distributed.neighbors.neighbor_list import NeighborList
from nvalchemi_distributed.neighbors.row_matrix import RowMatrix

EDGE_FIELDS = frozenset({"neighbor_list", "neighbor_list_shifts", "shifts", "edge_ptr"})
MATRIX_FIELDS = frozenset({"neighbor_matrix", "neighbor_matrix_shifts", "num_neighbors"})


def edge_field(name: str, neighbors: object, cell: Tensor, batch_idx: Tensor) -> Tensor:
    """One of :data:`EDGE_FIELDS` or :data:`MATRIX_FIELDS` of the list that a hook has built.

    Args:
        name: ``neighbor_list`` (E, 2) receiver and sender of each edge; ``neighbor_list_shifts`` (E, 3) whole cells
            added to the sender; ``shifts`` (E, 3) the same in Å; ``edge_ptr`` (N + 1,) first edge of each receiver.
            ``neighbor_matrix`` (M, K) neighbours, padded with N; ``neighbor_matrix_shifts`` (M, K, 3) whole cells;
            ``num_neighbors`` (M,); a matrix of a large system may hold pairs a few 1e-5 longer than the cutoff. All
            int64 but ``shifts``.
        neighbors: the batch's list.
        cell: (S, 3, 3) Å.
        batch_idx: (N,) system of each row.

    Raises:
        InputError: no list yet, or one in the other format.
    """
    wanted = "coo" if name in EDGE_FIELDS else "matrix"
    if neighbors is None:
        raise InputError(
            f"{name}: the batch has no neighbour list yet; add NeighborListHook, or call its update(batch)"
        )
    if isinstance(neighbors, NeighborList) and wanted == "coo":
        return _coo(name, neighbors, cell, batch_idx)
    if isinstance(neighbors, RowMatrix) and wanted == "matrix":
        return _matrix(name, neighbors, batch_idx.shape[0])
    raise InputError(
        f"{name} belongs to the {wanted!r} format, and the list is a {type(neighbors).__name__}; "
        f"ask for it with NeighborConfig(format={wanted!r})"
    )


def _coo(name: str, edges: NeighborList, cell: Tensor, batch_idx: Tensor) -> Tensor:
    if name == "neighbor_list":
        return torch.stack([edges.receivers, edges.senders], dim=-1)
    if name == "neighbor_list_shifts":
        return edges.images
    if name == "shifts":
        return cartesian_shift(edges.images, cell, batch_idx[edges.receivers])
    counts = torch.bincount(edges.receivers, minlength=batch_idx.shape[0])
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _matrix(name: str, rows: RowMatrix, n: int) -> Tensor:
    n_rows, lines = rows.source.shape[0], rows.matrix.to(torch.int64)
    if name == "num_neighbors":
        return rows.to_atoms((lines != n_rows).sum(-1))
    # Lines are in an order of their own, and places beyond the neighbours name a row that is no atom.
    if name == "neighbor_matrix":
        return rows.to_atoms(torch.cat([rows.source, rows.source.new_full((1,), n)])[lines])
    none = rows.image.new_zeros(1, 3)
    return rows.to_atoms(torch.cat([none.expand(rows.n_receivers, 3), rows.image, none])[lines])
