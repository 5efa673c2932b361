"""Cross-package tests: both packages are installed here, and ranks are started by either launcher."""

from pathlib import Path

import pytest

pytest_plugins = ("distmd_protocol.testkit.pytest_plugin",)

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--guides",
        type=Path,
        default=ROOT.parent / "shared" / "guides",
        help="folder of the two guides that define the public behaviour (default: ../shared/guides beside the tree)",
    )


@pytest.fixture(scope="session")
def guides(request: pytest.FixtureRequest) -> Path:
    """Folder of the two guides."""
    folder: Path = request.config.getoption("--guides")
    if not folder.is_dir():
        pytest.skip(f"the guides are not here: {folder} is no folder (give it with --guides)")
    return folder
