"""Which names are public, and whether each has a docstring: read from the source, importing nothing.

A module is public when no part of its path begins with an underscore, or when a guide names it (`GUIDE_MODULES`).
Its public names are those of `__all__`; without one, the classes and functions that it defines itself. A name that is
imported from elsewhere in the repository is followed to where it is defined.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "distmd_protocol": ROOT / "shared" / "src",
    "chemtrain_mpi": ROOT / "packages" / "chemtrain-mpi" / "src",
    "nvalchemi_distributed": ROOT / "packages" / "nvalchemi-distributed" / "src",
}
GUIDE_MODULES = {"nvalchemi_distributed._typing", "nvalchemi_distributed._core.shard_tensor"}


@dataclass(frozen=True)
class PublicName:
    """One public name: `module.name`, where it is defined, and its docstring ("" where there is none)."""

    module: str
    name: str
    defined_in: str
    docstring: str

    @property
    def path(self) -> str:
        """The name as a user writes it."""
        return f"{self.module}.{self.name}"


def modules(package: str) -> list[str]:
    """Return the public modules of a package, the package itself first."""
    source = SOURCES[package]
    found = []
    for file in sorted((source / package).rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name in GUIDE_MODULES or not any(part.startswith("_") for part in name.split(".")):
            found.append(name)
    return sorted(found)


def file_of(module: str) -> Path | None:
    """Return the file of a module of this repository, or None."""
    source = SOURCES.get(module.split(".")[0])
    if source is None:
        return None
    base = source.joinpath(*module.split("."))
    return next((f for f in (base / "__init__.py", base.with_suffix(".py")) if f.is_file()), None)


@cache
def tree(module: str) -> ast.Module:
    """Return the parsed source of a module of this repository."""
    file = file_of(module)
    if file is None:
        raise LookupError(f"{module} is not a module of this repository")
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def exported(module: str) -> list[str]:
    """Return the public names of a module; those with two underscores (`__version__`) need no documentation."""
    names: list[str] = []
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names = list(ast.literal_eval(node.value))
            break
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
    return [name for name in names if not name.startswith("_")]


def resolve(module: str, name: str) -> tuple[str, str]:
    """Return (module that defines the name, its docstring)."""
    body = tree(module).body
    for index, node in enumerate(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return module, ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                after = body[index + 1] if index + 1 < len(body) else None
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                return module, str(after.value.value) if is_text and isinstance(after.value.value, str) else ""
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return followed(module, node, alias.name)
    # A submodule that __all__ lists.
    if file_of(f"{module}.{name}"):
        return f"{module}.{name}", ast.get_docstring(tree(f"{module}.{name}")) or ""
    raise LookupError(f"{module}.{name} is in __all__ but is neither defined nor imported there")


def followed(module: str, node: ast.ImportFrom, name: str) -> tuple[str, str]:
    """Resolve `from X import name` inside `module`."""
    origin = node.module or ""
    if node.level:
        parts = module.split(".")
        is_package = (file_of(module) or Path()).name == "__init__.py"
        base = parts[: len(parts) - node.level + is_package]
        origin = ".".join([*base, origin] if origin else base)
    if file_of(f"{origin}.{name}"):
        return f"{origin}.{name}", ast.get_docstring(tree(f"{origin}.{name}")) or ""
    if file_of(origin) is None:
        return origin, "(defined outside this repository)"
    return resolve(origin, name)


def public_names() -> list[PublicName]:
    """Return every public name of the three packages."""
    return [
        PublicName(module, name, *resolve(module, name))
        for package in SOURCES
        for module in modules(package)
        for name in exported(module)
    ]


def untyped(module: str) -> list[str]:
    """Return the public functions and methods defined in a module that lack a type on a parameter or on the result."""
    found = []
    for node in tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            found += _untyped(node, f"{module}.{node.name}")
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for part in node.body:
                is_function = isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                if is_function and (not part.name.startswith("_") or part.name in ("__init__", "__call__")):
                    found += _untyped(part, f"{module}.{node.name}.{part.name}", method=True)
    return found


def _untyped(node: ast.FunctionDef | ast.AsyncFunctionDef, path: str, *, method: bool = False) -> list[str]:
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    positional = [*node.args.posonlyargs, *node.args.args][1 if method and not static else 0 :]
    rest = [argument for argument in (node.args.vararg, node.args.kwarg) if argument]
    missing = [a.arg for a in [*positional, *node.args.kwonlyargs, *rest] if a.annotation is None]
    if node.returns is None and node.name != "__init__":
        missing.append("return")
    return [f"{path}: {', '.join(missing)}"] if missing else []
