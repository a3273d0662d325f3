"""Pages of a record file, read and written where nothing but opening, probes and clears do so.

What always holds: memory is page-aligned, so that O_DIRECT never depends on where Python puts
bytes; and what is written is on the disk (fsync(2)) when a call returns.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvdisk.errors import DeviceError
from kvdisk.rank_header import (
    HEADER_BYTES,
    RECORD_BYTES,
    RECORD_PAGE_BYTES,
    RECORDS_PER_PAGE,
    RankHeader,
)

# A sector that is lost, as disks and file systems say it: the same as is_lost_on_disk in
# native/pipeline/engine.cpp, or a cache with such a sector would open, but never smaller.
_LOST_ON_DISK: Final = frozenset(
    {errno.EIO, errno.ENODATA, errno.EREMOTEIO, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN}
)


@contextmanager
def disk_trouble(op: str, path: Path) -> Iterator[None]:
    """Make of an OSError a DeviceError that names the step and says what to do."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.ENOSPC: "Free space on this disk.",
            errno.EDQUOT: "Raise the quota of this user.",
            errno.EROFS: "Mount the file system writable, or use another directory.",
            errno.EMFILE: "Raise the limit of open files (ulimit -n).",
            errno.ENOMEM: "Free memory, or raise the limit on this process's.",
        }.get(error.errno or 0, "Check the disk (dmesg).")
        raise DeviceError.from_os_error(error, op, path, advice) from error


def read_page(file: int, offset: int) -> bytes:
    """Up to a page; less at the end of the file."""
    with mmap.mmap(-1, RECORD_PAGE_BYTES) as memory:
        count = os.preadv(file, [memory], offset)
        return memory[:count]


def write_page(file: int, page: bytes, offset: int) -> None:
    assert len(page) == RECORD_PAGE_BYTES
    with mmap.mmap(-1, RECORD_PAGE_BYTES) as memory:
        memory[:] = page
        if os.pwritev(file, [memory], offset) != RECORD_PAGE_BYTES:
            raise OSError(errno.EIO, "short write")
    os.fsync(file)


def write_header(file: int, path: Path, header: RankHeader) -> None:
    with disk_trouble("write header", path):
        write_page(file, header.pack(), 0)


def clear_records(file: int, path: Path, slot_count: int) -> None:
    """Empty what the last page that stays says of slots that go, or it would come back later."""
    page, first = divmod(slot_count, RECORDS_PER_PAGE)
    offset = HEADER_BYTES + page * RECORD_PAGE_BYTES
    with disk_trouble("clear records", path):
        try:
            kept = read_page(file, offset)[: first * RECORD_BYTES]
        except OSError as error:
            if error.errno not in _LOST_ON_DISK:
                raise
            kept = bytes(first * RECORD_BYTES)  # a bad sector told nothing, and written it may heal
        if kept:
            write_page(file, kept.ljust(RECORD_PAGE_BYTES, b"\0"), offset)
