"""Tests that need root or count costs run one at a time, however many processes run tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# Two tests, each in a process of its own. Whoever is in waits until the other has come to the door,
# and looks for some time whether it gets in too. Nobody is slow enough to make a right lock fail.
CONFTEST = """
import pytest
from pathlib import Path

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    Path(item.name + ".comes").touch()
    return (yield)
"""
TESTS = """
import os, time
from pathlib import Path

import pytest

def alone(name, other):
    Path(name + ".in").touch()
    until = time.monotonic() + 60
    while not Path(other + ".comes").exists():
        assert time.monotonic() < until, "both tests were given to one process"
        time.sleep(0.01)
    for _ in range(30):
        assert Path(other + ".out").exists() or not Path(other + ".in").exists()
        time.sleep(0.01)
    Path(name + ".out").touch()

@pytest.mark.{first}
def test_first():
    alone("test_first", "test_second")

@pytest.mark.{second}
def test_second():
    alone("test_second", "test_first")
"""


def run_inside(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Pytest on the tests in a directory, with this project's hooks."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    ours = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(directory)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *ours, *arguments],
        cwd=directory,
        env={**outside, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("first", ["cost", "root"])
def test_two_that_take_turns_never_overlap(tmp_path: Path, first: str) -> None:
    if first == "root" and os.geteuid() != 0:
        pytest.skip("tests that need root are skipped")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_inside.py").write_text(TESTS.format(first=first, second="cost"))
    done = run_inside(tmp_path, "--numprocesses", "2", "--dist", "worksteal")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_what_takes_turns_comes_first_when_several_processes_run(tmp_path: Path) -> None:
    (tmp_path / "test_inside.py").write_text(
        "import pytest\ndef test_free(): pass\n@pytest.mark.cost\ndef test_in_turn(): pass\n"
    )
    together = run_inside(tmp_path, "-v", "--numprocesses", "1").stdout
    assert together.index("PASSED test_inside.py::test_in_turn") < together.index(
        "PASSED test_inside.py::test_free"
    )
    alone = run_inside(tmp_path, "-v").stdout
    assert alone.index("test_free PASSED") < alone.index("test_in_turn PASSED")
