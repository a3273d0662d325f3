"""Every check, in the order in which people should read them.

This is the only module of the package that asks the system and judges what it hears.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from kvdisk.config import TierConfig
from kvdisk.memory import memory_headroom
from kvdisk.probe.device import find_disk
from kvdisk.probe.direct import probe_directory
from kvdisk.probe.host import probe_cuda, probe_native, process_numa_nodes, read_locked_memory
from kvdisk.probe.mount import Space, find_mount, read_space
from kvdisk.probe.process_checks import (
    check_cuda,
    check_fio,
    check_locked_memory,
    check_memory,
    check_native,
    check_uring,
)
from kvdisk.probe.storage_checks import (
    check_direct,
    check_directory,
    check_disk,
    check_file_system,
    check_numa,
    check_preallocate,
    check_scheduler,
    check_space,
)
from kvdisk.probe.uring import probe_uring, read_surroundings
from kvdisk.probe.verdict import Check
from kvdisk.safe_directory import refusal_of


def run_checks(directory: Path) -> list[Check]:
    """Every check, for a cache in ``directory`` (which must exist) with the default settings."""
    mount = find_mount(directory)
    disk = find_disk(directory, mount.source if mount else None)
    answers = probe_directory(directory)
    checks = [
        check_native(probe_native()),
        check_uring(probe_uring(), read_surroundings()),
        check_locked_memory(read_locked_memory(), TierConfig.ring_bytes),
        check_memory(memory_headroom(), TierConfig.ring_bytes),
        check_directory(directory, answers, refusal_of(directory)),
        check_file_system(mount, answers),
    ]
    if answers.create_errno == 0:
        checks += [check_direct(answers, mount), check_preallocate(answers)]
    checks += [
        check_space(_space(directory)),
        check_disk(disk),
        check_scheduler(disk),
        check_numa(disk, process_numa_nodes()),
        check_cuda(probe_cuda()),
        check_fio(shutil.which("fio")),
    ]
    return checks


def _space(directory: Path) -> Space | int:
    try:
        return read_space(directory)
    except OSError as error:
        return error.errno or errno.EIO
