"""Cells that are too small for a model that sees one image of each atom."""

from __future__ import annotations

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import InputError
from nvalchemi_distributed.models.base import BaseModelMixin
from nvalchemi_distributed.neighbors.cells import complete_cell, heights


def check_minimum_image(model: BaseModelMixin, batch: Batch, cutoff: float | None = None) -> None:
    """Refuse a periodic cell narrower than two cutoffs where the model declares ``minimum_image``.

    An atom within the cutoff of two images of another one would interact with one of them only, silently.

    Args:
        model: declares it in its ``model_config``.
        batch: whole systems, or one rank's atoms: only cells are looked at.
        cutoff: Å, for a model that declares no neighbour list; its own otherwise.

    Raises:
        InputError: names system, axis, width, cutoff and the remedy.
    """
    if not model.model_config.minimum_image:
        return
    reach = cutoff if model.neighbor_config is None else model.cutoff
    if reach is None:
        return
    width = heights(complete_cell(batch.cell, batch.pbc).cpu())
    for s in range(batch.num_graphs):
        for axis in range(3):
            if bool(batch.pbc[s, axis]) and float(width[s, axis]) < 2.0 * reach:
                raise InputError(
                    f"system {s}: its cell is {float(width[s, axis]):.6g} Å wide along lattice vector {axis}, below "
                    f"twice the cutoff {reach} Å, and {type(model).__name__} sees one image of each atom only; "
                    f"repeat the cell to at least {2.0 * reach:.6g} Å, or use a model that takes integer images"
                )
