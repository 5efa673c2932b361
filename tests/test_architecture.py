"""Who may import whom: the rules of docs/architecture.md, read from the source."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "distmd_protocol": ROOT / "shared" / "src",
    "chemtrain_mpi": ROOT / "packages" / "chemtrain-mpi" / "src",
    "nvalchemi_distributed": ROOT / "packages" / "nvalchemi-distributed" / "src",
}
FORBIDDEN = {
    # The protocol and its test kit may name a backend only through what the packages register with it.
    "distmd_protocol": {
        *("jax", "jaxlib", "jax_md", "torch", "mpi4py", "mpi4jax"),
        *("chemtrain_mpi", "nvalchemi_distributed"),
    },
    "chemtrain_mpi": {"torch", "nvalchemi_distributed"},
    "nvalchemi_distributed": {"jax", "jaxlib", "jax_md", "optax", "mpi4py", "mpi4jax", "chemtrain_mpi"},
}


def module_name(package: str, file: Path) -> str:
    parts = file.relative_to(SOURCES[package]).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files(package: str) -> list[Path]:
    return sorted((SOURCES[package] / package).rglob("*.py"))


def at_import_time(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports that run when the module does: not those inside functions or under TYPE_CHECKING."""
    found: list[ast.Import | ast.ImportFrom] = []
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            queue.extend(node.orelse)
        else:
            queue.extend(ast.iter_child_nodes(node))
    return found


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, "relative imports are not used here"
    return [f"{node.module}.{alias.name}" for alias in node.names]


@pytest.mark.parametrize("package", list(SOURCES))
def test_no_forbidden_import(package: str) -> None:
    # Everywhere, inside functions too: neither package ever loads the other's framework.
    for file in files(package):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        if package == "distmd_protocol":
            nodes = at_import_time(tree)
        roots = {name.split(".")[0] for node in nodes for name in imported(node)}
        assert not roots & FORBIDDEN[package], f"{file}: {sorted(roots & FORBIDDEN[package])}"


@pytest.mark.parametrize("package", list(SOURCES))
def test_imports_run_one_way(package: str) -> None:
    known = {module_name(package, file) for file in files(package)}
    graph: dict[str, set[str]] = {}
    for file in files(package):
        name = module_name(package, file)
        targets: set[str] = set()
        for node in at_import_time(ast.parse(file.read_text(encoding="utf-8"))):
            for path in imported(node):
                # `from package.module import name`: the module, unless `name` is itself a module.
                targets.add(path if path in known else path.rsplit(".", 1)[0])
        graph[name] = {t for t in targets if t in known and t != name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("modules import each other: " + " -> ".join(error.args[1]))


def test_a_circle_would_be_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
