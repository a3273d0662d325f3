"""Limits of the process and parts of the machine: locked memory, NUMA, CUDA, the native module.

What always holds: only read or asked, never set; libcuda is loaded but not initialised, so no
context is made and no GPU memory taken.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdisk.probe.uring import has_capability, initial_user_namespace, status_field

_CAP_IPC_LOCK: Final = 14
_CUDA_SUCCESS: Final = 0
_CUDA_STUB_LIBRARY: Final = 34  # CUDA_ERROR_STUB_LIBRARY, cuda.h


@dataclass(frozen=True)
class LockedMemory:
    """RLIMIT_MEMLOCK. ``exempt``: CAP_IPC_LOCK on the host itself, for which no limit counts."""

    soft_bytes: int | None  # None: unlimited
    hard_bytes: int | None
    exempt: bool

    @property
    def limit_bytes(self) -> int | None:
        """What counts, None for no limit."""
        return None if self.exempt else self.soft_bytes


@dataclass(frozen=True)
class Cuda:
    """``version`` as the driver gives it (12040 is 12.4); ``problem`` when a driver is unusable."""

    version: int | None
    kernel_driver: bool
    problem: str | None = None


def read_locked_memory(root: Path = Path("/")) -> LockedMemory:
    """The limit of this process; ``root`` is where ``proc`` is found."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = _read(root / "proc/self/status")
    return LockedMemory(
        soft_bytes=None if soft == resource.RLIM_INFINITY else soft,
        hard_bytes=None if hard == resource.RLIM_INFINITY else hard,
        exempt=has_capability(status, _CAP_IPC_LOCK) and initial_user_namespace(root),
    )


def process_numa_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """Nodes with a CPU this process may run on; empty when the machine does not tell."""
    allowed = parse_list(status_field(_read(root / "proc/self/status"), "Cpus_allowed_list") or "")
    nodes = []
    for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if allowed & parse_list(_read(directory / "cpulist").strip()):
            nodes.append(int(directory.name.removeprefix("node")))
    return tuple(sorted(nodes))


def parse_list(text: str) -> set[int]:
    """The kernel's list format: "0-3,8"."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def probe_cuda(root: Path = Path("/")) -> Cuda:
    """Ask the CUDA driver library for its version, which needs neither a GPU nor a context."""
    kernel_driver = (root / "proc/driver/nvidia/version").exists()
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        missing = "libcuda.so.1: cannot open shared object file" in str(error)
        return Cuda(None, kernel_driver, None if missing else str(error))
    try:
        version = ctypes.c_int()
        result = library.cuDriverGetVersion(ctypes.byref(version))
    except AttributeError as error:
        return Cuda(None, kernel_driver, str(error))
    if result == _CUDA_STUB_LIBRARY:
        return Cuda(None, kernel_driver, "libcuda.so.1 is the toolkit's stub, not a driver")
    if result != _CUDA_SUCCESS:
        return Cuda(None, kernel_driver, f"cuDriverGetVersion answered {result}")
    return Cuda(version.value, kernel_driver)


def probe_native() -> str | None:
    """Why the native module does not load, in one line; None when it does."""
    try:
        importlib.import_module("kvdisk._native")
    except ImportError as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _read(path: Path | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
