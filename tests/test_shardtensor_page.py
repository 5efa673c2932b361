"""The pages about row tensors and own models: their code runs, and the table is what the dispatch registry says."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_its_code_runs(capsys) -> None:
    runpy.run_path(str(ROOT / "docs" / "code" / "row_tensors.py"))
    assert "to_local()" in capsys.readouterr().out


def test_the_specs_of_own_models(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["own_model.py", str(tmp_path)])
    names = runpy.run_path(str(ROOT / "docs" / "code" / "own_model.py"))
    assert (tmp_path / "my_model_spec.json").exists()
    assert names["opaque"].hops == 3


def test_its_table_is_current(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import row_ops

    assert row_ops.page_with(row_ops.table()) == row_ops.PAGE.read_text(encoding="utf-8"), "run python tools/row_ops.py"
    assert row_ops.page_with("another table") != row_ops.PAGE.read_text(encoding="utf-8")
    sys.modules.pop("row_ops")
