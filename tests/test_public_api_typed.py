"""Every public function and method says the types of its parameters and of its result; read from the source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
PACKAGES = ("distmd_protocol", "chemtrain_mpi", "nvalchemi_distributed")


@pytest.fixture(scope="module")
def names():
    sys.path.insert(0, str(TOOLS))
    try:
        import public_names
    finally:
        sys.path.remove(str(TOOLS))
    return public_names


@pytest.mark.parametrize("package", PACKAGES)
def test_public_api_is_typed(names, package) -> None:
    missing = [line for module in names.modules(package) for line in names.untyped(module)]
    assert not missing, "\n".join(missing)


def test_a_missing_type_is_found(names, tmp_path, monkeypatch) -> None:
    (tmp_path / "loose.py").write_text(
        "def f(x, *, y: int): ...\n\n\nclass C:\n    def g(self) -> int: ...\n\n    def h(self, z) -> int: ...\n"
    )
    monkeypatch.setattr(names, "SOURCES", {"loose": tmp_path})
    assert names.untyped("loose") == ["loose.f: x, return", "loose.C.h: z"]
