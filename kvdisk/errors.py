"""The exceptions of kvdisk. They come only from configuration, open and close.

Nothing on the data path raises: a miss, a refusal or a disk error there is a status per row. So an
exception always means that an operator or a developer has something to change, and its text says
what. Every exception survives pickling, because serving engines pass them between processes.
"""

from __future__ import annotations

import errno
import os
from typing import Final

# Answers that say something about load on the machine, and nothing about the disk or its data.
TRANSIENT_ERRORS: Final = frozenset({errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOMEM})


class KVDiskError(Exception):
    """Base of everything kvdisk raises on purpose."""


class ConfigError(KVDiskError, ValueError):
    """An option is unknown, misspelt, out of range, or asks for what this machine has not."""


class LayoutError(KVDiskError, ValueError):
    """Tensors or regions that cannot be addressed block by block."""


class DeviceError(KVDiskError):
    """The disk, or the file system on it, did not do what kvdisk needs.

    ``errno`` is the system's number (0 when it gave none), ``op`` the system call or step that
    failed, ``path`` the file or directory it failed on.
    """

    def __init__(self, message: str, *, errno: int = 0, op: str = "", path: str = "") -> None:
        super().__init__(message)
        self.errno = errno
        self.op = op
        self.path = path

    @classmethod
    def from_os_error(
        cls, error: OSError, op: str, path: str | os.PathLike[str], advice: str
    ) -> DeviceError:
        """Wrap ``error``: the text names step, path and cause, then says what to do."""
        number = error.errno or 0
        where = os.fspath(path)
        cause = os.strerror(number) if number else str(error)
        return cls(f"{op} {where}: {cause}. {advice}", errno=number, op=op, path=where)

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_device_error, (str(self), self.errno, self.op, self.path)


class BusyError(KVDiskError):
    """Another opener holds the rank file. ``holder`` is its process id, or None when unknown."""

    def __init__(self, message: str, *, path: str = "", holder: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.holder = holder

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_busy_error, (str(self), self.path, self.holder)


def _restore_device_error(message: str, errno: int, op: str, path: str) -> DeviceError:
    return DeviceError(message, errno=errno, op=op, path=path)


def _restore_busy_error(message: str, path: str, holder: int | None) -> BusyError:
    return BusyError(message, path=path, holder=holder)
