"""From the manifest of an older version to the present one, one function a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distmd_protocol.errors import CheckpointError

FORMAT = "distmd-checkpoint"
VERSION = 1

Migration = Callable[[dict[str, Any]], dict[str, Any]]

MIGRATIONS: Mapping[int, Migration] = {}
"""``MIGRATIONS[v]`` turns the content of version ``v`` into that of version ``v + 1``. Version 1 is the first."""


def migrate(content: Any, migrations: Mapping[int, Migration] = MIGRATIONS, version: int = VERSION) -> dict[str, Any]:
    """Return the manifest's content as the present version has it.

    Parameters
    ----------
    content
        The JSON value of a manifest.
    migrations, version
        The steps, and the version to reach.

    Raises
    ------
    CheckpointError
        If it is no manifest, or of a version that is newer or has no step.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"the file is JSON, but not a manifest: it has no format {FORMAT!r}")
    found = content.get("version")
    if type(found) is not int or found < 1:
        raise CheckpointError(f"version {found!r} of the checkpoint format does not exist")
    if found > version:
        packages = content.get("packages")
        writer = packages.get("distmd-protocol") if isinstance(packages, dict) else None
        raise CheckpointError(
            f"the checkpoint has version {found} of the format, this distmd-protocol reads up to {version}; "
            f"install distmd-protocol {str(writer)[:40] if writer else 'of a later version'}, which wrote it"
        )
    current: dict[str, Any] = content
    while found < version:
        if found not in migrations:
            raise CheckpointError(f"there is no migration from version {found} of the checkpoint format")
        current = migrations[found](current)
        found += 1
    return current
