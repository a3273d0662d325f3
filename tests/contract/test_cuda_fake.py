"""The engine on a CUDA device, on a driver without one: see cuda_cases.py."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvdisk.transfer  # noqa: F401  (so that `make sanitize` runs this)

PROGRAM = Path(__file__).parent / "cuda_cases.py"
CASES = [
    node.name
    for node in ast.parse(PROGRAM.read_text()).body
    if isinstance(node, ast.FunctionDef)
    and not node.args.args
    and node.name not in ("main", "nothing_left")
]


@pytest.mark.parametrize("case", CASES)
def test_on_the_fake_driver(fake_cuda: Path, case: str) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, fake_cuda, case], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
