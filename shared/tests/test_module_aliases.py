"""Other names for our modules: the same objects, and a clear refusal where a name is taken."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distmd_protocol import module_aliases
from distmd_protocol.errors import AliasClashError, ProtocolError

ALIASES = {"guidename": "ourpackage", "guidename.part": "ourpackage"}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``ourpackage`` with ``base``, ``deep.inner`` and one that counts its runs; all is undone afterwards."""
    (tmp_path / "ourpackage" / "deep").mkdir(parents=True)
    (tmp_path / "ourpackage" / "__init__.py").write_text("runs = []\n")
    (tmp_path / "ourpackage" / "base.py").write_text(
        "import ourpackage\nourpackage.runs.append(__name__)\nclass Stage: ...\n"
    )
    (tmp_path / "ourpackage" / "deep" / "__init__.py").write_text("from ourpackage.base import Stage\n")
    (tmp_path / "ourpackage" / "deep" / "inner.py").write_text("from . import Stage\nVALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_submodules_are_the_same_objects_under_every_name(package: Path) -> None:
    module_aliases.install_aliases(ALIASES)
    alias = importlib.import_module("guidename.part.deep.inner")
    real = importlib.import_module("ourpackage.deep.inner")
    assert alias is real
    assert importlib.import_module("guidename.deep.inner") is real
    assert importlib.import_module("guidename.part") is importlib.import_module("ourpackage")
    assert real.Stage is importlib.import_module("guidename.base").Stage


def test_no_module_is_run_twice_and_each_keeps_its_own_name(package: Path) -> None:
    module_aliases.install_aliases(ALIASES)
    importlib.import_module("guidename.base")
    real = importlib.import_module("ourpackage.base")
    importlib.import_module("guidename.part.base")
    assert importlib.import_module("ourpackage").runs == ["ourpackage.base"]
    assert real.__name__ == real.__spec__.name == real.Stage.__module__ == "ourpackage.base"


def test_from_imports_and_attributes_work(package: Path) -> None:
    module_aliases.install_aliases(ALIASES)
    names: dict = {}
    exec(
        "import guidename.part as p\nfrom guidename.part.deep import Stage, inner\nimport guidename.deep.inner\n"
        "value = guidename.deep.inner.VALUE",
        names,
    )
    assert names["value"] == names["inner"].VALUE == 3
    assert names["p"] is sys.modules["ourpackage"]


def test_a_missing_module_is_named_under_both_names(package: Path) -> None:
    module_aliases.install_aliases(ALIASES)
    with pytest.raises(ModuleNotFoundError, match=r"'guidename.part.nope'.*'ourpackage.nope'") as caught:
        importlib.import_module("guidename.part.nope")
    assert caught.value.name == "guidename.part.nope"


def test_other_names_are_left_alone(package: Path) -> None:
    finder = module_aliases.install_aliases(ALIASES)
    assert finder.find_spec("guidenames") is None
    assert finder.find_spec("json") is None
    assert finder.real_name("guidename.partly") == "ourpackage.partly"
    assert module_aliases.install_aliases(ALIASES) is finder


def test_an_installed_package_of_that_name_is_a_clash(package: Path) -> None:
    (package / "guidename").mkdir()
    (package / "guidename" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    with pytest.raises(AliasClashError, match=r"'guidename' is installed here.*guidename.X is ourpackage.X") as caught:
        module_aliases.install_aliases(ALIASES)
    assert isinstance(caught.value, ProtocolError)
    assert not any(isinstance(finder, module_aliases.AliasFinder) for finder in sys.meta_path)


def test_a_distribution_is_named_with_its_version(package: Path) -> None:
    # As pip leaves it: a folder of metadata beside the package, here one without an __init__ of its own.
    (package / "guidename").mkdir()
    metadata = package / "guide_toolkit-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: guide-toolkit\nVersion: 1.2\n")
    (metadata / "top_level.txt").write_text("guidename\n")
    importlib.invalidate_caches()
    with pytest.raises(AliasClashError, match=r"guide-toolkit 1\.2"):
        module_aliases.install_aliases(ALIASES)


def test_a_plain_folder_of_that_name_is_no_clash(package: Path) -> None:
    (package / "guidename").mkdir()
    importlib.invalidate_caches()
    module_aliases.install_aliases(ALIASES)
    assert importlib.import_module("guidename.base") is importlib.import_module("ourpackage.base")


def test_a_script_runs_as_main_with_its_arguments_and_neighbours(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "neighbour.py").write_text("NAME = 'beside the script'\n")
    script = folder / "script.py"
    script.write_text(
        "import sys, pathlib, neighbour\nfrom guidename.part.base import Stage\n"
        "text = [__name__, neighbour.NAME, Stage.__module__, *sys.argv[1:]]\n"
        "pathlib.Path(__file__).with_suffix('.out').write_text(' | '.join(text))\n"
    )
    assert module_aliases.run_script("ourpackage.guide", ALIASES, [str(script), "--steps", "3"]) == 0
    assert script.with_suffix(".out").read_text() == "__main__ | beside the script | ourpackage.base | --steps | 3"


def test_what_a_script_raises_passes_through(package: Path, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ZeroDivisionError('mine')\n")
    with pytest.raises(ZeroDivisionError, match="mine"):
        module_aliases.run_script("ourpackage.guide", ALIASES, [str(script)])


def test_a_clash_stops_the_runner_before_the_script(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "guidename").mkdir()
    (package / "guidename" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    script = tmp_path / "never.py"
    script.write_text("raise SystemExit('it ran')\n")
    assert module_aliases.run_script("ourpackage.guide", ALIASES, [str(script)]) == 2
    assert "'guidename' is installed here" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["no-such-script.py"], 2)])
def test_usage_names_the_rule(
    package: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    assert module_aliases.run_script("ourpackage.guide", ALIASES, arguments) == code
    assert "usage: python -m ourpackage.guide SCRIPT" in capsys.readouterr().err
