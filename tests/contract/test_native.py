"""The C++ tests as one test: backends, pipeline and simulator check themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.mark.slow
def test_native_tests_pass(native_tests: Path) -> None:
    done = subprocess.run([native_tests], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
