"""A25 and A26: io_uring that is not allowed, or not allowed to register memory.

The native cases move and check random bytes through whatever backend was chosen; here it is said
which one that must be and what its explanation must name.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RunNative = Callable[..., str]

SECCOMP = [sys.executable, str(Path(__file__).with_name("seccomp.py"))]
CHOICE = "A25: *"

REGISTER_BUFFERS = 0  # linux/io_uring.h
REGISTER_FILES = 2


def refuse(syscall: str, error: str, *when: str) -> list[str]:
    conditions = [part for condition in when for part in ("--when", condition)]
    return [*SECCOMP, "--syscall", syscall, *conditions, "--errno", error, "--"]


@pytest.mark.parametrize("syscall", ["io_uring_setup", "io_uring_enter", "io_uring_register"])
@pytest.mark.parametrize("error", ["EPERM", "EACCES", "ENOSYS"])
def test_refused_call_means_threads_and_a_reason(
    run_native: RunNative, syscall: str, error: str
) -> None:
    output = run_native(
        CHOICE,
        before=refuse(syscall, error),
        expect={"backend": "threads", "reason": "seccomp"},
    )
    assert f"({syscall}" in output  # the reason names the call


def test_the_contract_holds_under_the_filter(run_native: RunNative) -> None:
    run_native("contract*", backends="threads", before=refuse("io_uring_setup", "EPERM"))


def test_memory_for_the_ring_refused_means_threads(run_native: RunNative) -> None:
    run_native(
        CHOICE,
        before=refuse("io_uring_setup", "ENOMEM"),
        expect={"backend": "threads", "reason": "RLIMIT_MEMLOCK"},
    )


@pytest.mark.parametrize("error", ["ENOMEM", "EPERM", "EOPNOTSUPP"])
def test_area_registration_refused_leaves_plain_io(run_native: RunNative, error: str) -> None:
    run_native(
        CHOICE,
        before=refuse("io_uring_register", error, f"1={REGISTER_BUFFERS}"),
        expect={"backend": "uring", "note": "RLIMIT_MEMLOCK"},
    )


def test_file_registration_refused_leaves_plain_descriptors(run_native: RunNative) -> None:
    output = run_native(
        "contract*",
        backends="uring*",
        before=refuse("io_uring_register", "EPERM", f"1={REGISTER_FILES}"),
    )
    assert "SUCCESS" in output


# --- A26: limits on locked memory. Root is exempt from them, so this is done as nobody. ----------


@pytest.fixture
def program_of_nobody(native_tests: Path) -> Iterator[Path]:
    """A copy of the test program, in a directory where uid 65534 may read and write."""
    with tempfile.TemporaryDirectory(prefix="kvdisk-nobody-") as directory:
        Path(directory).chmod(0o1777)
        yield Path(shutil.copy(native_tests, directory))


def as_nobody(memlock_bytes: int) -> list[str]:
    return [
        *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"),
        *("prlimit", f"--memlock={memlock_bytes}:{memlock_bytes}"),
    ]


@pytest.mark.root
@pytest.mark.parametrize(
    ("memlock_bytes", "depth", "expect"),
    [
        (0, 32, {"backend": "threads", "reason": "RLIMIT_MEMLOCK is 0 KiB"}),
        (64 << 10, 32, {"backend": "uring", "note": "need 2 MiB"}),
        (64 << 10, 32, {"backend": "uring", "note": "RLIMIT_MEMLOCK is 64 KiB"}),
        (8 << 20, 256, {"backend": "uring", "note": "need 16 MiB"}),
        (8 << 20, 256, {"backend": "uring", "note": "RLIMIT_MEMLOCK is 8 MiB"}),
        (8 << 20, 32, {"backend": "uring"}),  # enough for 2 MiB: registered, nothing to say
    ],
)
def test_low_memlock(
    run_native: RunNative,
    program_of_nobody: Path,
    memlock_bytes: int,
    depth: int,
    expect: dict[str, str],
) -> None:
    run_native(
        CHOICE,
        before=as_nobody(memlock_bytes),
        expect={**expect, "depth": str(depth)},
        program=program_of_nobody,
        test_directory=program_of_nobody.parent,
    )


@pytest.mark.root
def test_the_contract_holds_without_locked_memory(
    run_native: RunNative, program_of_nobody: Path
) -> None:
    run_native(
        "contract: 10?000*",  # a comma would separate two patterns
        backends="uring*",
        before=as_nobody(1 << 20),
        program=program_of_nobody,
        test_directory=program_of_nobody.parent,
    )


def test_unregisterable_memory_leaves_nothing_pinned(run_native: RunNative) -> None:
    run_native("A26: *")
