"""A25 through the whole path: the engine says which backend it took, why, and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SECCOMP = [sys.executable, str(HERE / "seccomp.py")]

ROUND_TRIP = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import json
from pathlib import Path
from kvdisk.errors import DeviceError
from rig import ok, rig
try:
    with rig(Path(sys.argv[1]), slots=16, slot_bytes=65536, backend=sys.argv[2]) as disk:
        assert disk.store(range(16)) == ok(16) == disk.load(range(16))
        print(json.dumps(disk.engine.stats()))
except DeviceError as error:
    print(json.dumps({{"error": str(error)}}))
"""


def round_trip(path: Path, before: Sequence[str] = (), backend: str = "auto") -> dict[str, Any]:
    done = subprocess.run(
        [*before, sys.executable, "-c", ROUND_TRIP, str(path), backend],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def refuse(call: str, error: str) -> list[str]:
    return [*SECCOMP, "--syscall", call, "--errno", error, "--"]


@pytest.mark.parametrize("call", ["io_uring_setup", "io_uring_enter", "io_uring_register"])
def test_a25_refused_io_uring_means_threads_and_a_reason(tmp_path: Path, call: str) -> None:
    stats = round_trip(tmp_path / "kv", refuse(call, "EPERM"))
    assert stats["backend"] == "threads"
    assert f"{call}: Operation not permitted" in stats["backend_reason"]
    assert "seccomp" in stats["backend_reason"]


def test_a25_required_io_uring_is_an_error_at_open(tmp_path: Path) -> None:
    answer = round_trip(tmp_path / "kv", refuse("io_uring_setup", "ENOSYS"), backend="uring")
    assert "Function not implemented" in answer["error"]
