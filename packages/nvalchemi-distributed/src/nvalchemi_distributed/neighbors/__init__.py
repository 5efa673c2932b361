"""Neighbour lists with integer images, as edges or as a padded matrix of rows."""

from nvalchemi_distributed.neighbors.config import NeighborConfig, NeighborListFormat
from nvalchemi_distributed.neighbors.neighbor_list import NeighborList, build_neighbor_list
from nvalchemi_distributed.neighbors.row_matrix import RowMatrix, build_row_matrix

__all__ = [
    "NeighborConfig",
    "NeighborList",
    "NeighborListFormat",
    "RowMatrix",
    "build_neighbor_list",
    "build_row_matrix",
]
