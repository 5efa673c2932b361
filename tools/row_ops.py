"""Writes the table of row operations in docs/guides/shardtensor.md from the dispatch registry.

python tools/row_ops.py          # rewrites the table
python tools/row_ops.py --check  # says whether it is current
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guides" / "shardtensor.md"
BEGIN, END = "<!-- row operations: begin -->", "<!-- row operations: end -->"


def table() -> str:
    """Return the table, one line a meaning."""
    from nvalchemi_distributed.shard_tensor import REGISTRY

    groups: dict[tuple[str, str], list[str]] = {}
    for name, entry in REGISTRY.items():
        groups.setdefault((entry.group, entry.meaning), []).append(name)
    lines = ["| group | operations | meaning |", "|---|---|---|"]
    for (group, meaning), names in groups.items():
        shown = ", ".join(f"`{name.replace('property:', '.')}`" for name in names)
        lines.append(f"| {group} | {shown} | {meaning} |")
    return "\n".join(lines)


def page_with(table: str) -> str:
    """Return the page with the table in its place."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    """Command line."""
    new = page_with(table())
    if "--check" in sys.argv[1:]:
        if new != PAGE.read_text(encoding="utf-8"):
            raise SystemExit(f"{PAGE}: the table of row operations is not current; run python tools/row_ops.py")
        return
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
