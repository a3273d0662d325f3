"""Does a directory take files, and do those files take O_DIRECT?

open(2) accepting O_DIRECT proves nothing: some file systems refuse at the first write, some take
misaligned requests and copy them through the page cache (open(2), NOTES). So a real file is
written and read back at two alignments, at an odd address that no disk can take, and the kernel's
own count of bytes fetched from storage is compared with what was read.

What always holds: the file has no name (O_TMPFILE), or where that is not to be had one of ours,
made with O_EXCL and unlinked before its first byte; nothing is left behind, nothing else touched.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

ALIGNMENTS: Final = (512, 4096)  # the logical block sizes of disks

_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000  # Linux 6.1, statx(2)
_STATX_BYTES: Final = 256
_STATX_DIO_OFFSET: Final = 0x98  # stx_dio_mem_align, stx_dio_offset_align
_FALLOCATE_BYTES: Final = 1 << 20
_FS_IOC_GETFLAGS: Final = 0x80086601  # ioctl_iflags(2), 64-bit
_FS_NOCOW: Final = 0x00800000
_NO_TMPFILE: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


@dataclass(frozen=True)
class DirectoryAnswers:
    """What a directory and a new file in it answered; errno values, 0: allowed, None: not tried.

    ``alignment_bytes`` is the smallest of ALIGNMENTS that a direct write and read took (0: none).
    ``stated_*`` are the kernel's own words (statx), None where it has none.
    ``from_storage`` is False when a direct read fetched no byte from storage: memory answered.
    """

    create_errno: int
    open_direct_errno: int | None = None
    direct_errno: int | None = None
    alignment_bytes: int = 0
    stated_memory_align: int | None = None
    stated_offset_align: int | None = None
    misaligned_accepted: bool = False
    same_bytes: bool = True
    from_storage: bool | None = None
    preallocate_errno: int | None = None
    no_copy_on_write: bool | None = None


def probe_directory(directory: Path) -> DirectoryAnswers:
    """Try everything on one small file of ours in ``directory`` (at most 1 MiB, and removed)."""
    try:
        with _scratch_file(directory, 0) as plain:
            preallocate_errno = _preallocate(plain)
            no_copy_on_write = _no_copy_on_write(plain)
    except OSError as error:
        return DirectoryAnswers(create_errno=error.errno or errno.EIO)
    try:
        with _scratch_file(directory, os.O_DIRECT) as file:
            answers = _try_direct(file)
    except OSError as error:
        answers = DirectoryAnswers(0, open_direct_errno=error.errno or errno.EIO)
    return replace(answers, preallocate_errno=preallocate_errno, no_copy_on_write=no_copy_on_write)


@contextmanager
def _scratch_file(directory: Path, flags: int) -> Iterator[int]:
    """A descriptor of a new file without a name. Raises OSError where none can be made."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        file = os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        file = _open_and_unlink(directory, flags)
    try:
        yield file
    finally:
        os.close(file)


def _open_and_unlink(directory: Path, flags: int) -> int:
    name = directory / f".kvdisk-doctor-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        file = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        # Some file systems create the file and then refuse O_DIRECT on it.
        if error.errno == errno.EINVAL and flags & os.O_DIRECT:
            with suppress(OSError):
                os.unlink(name)
        raise
    try:
        os.unlink(name)
    except BaseException:
        os.close(file)
        raise
    return file


def _try_direct(file: int) -> DirectoryAnswers:
    memory_align, offset_align = _stated_alignment(file)
    size = max(ALIGNMENTS)
    view = memoryview(mmap.mmap(-1, 4 * size))  # not closed below a slice: that would be an error
    # Random, so that neither zeros nor an older file can pass for it. Sources and targets are
    # shifted by the alignment on trial: memory must be aligned too.
    view[: 2 * size] = secrets.token_bytes(2 * size)
    smallest, error, same, from_storage = 0, 0, True, None
    for alignment in reversed(ALIGNMENTS):
        shift = alignment % size
        source = view[shift : shift + alignment]
        target = view[2 * size + shift :][:alignment]
        refused, fetched = _write_and_read(file, source, target, alignment)
        if refused:
            error = error or refused
            continue
        smallest = alignment
        same = same and bytes(source) == bytes(target)
        if fetched is not None:
            from_storage = bool(from_storage) or fetched >= alignment
    odd_refused, _ = _write_and_read(file, view[1 : 1 + size], view[2 * size + 1 :][:size], 0)
    return DirectoryAnswers(
        create_errno=0,
        open_direct_errno=0,
        direct_errno=0 if smallest else error,
        alignment_bytes=smallest,
        stated_memory_align=memory_align,
        stated_offset_align=offset_align,
        misaligned_accepted=odd_refused == 0,
        same_bytes=same,
        from_storage=from_storage,
    )


def _write_and_read(
    file: int, source: memoryview, target: memoryview, offset: int
) -> tuple[int, int | None]:
    """(errno, bytes that the read fetched from storage). A short answer counts as EIO."""
    try:
        written = os.pwritev(file, [source], offset)
        before = _storage_bytes_read()
        read = os.preadv(file, [target], offset)
        after = _storage_bytes_read()
    except OSError as error:
        return error.errno or errno.EIO, None
    if written != len(source) or read != len(target):
        return errno.EIO, None
    return 0, None if before is None or after is None else after - before


def _storage_bytes_read() -> int | None:
    """Bytes this process caused to be fetched from storage (proc(5), /proc/pid/io)."""
    try:
        with open("/proc/self/io") as lines:
            for line in lines:
                if line.startswith("read_bytes:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return None


def _stated_alignment(file: int) -> tuple[int | None, int | None]:
    """statx(2)'s (memory, offset) alignment for direct I/O; (None, None) where not supported."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None, None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(file, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return None, None
    (mask,) = struct.unpack_from("=I", buffer, 0)
    if not mask & _STATX_DIOALIGN:
        return None, None
    memory_align, offset_align = struct.unpack_from("=II", buffer, _STATX_DIO_OFFSET)
    return memory_align, offset_align


def _preallocate(file: int) -> int:
    """errno of fallocate(2). Not os.posix_fallocate: where unsupported, that writes instead."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    ctypes.set_errno(0)
    return ctypes.get_errno() if fallocate(file, 0, 0, _FALLOCATE_BYTES) != 0 else 0


def _no_copy_on_write(file: int) -> bool | None:
    """Whether new files here get chattr's +C; None where the file system has no such flags."""
    try:
        answer = fcntl.ioctl(file, _FS_IOC_GETFLAGS, bytes(8))
    except OSError:
        return None
    (flags,) = struct.unpack_from("=I", answer)
    return bool(flags & _FS_NOCOW)
