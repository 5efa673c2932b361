"""Systems and batches of systems, and their files. Å, eV, amu; velocities in √(eV/amu)."""

from nvalchemi_distributed.data.atomic_data import AtomicData
from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.data.extxyz import append_extxyz, format_frame, read_extxyz

__all__ = ["AtomicData", "Batch", "append_extxyz", "format_frame", "read_extxyz"]
