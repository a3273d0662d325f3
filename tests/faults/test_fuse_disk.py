"""The disk that hangs on demand leaves nothing mounted, whatever becomes of its test."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.fuse_disk import ROOT, fuse_disk, needs_fuse

pytestmark = [pytest.mark.root, needs_fuse]


def mounted(directory: Path) -> bool:
    return str(directory) in Path("/proc/mounts").read_text()


def test_it_ends_with_its_test(tmp_path: Path) -> None:
    with fuse_disk(tmp_path):
        assert mounted(tmp_path)
    assert not mounted(tmp_path)


def test_it_ends_with_a_test_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        "from tests.faults.fuse_disk import fuse_disk\n"
        "with fuse_disk(pathlib.Path(sys.argv[1])):\n"
        "    print('mounted', flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as test:
        assert test.stdout is not None
        assert test.stdout.readline() == b"mounted\n"
        assert mounted(tmp_path)
        test.kill()
    limit = time.monotonic() + 30
    while mounted(tmp_path) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not mounted(tmp_path)
