"""A cache's files and directories, opened to look at and never to change.

For the commands that an operator runs beside a live server. What always holds: nothing is created,
written or locked for longer than an instant; no symbolic link below the path that was given is
followed; what is not a plain file or a directory is not opened. Reads go past the page cache where
the file system allows it, so that they tell what is on the disk, and push nobody out of memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdisk.direct_mode import set_direct
from kvdisk.errors import ConfigError
from kvdisk.private_files import lock_holder

PAGE_BYTES: Final = 4096
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC  # its inode number: PROC_PID_INIT_INO, linux/proc_ns.h


@dataclass(frozen=True)
class Lock:
    """Whether somebody holds a file's lock; ``holder`` is None where that cannot be seen."""

    held: bool
    holder: int | None = None

    def __str__(self) -> str:
        if not self.held:
            return "free"
        return f"in use by process {self.holder}" if self.holder else "in use, by whom is unseen"


def open_directory(path: str | Path, parent: int | None = None, *, follow: bool = True) -> int:
    """A descriptor of a directory, below ``parent`` if given; ``follow``: it may be a link.

    Raises OSError.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    return os.open(path, flags, dir_fd=parent)


def require_directory(path: Path) -> None:
    """Raise ConfigError, in one line, when ``path`` cannot be looked into at all."""
    try:
        os.close(open_directory(path))
    except NotADirectoryError:
        raise ConfigError(f"{path} is not a directory: name a cache's directory.") from None
    except PermissionError as error:
        raise ConfigError(f"{path}: {error.strerror}. Run it as the cache's user.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: {reason}. Name a cache's directory.") from None


def open_plain(folder: int, name: str) -> int:
    """A descriptor, for reading, of a plain file in ``folder``. Raises OSError, also for others."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):  # opening a FIFO or a device can already have effects
        raise OSError(errno.EINVAL, "not a plain file")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=folder)


def lock_of(file: int) -> Lock:
    """Whether the file's lock is held. It is not taken where the kernel's list tells.

    That list has no lock of another process namespace (a container). Within one, the lock is
    therefore tried, shared and for an instant; an opener allows for that.
    """
    holder = lock_holder(file)
    if holder is not None or _sees_all_processes():
        return Lock(holder is not None, holder)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock(True)
    except OSError:  # no locks here, so no server can have it
        return Lock(False)
    fcntl.flock(file, fcntl.LOCK_UN)
    return Lock(False)


def _sees_all_processes() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


class Buffer:
    """Page-aligned memory, as O_DIRECT needs it, seen as bytes of an array."""

    def __init__(self, size_bytes: int) -> None:
        size_bytes = max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES
        self._memory = mmap.mmap(-1, size_bytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)


class FileReader:
    """Reads of one file at any page, through a descriptor of its own. Close it."""

    def __init__(self, folder: int, name: str) -> None:
        """Raises OSError when there is no such plain file, or it may not be read."""
        self.file = open_plain(folder, name)
        try:
            self.direct = True
            set_direct(self.file, True)
        except OSError:
            self.direct = False

    def read(self, buffer: Buffer, size_bytes: int, offset: int) -> npt.NDArray[np.uint8]:
        """Up to ``size_bytes`` from ``offset`` (a multiple of a page); less at the end of the file.

        The array lies in ``buffer`` and is good until the buffer is used again. Raises OSError.
        """
        wanted = min(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES, len(buffer.bytes))
        done = 0
        while done < wanted:
            count = self._read_some(buffer, done, wanted, offset + done)
            done += count
            if count == 0 or done % PAGE_BYTES:
                break  # the end of the file
        if not self.direct:
            with suppress(OSError):
                os.posix_fadvise(self.file, offset, wanted, os.POSIX_FADV_DONTNEED)
        return buffer.bytes[: min(done, size_bytes)]

    def _read_some(self, buffer: Buffer, begin: int, end: int, offset: int) -> int:
        target = [buffer.bytes[begin:end].data]
        try:
            return os.preadv(self.file, target, offset)
        except OSError as error:
            if not self.direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        self.direct = False
        set_direct(self.file, False)
        return os.preadv(self.file, target, offset)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
