"""pytest plugin: markers, the ``--slow`` option, a header with backends and versions, and the end of the pools.

Load it with ``-p distmd_protocol.testkit.pytest_plugin`` (in ``addopts``) or through ``pytest_plugins`` in the
top-level ``conftest.py``.
"""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version

import pytest

from distmd_protocol.testkit.launchers import why_unavailable
from distmd_protocol.testkit.runner import close_pools

MARKERS = {
    "mpi": "needs MPI processes (skipped with the reason where they cannot be started)",
    "gloo": "needs gloo processes (skipped with the reason where they cannot be started)",
    "slow": "takes minutes; runs with --slow",
    "once": "long, and shorter tests run the same code; not repeated in further environments",
    "gpu": "needs an NVIDIA GPU (skipped where there is none)",
    "bench": "measures; asserts no times",
}
_SHOWN = ("distmd-protocol", "chemtrain-mpi", "nvalchemi-distributed", "numpy", "jax", "torch", "mpi4py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow``."""
    parser.addoption("--slow", action="store_true", default=False, help="also run tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers; take hypothesis' deadline away, which a shared machine breaks at random."""
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    try:
        from hypothesis import settings
    except ImportError:
        return
    settings.register_profile("distmd", deadline=None)
    settings.load_profile("distmd")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Show what the ranks of this run are made of."""
    launchers = [f"{name}: {why_unavailable(name) or 'available'}" for name in ("local", "mpi", "gloo")]
    versions = [f"{name} {_version(name)}" for name in _SHOWN]
    return ["ranks: " + "; ".join(launchers), "versions: " + ", ".join(versions), f"cores: {os.cpu_count()}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason, what was not asked for or cannot run here."""
    reasons = {
        "mpi": why_unavailable("mpi"),
        "gloo": why_unavailable("gloo"),
        "slow": None if config.getoption("--slow") else "runs with --slow",
        "gpu": None if shutil.which("nvidia-smi") and os.path.exists("/dev/nvidiactl") else "there is no NVIDIA GPU",
    }
    for item in items:
        for name, reason in reasons.items():
            if reason is not None and item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the workers."""
    close_pools()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"
