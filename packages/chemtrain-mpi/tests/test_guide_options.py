"""The options table of the guide page names every keyword of the trainer, with the default it has."""

import inspect
import re
from pathlib import Path

import pytest

from chemtrain_mpi import DifftreParallel

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "difftre.md"
ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<meaning>[^|]+) \| (?P<default>[^|]+) \| (?P<deterministic>[^|]+) \|$")


@pytest.fixture(scope="module")
def rows():
    if not PAGE.is_file():
        pytest.skip(f"{PAGE.name} is not here: these tests run outside the repository")
    text = PAGE.read_text(encoding="utf-8").split("\n## Options\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    matches = [ROW.match(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if match is None]
    return [match.groupdict() for match in matches]


def keywords():
    parameters = inspect.signature(DifftreParallel).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def test_every_keyword_has_one_row_and_every_row_a_keyword(rows):
    assert sorted(row["name"] for row in rows) == sorted(keywords())


def test_defaults_are_those_of_the_constructor(rows):
    for row in rows:
        default = keywords()[row["name"]]
        wanted = "required" if default is inspect.Parameter.empty else repr(default)
        # Docs quote strings as JSON does.
        stated = row["default"].strip("`").replace('"', "'")
        assert stated == wanted, row["name"]


def test_every_row_says_what_it_means_in_deterministic_mode(rows):
    for row in rows:
        assert len(row["meaning"].split()) > 3, row["name"]
        assert row["deterministic"].strip() != "-", row["name"]
