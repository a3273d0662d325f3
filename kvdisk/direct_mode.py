"""Whether a directory's files are read and written past the page cache, and why or why not.

open(2) taking O_DIRECT proves nothing, so a real aligned write and read decide (kvdisk.probe). The
reason is kept as a sentence, since a tier that silently fills the page cache is a slow one that
nobody can explain.
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvdisk.config import Direct
from kvdisk.errors import DeviceError
from kvdisk.probe.direct import DirectoryAnswers, probe_directory
from kvdisk.probe.mount import MEMORY_FILE_SYSTEMS, find_mount

PAGE_BYTES: Final = 4096
_BUFFERED_ALIGNMENT: Final = 512
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class DirectMode:
    """``alignment`` in bytes holds for offsets, lengths and memory; ``reason`` is a sentence."""

    direct: bool
    alignment: int
    reason: str
    file_system: str


def choose_mode(directory: Path, direct: Direct) -> DirectMode:
    """Probe ``directory`` (a small file of ours, removed again) and decide.

    Raises DeviceError when nothing can be written there, when bytes come back changed, and for
    ``direct="require"`` where O_DIRECT is refused.
    """
    mount = find_mount(directory)
    file_system = mount.file_system if mount else "unknown"
    if direct == "off":
        return DirectMode(False, _BUFFERED_ALIGNMENT, "turned off by direct=off", file_system)
    answers = probe_directory(directory)
    refused = answers.open_direct_errno or answers.direct_errno or 0
    if answers.create_errno in _FULL or refused in _FULL:
        # Our own files may have their space already; their first page will tell.
        reason = "the disk is full: proven on the record file alone"
        return DirectMode(True, _alignment(answers), reason, file_system)
    if answers.create_errno:
        raise _failure(answers.create_errno, "write a file in", directory)
    if not answers.same_bytes:
        raise DeviceError(
            f"{directory}: a direct read gave other bytes than were written; do not use this disk.",
            errno=errno.EIO,
            op="probe",
            path=str(directory),
        )
    if refused and refused not in _REFUSED:
        raise _failure(refused, "write and read directly in", directory)
    if refused:
        step = "open" if answers.open_direct_errno else "the first write"
        mode = DirectMode(True, _BUFFERED_ALIGNMENT, "", file_system)
        return without_direct(mode, direct, directory, f"{step} refused O_DIRECT", refused)
    return DirectMode(True, _alignment(answers), _success(answers, file_system), file_system)


def without_direct(
    mode: DirectMode, direct: Direct, path: Path, what: str, number: int
) -> DirectMode:
    """``mode`` in buffered form, or DeviceError when ``direct`` is "require"."""
    name = errno.errorcode.get(number, f"errno {number}")
    reason = f"{what} ({name}) on {mode.file_system}"
    if direct == "require":
        raise DeviceError(
            f"{path}: {reason}, but direct=require: use ext4 or xfs on a local disk, or set "
            "direct=auto to go through the page cache.",
            errno=number,
            op="O_DIRECT",
            path=str(path),
        )
    return replace(mode, direct=False, alignment=_BUFFERED_ALIGNMENT, reason=reason)


def set_direct(file: int, on: bool) -> None:
    """Switch an open file. Raises OSError where the file system knows no O_DIRECT."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
    if wanted != flags:
        fcntl.fcntl(file, fcntl.F_SETFL, wanted)


def _alignment(answers: DirectoryAnswers) -> int:
    proven = answers.alignment_bytes or PAGE_BYTES
    return max(proven, answers.stated_memory_align or 0, answers.stated_offset_align or 0)


def _success(answers: DirectoryAnswers, file_system: str) -> str:
    reason = f"O_DIRECT, written and read back at alignment {answers.alignment_bytes}"
    if file_system in MEMORY_FILE_SYSTEMS:
        return f"{reason}; {file_system} is memory, not a disk"
    if answers.from_storage is False:
        return f"{reason}, but no byte came from storage: {file_system} answers from memory"
    if answers.misaligned_accepted and not answers.no_copy_on_write:
        return f"{reason}, but {file_system} takes misaligned requests too: it may copy them"
    return reason


def _failure(number: int, what: str, directory: Path) -> DeviceError:
    return DeviceError(
        f'cannot {what} {directory}: {os.strerror(number)}. Run "kvdisk doctor" on that directory.',
        errno=number,
        op="probe",
        path=str(directory),
    )
