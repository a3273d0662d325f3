"""Disk space, taken for real when a tier opens, so that a store cannot run out of it later.

A sparse file is a promise that the next tenant of the disk breaks. So every byte is reserved with
fallocate(2), and when it is not there, the file is as it was before and the error gives numbers.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvdisk.errors import DeviceError
from kvdisk.units import display_size

_ZERO_CHUNK_BYTES: Final = 1 << 20
_NO_FALLOCATE: Final = (errno.EOPNOTSUPP, errno.ENOSYS)

_log = logging.getLogger("kvdisk")


def reserve(
    file: int, path: Path, size_bytes: int, *, zero_fill: bool, option: str = "capacity"
) -> str | None:
    """Give the file at least ``size_bytes``, all reserved; what it has beyond stays.

    Where fallocate is not supported, zeros are written instead when ``zero_fill``, else that is an
    error. Returns a note when it had to. Raises DeviceError, with how much is needed, how much is
    free and which ``option`` to lower, and leaves the file at its former size.
    """
    status = os.fstat(file)
    former_bytes = status.st_size
    is_sparse = status.st_blocks * 512 < former_bytes
    try:
        _require_free(file, size_bytes)
        # Nothing is asked for twice: xfs wants room for the whole range, whatever of it is there.
        allocate(file, size_bytes, 0 if is_sparse else former_bytes)
    except OSError as error:
        if error.errno in _NO_FALLOCATE and zero_fill:
            _log.warning("%s: no fallocate here; writing %d bytes of zeros", path, size_bytes)
            _fill_or_undo(file, path, former_bytes, size_bytes, option)
            return "space was reserved by writing zeros: this file system has no fallocate"
        _undo(file, former_bytes)
        if error.errno in _NO_FALLOCATE:
            raise DeviceError.from_os_error(
                error, "fallocate", path, "Use a directory on ext4 or xfs."
            ) from error
        raise _refused(file, path, size_bytes, option, error) from error
    return None


def allocate(file: int, size_bytes: int, start: int = 0) -> None:
    """fallocate(2) up to ``size_bytes``, if ``start`` is below.

    Not os.posix_fallocate, which writes where it is not supported.
    """
    if start >= size_bytes:
        return
    call = ctypes.CDLL(None, use_errno=True).fallocate64
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(file, 0, start, size_bytes - start) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def room_for(missing_bytes: int, answer: os.statvfs_result) -> bool:
    """Whether a file system takes that much more, as far as it says.

    What it keeps back for root is not for a cache, whoever runs it: it is what the machine lives on
    when the disk is full, and root does not get it everywhere.
    """
    return answer.f_blocks == 0 or missing_bytes <= answer.f_bavail * answer.f_frsize


def _require_free(file: int, size_bytes: int) -> None:
    """Refuse early: a failing fallocate may first take all there is, from everybody."""
    missing_bytes = size_bytes - os.fstat(file).st_blocks * 512
    if not room_for(missing_bytes, os.fstatvfs(file)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fill_or_undo(file: int, path: Path, former_bytes: int, size_bytes: int, option: str) -> None:
    """Write zeros behind what is there. Page-aligned, for a file opened with O_DIRECT."""
    if former_bytes >= size_bytes:
        return
    start = former_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        with mmap.mmap(-1, _ZERO_CHUNK_BYTES) as zeros, memoryview(zeros) as view:
            at = start
            if at < former_bytes:  # an odd end: keep its bytes, fill up to the page
                os.ftruncate(file, at + mmap.PAGESIZE)
                at += mmap.PAGESIZE
            while at < size_bytes:
                at += os.pwritev(file, [view[: min(_ZERO_CHUNK_BYTES, size_bytes - at)]], at)
        os.fsync(file)
    except OSError as error:
        _undo(file, former_bytes)
        raise _refused(file, path, size_bytes, option, error) from error


def _undo(file: int, former_bytes: int) -> None:
    with suppress(OSError):  # the error that made it needful is what is told
        os.ftruncate(file, former_bytes)


def _refused(file: int, path: Path, size_bytes: int, option: str, error: OSError) -> DeviceError:
    missing_bytes = max(0, size_bytes - os.fstat(file).st_blocks * 512)
    return no_room(path, missing_bytes, size_bytes, os.fstatvfs(file), option, error)


def no_room(
    path: Path,
    missing_bytes: int,
    size_bytes: int,
    answer: os.statvfs_result,
    option: str = "capacity",
    error: OSError | None = None,
) -> DeviceError:
    """What to say and to do where ``missing_bytes`` of ``size_bytes`` cannot be had."""
    error = error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    in_all = "" if missing_bytes == size_bytes else f" ({display_size(size_bytes)} in all)"
    need = f"{display_size(missing_bytes)} more needed{in_all}"
    free = f"{display_size(answer.f_bavail * answer.f_frsize)} free"
    kept_bytes = (answer.f_bfree - answer.f_bavail) * answer.f_frsize
    if kept_bytes > 0:
        free += f" (another {display_size(kept_bytes)} kept back for the system)"
    if error.errno == errno.EDQUOT:
        advice = f"{need}: raise the quota of user {os.geteuid()}, or lower {option}."
    elif error.errno == errno.EFBIG:
        advice = f"{need}: raise the limit on file sizes (ulimit -f), or lower {option}."
    elif error.errno == errno.ENOSPC and room_for(missing_bytes, answer):
        advice = (
            f"{need}, and the file system says {free}: so a quota of this directory, or another "
            f"limit of the file system or its disk, applies. Raise that, or lower {option}."
        )
    elif error.errno == errno.ENOSPC:
        advice = f"{need}, {free}: free space on this disk, or lower {option}."
    else:
        advice = f"{need}, {free}: check the disk (dmesg)."
    return DeviceError.from_os_error(error, "reserve", path, advice)
