"""Version of this package, as installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("distmd-protocol")
    except PackageNotFoundError:
        return "0+source"


VERSION = _installed()
