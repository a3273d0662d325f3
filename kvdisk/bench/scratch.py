"""The file that is measured. It has no name, so it cannot outlive the process or hit another file.

fio opens it by /proc/PID/fd, so both measure the very same file. What always holds: the
space is reserved before the first byte, so a full disk shows at open; nothing else in the directory
is opened, changed or removed.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from kvdisk.config import Direct
from kvdisk.direct_mode import DirectMode, choose_mode
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.probe.device import find_disk
from kvdisk.probe.mount import MEMORY_FILE_SYSTEMS, find_mount, read_space
from kvdisk.probe.storage_checks import describe_disk
from kvdisk.reserve import reserve
from kvdisk.units import display_size

_NO_TMPFILE: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


@dataclass(frozen=True)
class Place:
    """What lies under a directory, for the report."""

    file_system: str
    mount_point: str
    mount_options: str
    disk: str
    is_memory: bool


class ScratchFile:
    """``size_bytes`` reserved without a name. ``fd`` is open for reading and writing."""

    def __init__(self, directory: Path, size_bytes: int, direct: Direct) -> None:
        """Raises DeviceError for what the directory or its disk refuses."""
        self.mode: DirectMode = choose_mode(directory, direct)
        require_space(directory, size_bytes)
        try:
            self.fd = _open_nameless(directory, os.O_DIRECT if self.mode.direct else 0)
        except OSError as error:
            raise DeviceError.from_os_error(
                error, "make a file in", directory, "Use a directory that this user can write to."
            ) from error
        try:
            reserve(self.fd, directory, size_bytes, zero_fill=True, option="size or numjobs")
        except BaseException:
            os.close(self.fd)
            raise
        self.size_bytes = size_bytes

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def scratch_directory(parent: Path, purpose: str) -> Iterator[Path]:
    """A directory of our own in ``parent``, removed with all in it at the end.

    For files that need a name to be opened; what is still open lives on without one. Raises
    DeviceError when it can be neither made nor removed.
    """
    directory = parent / f".kvdisk-{purpose}-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        directory.mkdir(0o700)
    except OSError as error:
        raise DeviceError.from_os_error(
            error, "make a directory in", parent, "Use a directory that this user can write to."
        ) from error
    try:
        yield directory
    finally:
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise DeviceError.from_os_error(
                error, "remove", directory, "Remove it by hand."
            ) from error


def describe_place(directory: Path) -> Place:
    """Never raises; what cannot be found out is "unknown"."""
    mount = find_mount(directory)
    file_system = mount.file_system if mount else "unknown"
    disk = find_disk(directory, mount.source if mount else None)
    is_memory = file_system in MEMORY_FILE_SYSTEMS
    return Place(
        file_system=file_system,
        mount_point=mount.point if mount else "unknown",
        mount_options=",".join(mount.options) if mount else "",
        disk=describe_disk(disk) if disk else ("memory" if is_memory else "unknown"),
        is_memory=is_memory,
    )


def require_space(directory: Path, needed_bytes: int, lower: str = "size or numjobs") -> None:
    """Raise ConfigError, which says what to ``lower``, where there is less room than that."""
    try:
        space = read_space(directory)
    except OSError as error:
        raise DeviceError.from_os_error(error, "statvfs", directory, "Check the mount.") from error
    if space.total_bytes > 0 and space.available_bytes < needed_bytes:
        raise ConfigError(
            f"path={directory}: {display_size(needed_bytes)} are needed and "
            f"{display_size(space.available_bytes)} are free: lower {lower}, or free space."
        )


def drop_from_page_cache(file: int) -> None:
    """Write back and forget what the page cache holds of the file, so that reads begin cold."""
    os.fdatasync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def path_for_others(file: int) -> str:
    """A name by which another process of this user can open the file."""
    return f"/proc/{os.getpid()}/fd/{file}"


def _open_nameless(directory: Path, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    name = directory / f".kvdisk-bench-{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.unlink(name)
    return file
