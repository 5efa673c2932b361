"""Rules that every source file keeps."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import distmd_protocol

ROOT = Path(distmd_protocol.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FOREIGN = {"jax", "jaxlib", "torch", "mpi4py", "mpi4jax", "safetensors", "ml_dtypes"}
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def imports(tree):
    """Yield ``(module, top level?)`` for every import."""
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", id(node) in top


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 400
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for module, at_top in imports(tree):
        package = module.partition(".")[0]
        assert package not in FOREIGN | UNSAFE
        # hypothesis is optional, and only the plugin asks for it.
        assert at_top or (path.name == "pytest_plugin.py" and package == "hypothesis")
        if package == "pytest":
            assert path.name == "pytest_plugin.py"
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not calls & {"print", "eval", "exec"}


def test_public_names_exist_and_have_docstrings():
    for name in distmd_protocol.__all__:
        value = getattr(distmd_protocol, name)
        assert name == "__version__" or value.__doc__
    assert distmd_protocol.__all__ == sorted(distmd_protocol.__all__)
