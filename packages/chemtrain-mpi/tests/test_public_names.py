import tomllib
from pathlib import Path

import chemtrain_mpi


def test_version_is_that_of_the_distribution():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert chemtrain_mpi.__version__ == project["version"]


def test_every_public_name_exists_and_has_a_docstring():
    for name in chemtrain_mpi.__all__:
        value = getattr(chemtrain_mpi, name)
        assert name == "__version__" or value.__doc__
