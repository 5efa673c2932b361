"""Every public name of the three packages is documented; read from the source, nothing is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture(scope="module")
def names():
    sys.path.insert(0, str(TOOLS))
    try:
        import public_names
    finally:
        sys.path.remove(str(TOOLS))
    return public_names


def test_each_package_has_public_names(names) -> None:
    found = {name.module.split(".")[0] for name in names.public_names()}
    assert found == set(names.SOURCES)


def test_every_public_name_has_a_docstring(names) -> None:
    missing = [f"{name.path} (defined in {name.defined_in})" for name in names.public_names() if not name.docstring]
    assert not missing, "\n".join(missing)


def test_every_public_module_has_a_docstring(names) -> None:
    import ast

    modules = [module for package in names.SOURCES for module in names.modules(package)]
    missing = [module for module in modules if not ast.get_docstring(names.tree(module))]
    assert not missing, "\n".join(missing)


def test_a_name_without_docstring_is_found(names, tmp_path, monkeypatch) -> None:
    package = tmp_path / "undocumented"
    package.mkdir()
    (package / "__init__.py").write_text('from undocumented.part import f, g\n__all__ = ["f", "g"]\n')
    (package / "part.py").write_text('def f():\n    """Said."""\n\n\ndef g():\n    pass\n')
    monkeypatch.setattr(names, "SOURCES", {"undocumented": tmp_path})
    found = {name.path: bool(name.docstring) for name in names.public_names()}
    assert found == {
        "undocumented.f": True,
        "undocumented.g": False,
        "undocumented.part.f": True,
        "undocumented.part.g": False,
    }


def test_a_name_that_does_not_exist_is_refused(names, tmp_path, monkeypatch) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text('__all__ = ["nowhere"]\n')
    monkeypatch.setattr(names, "SOURCES", {"broken": tmp_path})
    with pytest.raises(LookupError, match="nowhere"):
        names.public_names()
