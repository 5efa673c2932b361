"""Which level a field belongs to: one row an atom (``node``) or one row a system (``system``)."""

from __future__ import annotations

from typing import Literal

Level = Literal["node", "system"]

NODE_FIELDS: dict[str, tuple[int, ...]] = {
    "positions": (3,),
    "atomic_numbers": (),
    "atomic_masses": (),
    "velocities": (3,),
    "forces": (3,),
    "atom_id": (),
    "image": (3,),
}
"""Known per-atom fields and the shape of one row."""

SYSTEM_FIELDS: dict[str, tuple[int, ...]] = {
    "cell": (3, 3),
    "pbc": (3,),
    "energy": (1,),
    "stress": (3, 3),
    "virial": (3, 3),
}
"""Known per-system fields and the shape of one row."""
