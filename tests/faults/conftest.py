"""What the fault tests share: running chosen native test cases in a hostile environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

RunNative = Callable[..., str]


@pytest.fixture
def run_native(native_tests: Path) -> RunNative:
    """Run native test cases, which check themselves; fail with their output, else return it.

    ``cases`` and ``backends`` are doctest patterns; ``before`` is the command that runs them
    (a filter, a tracer, other privileges); ``expect`` becomes KVDISK_EXPECT_... variables.
    """

    def run(
        cases: str,
        *,
        backends: str = "*",
        before: Sequence[str] = (),
        expect: dict[str, str] | None = None,
        program: Path = native_tests,
        test_directory: Path | None = None,
        seconds: float = 120,
    ) -> str:
        environment = dict(os.environ)
        for name, value in (expect or {}).items():
            environment[f"KVDISK_EXPECT_{name.upper()}"] = value
        if test_directory is not None:
            environment["KVDISK_TEST_DIR"] = str(test_directory)
        command = [*before, str(program), f"--test-case={cases}", f"--subcase={backends}"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
        output = done.stdout + done.stderr
        if done.returncode != 0 or "Status: SUCCESS" not in output:
            pytest.fail(f"{' '.join(command)}\nended with {done.returncode}\n{output[-6000:]}")
        if "test cases: 0" in " ".join(output.split()):
            pytest.fail(f"no native test case is called {cases}")
        return output

    return run
