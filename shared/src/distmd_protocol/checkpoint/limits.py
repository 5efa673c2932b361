"""The stated limits of the format. What exceeds one is refused when writing and when reading."""

from __future__ import annotations

from distmd_protocol.strict_json import MAX_DEPTH

MAX_JSON_DEPTH = MAX_DEPTH
"""Nesting of the manifest and of a shard's header."""
MAX_MANIFEST_BYTES = 256 * 1024**2
MAX_HEADER_BYTES = 100_000_000
"""Length of a shard's JSON header; the same limit as in the safetensors library."""
MAX_SHARDS = 99_999
MAX_ARRAYS_PER_SHARD = 100_000
MAX_ARRAYS = 1_000_000
"""Arrays in all shards together."""
MAX_KEY_BYTES = 1024
"""Length of a key in UTF-8."""
MAX_KEY_DEPTH = 64
"""Segments of a key."""
MAX_DIMENSIONS = 32
MAX_NAME_BYTES = 128
"""Length of a checkpoint's folder name in UTF-8."""
MAX_STEP = 2**63 - 1
STALE_AFTER_S = 24 * 3600.0
"""Age at which the leftovers of a writer that cannot be proved dead are swept."""
VISIBLE_WITHIN_S = 10.0
"""How long a rank looks for the folder that rank zero made (network file systems cache absence)."""
