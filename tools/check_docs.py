"""Prove that every public name is in the built docs: `python tools/check_docs.py site/objects.inv`."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import public_names


def inventory(file: Path) -> set[str]:
    """Return the names of a Sphinx inventory (version 2: four header lines, then compressed text)."""
    content = file.read_bytes()
    for _ in range(4):
        content = content.split(b"\n", 1)[1]
    return {line.split(" ", 1)[0] for line in zlib.decompress(content).decode().splitlines()}


def main(argv: list[str]) -> int:
    """Command line."""
    if len(argv) != 1 or not Path(argv[0]).is_file():
        print("usage: python tools/check_docs.py site/objects.inv (build the docs first)", file=sys.stderr)
        return 2
    found = inventory(Path(argv[0]))
    names = public_names.public_names()
    missing = [name for name in names if name.path not in found]
    for name in missing:
        print(f"not in the docs: {name.path} (defined in {name.defined_in}; has it a docstring?)", file=sys.stderr)
    print(f"docs: {len(names) - len(missing)} of {len(names)} public names are documented")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
