"""The installed version of this distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The version, or ``0.0.0`` where the package runs from a source tree that is not installed."""
    try:
        return version("nvalchemi-distributed")
    except PackageNotFoundError:
        return "0.0.0"
