"""A29: answers of the kernel that pass are no failures.

strace stands between the program and the kernel and answers chosen io_uring_enter calls itself: the
first one and every third after it. Every operation must still complete exactly once, with the right
bytes.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest

RunNative = Callable[..., str]

SOAK = "contract: 10?000 random*"  # a comma would separate two patterns


@pytest.fixture(scope="session")
def strace() -> list[str]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True)
    if tried.returncode != 0:
        pytest.skip("this process may not trace its children")
    return ["strace", "-f", "-o", "/dev/null", "-e", "trace=io_uring_enter", "-e"]


@pytest.mark.slow
@pytest.mark.parametrize("error", ["EINTR", "EAGAIN", "EBUSY", "ENOMEM"])
def test_first_and_every_third_call_answered_otherwise(
    run_native: RunNative, strace: list[str], error: str
) -> None:
    inject = f"inject=io_uring_enter:error={error}:when=1+3"
    run_native(SOAK, backends="uring", before=[*strace, inject], seconds=300)


@pytest.mark.slow
@pytest.mark.parametrize("ring", ["immediate", "forced async", "tiny queues"])
def test_every_second_call_interrupted_on_other_rings(
    run_native: RunNative, strace: list[str], ring: str
) -> None:
    run_native(
        SOAK,
        backends=f"uring? {ring}",
        before=[*strace, "inject=io_uring_enter:error=EINTR:when=1+2"],
        seconds=300,
    )


def test_first_calls_answered_otherwise_still_choose_io_uring(
    run_native: RunNative, strace: list[str]
) -> None:
    run_native(
        "A25: the automatic*",
        before=[*strace, "inject=io_uring_enter:error=EAGAIN:when=1..4"],
        expect={"backend": "uring"},
    )
