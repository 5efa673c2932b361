from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.once


@pytest.fixture
def suite(tmp_path):
    """Run pytest with the plugin on a small suite of its own."""
    (tmp_path / "test_small.py").write_text(
        textwrap.dedent("""
        import os, pytest
        from distmd_protocol.testkit import run_ranks

        def body(comm):
            return os.getpid()

        def test_ranks():
            print("pids", *run_ranks(body, 2))

        @pytest.mark.slow
        def test_slow(): pass

        @pytest.mark.mpi
        def test_mpi(): pass

        @pytest.mark.gpu
        def test_gpu(): pass
        """)
    )

    def run(*options, **env):
        command = [sys.executable, "-m", "pytest", "-p", "distmd_protocol.testkit.pytest_plugin", "-rs", "-s"]
        command += ["-p", "no:cacheprovider", "--strict-markers", *options, str(tmp_path)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, env=os.environ | env
        )

    return run


def test_header_markers_and_the_end_of_the_workers(suite):
    done = suite()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks: local: available; mpi: " in done.stdout
    assert "numpy " in done.stdout
    assert "runs with --slow" in done.stdout
    pids = next(line for line in done.stdout.splitlines() if "pids" in line).rpartition("pids")[2].split()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_slow_runs_on_request(suite):
    assert "runs with --slow" not in suite("--slow").stdout


def test_mpi_is_skipped_with_the_reason(suite, tmp_path):
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text(
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'mpi4py' else f(n, *a)"
    )
    done = suite(PYTHONPATH=os.pathsep.join([str(hide), os.environ.get("PYTHONPATH", "")]))
    assert "launcher 'mpi' needs the modules" in done.stdout
