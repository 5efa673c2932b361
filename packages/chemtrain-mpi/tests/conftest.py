"""Settings shared by the tests: the test kit's plugin, third-party warnings with their reason, float64 on demand."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

# Compiling is most of these tests' time, and the ranks compile the same programs as the tests do. Before jax starts.
_CACHE = tempfile.mkdtemp(prefix="chemtrain-mpi-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _CACHE)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax  # noqa: E402
import pytest  # noqa: E402

# Test modules lie in folders named like the source; what they share lies here.
sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["distmd_protocol.testkit.pytest_plugin"]

_THIRD_PARTY = (
    # jax-md scatters int64 indices into int32 lists when x64 is on.
    "ignore:scatter inputs have incompatible types:FutureWarning",
    # jax-md asks for float64 sums, which JAX gives in float32 when x64 is off.
    "ignore:Explicitly requested dtype .*float64:UserWarning",
    # matplotlib 3.9 calls pyparsing by names that pyparsing 3.3 deprecates.
    "ignore:'[a-zA-Z]+' (deprecated -|argument is deprecated,) use:DeprecationWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in _THIRD_PARTY:
        config.addinivalue_line("filterwarnings", line)
    if os.environ.get("NPROC") != "1":
        raise pytest.UsageError("start the tests with NPROC=1: deterministic mode is what most of them are about")


@pytest.fixture
def x64():
    """float64 as JAX's default for one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
