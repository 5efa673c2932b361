"""MkDocs hook: one API page for each public module, and the navigation that leads to them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent))
import public_names

# Some docstrings name things in Sphinx's way, :class:`~package.Name`; what a reader needs is the name.
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):<code>~?([^<]*)</code>")


def page(module: str) -> str:
    """Return where a module's page lies in the docs."""
    return f"api/{module}.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the API pages and those of docs/protocol into the navigation."""
    reference: list[dict[str, Any]] = [
        {package: [{module: page(module)} for module in public_names.modules(package)]}
        for package in public_names.SOURCES
    ]
    folder = Path(config.docs_dir) / "protocol"
    specification = [f"protocol/{file.name}" for file in sorted(folder.glob("*.md"))]
    config.nav = [*(config.nav or []), {"Protocol": specification}, {"API": reference}]
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Turn Sphinx roles into plain names."""
    return ROLE.sub(r"<code>\1</code>", html)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages; what mkdocstrings makes of them comes from the docstrings."""
    for package in public_names.SOURCES:
        for module in public_names.modules(package):
            text = f"# `{module}`\n\n::: {module}\n"
            files.append(File.generated(config, page(module), content=text))
    return files
