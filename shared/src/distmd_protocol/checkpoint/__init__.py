"""Checkpoint format, version 1: writing, reading and finding. Specified in ``docs/protocol/checkpoint-v1.md``."""

from distmd_protocol.checkpoint.discover import latest, list_checkpoints, read_manifest
from distmd_protocol.checkpoint.load import Checkpoint, load_checkpoint
from distmd_protocol.checkpoint.manifest import Manifest
from distmd_protocol.checkpoint.pending import PendingSave
from distmd_protocol.checkpoint.save import save_checkpoint

__all__ = [
    "Checkpoint",
    "Manifest",
    "PendingSave",
    "latest",
    "list_checkpoints",
    "load_checkpoint",
    "read_manifest",
    "save_checkpoint",
]
