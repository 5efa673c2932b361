"""The code of the README runs."""

from __future__ import annotations

import re
from pathlib import Path

import distmd_protocol

README = Path(__file__).parents[1] / "README.md"


def test_its_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for code in blocks:
        exec(compile(code, str(README), "exec"), namespace)


def test_it_names_the_public_functions():
    text = README.read_text(encoding="utf-8")
    hidden = {"__version__", "Checkpoint", "Manifest", "PendingSave", "RankFailure", "PrecisionWarning"}
    errors = {name for name in distmd_protocol.__all__ if name.endswith("Error")}
    for name in set(distmd_protocol.__all__) - hidden - errors:
        assert f"`{name}" in text, name
