"""What tests of several folders share."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure() -> None:
    """A run that is told to end undoes what its tests have mounted, frozen and limited."""
    if threading.current_thread() is not threading.main_thread():
        return
    run = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() == run:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)  # a child that a test has forked
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("root") is not None and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
    # To the front when several processes share the tests: one process is given most of what takes
    # turns then, and the others have something else to do meanwhile.
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not takes_turns(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """One at a time, in all test runs of this tree, with fixtures: what ``takes_turns``.

    A lock rather than a group of pytest-xdist, which depends on how that and pytest name tests.
    """
    if not takes_turns(item):
        return (yield)
    path = item.config.rootpath / "build" / "tests-in-turn"
    path.parent.mkdir(exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return (yield)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # for a forked child too, which may still have it open


def takes_turns(item: pytest.Item) -> bool:
    """Whether it mounts, freezes disks, has another user's limits, or counts what a run costs."""
    needs_root = item.get_closest_marker("root") is not None
    return (needs_root and os.geteuid() == 0) or item.get_closest_marker("cost") is not None


@pytest.fixture(scope="session")
def native_tests() -> Path:
    """The C++ test program, built once. KVDISK_NATIVE_TESTS names one that exists (sanitizers)."""
    return _native_build("native_tests") / "native_tests"


@pytest.fixture(scope="session")
def fake_cuda() -> Path:
    """A CUDA driver without a device (native/tests/fake_cuda.hpp), to be loaded into a process."""
    return _native_build("fake_cuda") / "libcuda.so.1"


def _native_build(target: str) -> Path:
    """The folder where ``target`` has been built."""
    given = os.environ.get("KVDISK_NATIVE_TESTS")
    if given:
        return Path(given).resolve().parent
    if shutil.which("cmake") is None:
        pytest.fail("cmake is needed to build the native tests")
    build = ROOT / "build" / "native-tests"
    build.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test runs side by side build one after the other
        options = ["-DKVDISK_TESTS=ON", "-DKVDISK_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=Release"]
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        _run("cmake", "-S", str(ROOT / "native"), "-B", str(build), *generator, *options)
        _run("cmake", "--build", str(build), "--target", target, "--parallel", "2")
    return build


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
