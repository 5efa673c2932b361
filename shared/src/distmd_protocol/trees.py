"""Nested containers of arrays as flat mappings, and back into a template.

A tree is made of dicts (string or integer keys), lists, tuples, named tuples and dataclasses; everything else is a
leaf, except ``None``, which holds nothing. The path to a leaf is its key: segments joined by ``/``, with ``~`` and
``/`` inside a segment written ``~0`` and ``~1`` (RFC 6901). Dataclass fields whose metadata says ``static`` are part
of the structure and are never stored.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from distmd_protocol.errors import ProtocolError

Tree: TypeAlias = Any
T = TypeVar("T")

_NAMED = 500
"""Paths that a message names; more help nobody."""


def escape(segment: str) -> str:
    """Write one path segment so that it contains no ``/``."""
    return segment.replace("~", "~0").replace("/", "~1")


def flatten(tree: Tree) -> dict[str, Any]:
    """Return the leaves of ``tree`` by path, in the order of the tree.

    Raises
    ------
    ProtocolError
        For a tree that is one bare leaf, an empty, non-string or twice-used key, or a cycle.
    """
    if not _is_node(tree):
        raise ProtocolError(f"a bare {type(tree).__name__} has no path to be stored under; wrap it in a dict")
    leaves: dict[str, Any] = {}

    def visit(node: Any, path: str, above: tuple[int, ...]) -> None:
        if node is None:
            return
        if not _is_node(node):
            leaves[path] = node
            return
        if id(node) in above:
            raise ProtocolError(f"the tree contains itself at {path!r}")
        for segment, child in _children(node, path):
            visit(child, f"{path}/{segment}" if path else segment, (*above, id(node)))

    visit(tree, "", ())
    return leaves


def unflatten(template: T, leaves: Mapping[str, Any], convert: Callable[[str, Any, Any], Any] | None = None) -> T:
    """Return a tree with the structure of ``template`` and the leaves of ``leaves``.

    Parameters
    ----------
    template
        The tree whose structure is wanted. It is not changed.
    leaves
        Leaves by path, as ``flatten`` returns them.
    convert
        Called as ``convert(path, template_leaf, leaf)`` for what to put into the tree; by default the leaf itself.

    Raises
    ------
    ProtocolError
        Naming every path that is missing from ``leaves`` or left over.
    """
    wanted = flatten(template)
    missing = [path for path in wanted if path not in leaves]
    left_over = [path for path in leaves if path not in wanted]
    if missing or left_over:
        raise ProtocolError(difference_text(missing, left_over))

    def build(node: Any, path: str) -> Any:
        if node is None:
            return None
        if not _is_node(node):
            return leaves[path] if convert is None else convert(path, node, leaves[path])
        segments = list(_children(node, path))
        return _rebuild(node, [build(child, f"{path}/{segment}" if path else segment) for segment, child in segments])

    result: T = build(template, "")
    return result


def difference_text(missing: list[str], left_over: list[str], different: list[str] | None = None) -> str:
    """Say which paths differ between what is stored and what is wanted, naming each."""
    parts = [
        f"{title}: {', '.join(paths[:_NAMED])}" + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")
        for title, paths in (
            ("missing", missing),
            ("left over", left_over),
            ("different", different or []),
        )
        if paths
    ]
    return "the stored arrays do not fit the template. " + ". ".join(parts)


def _is_node(value: Any) -> bool:
    if value is None or isinstance(value, dict | list | tuple):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _dynamic_fields(node: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(node) if not field.metadata.get("static", False)]


def _children(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if node is None:
        return
    if isinstance(node, dict):
        seen: set[str] = set()
        for key, child in node.items():
            if not isinstance(key, str | int) or isinstance(key, bool) or key == "":
                raise ProtocolError(f"key {key!r} at {path!r}: use non-empty strings or integers as keys")
            if str(key) in seen:
                raise ProtocolError(f"key {key!r} at {path!r} is used twice, as a string and as an integer")
            seen.add(str(key))
            yield escape(str(key)), child
    elif isinstance(node, tuple) and hasattr(node, "_fields"):
        yield from ((name, getattr(node, name)) for name in node._fields)
    elif isinstance(node, list | tuple):
        yield from ((str(index), child) for index, child in enumerate(node))
    else:
        yield from ((name, getattr(node, name)) for name in _dynamic_fields(node))


def _rebuild(node: Any, children: list[Any]) -> Any:
    if isinstance(node, dict):
        # Not type(node)(...): a defaultdict or an OrderedDict takes other arguments.
        result = copy.copy(node)
        result.update(zip(node, children, strict=True))
        return result
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*children)
    if isinstance(node, list | tuple):
        return type(node)(children)
    # Not dataclasses.replace: it calls __init__, which a class may have written itself, and refuses init=False fields.
    result = copy.copy(node)
    for name, child in zip(_dynamic_fields(node), children, strict=True):
        object.__setattr__(result, name, child)
    return result
