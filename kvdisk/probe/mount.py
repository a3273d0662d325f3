"""Which file system a directory is on, with what options, and how much room it has.

What always holds: the answer comes from /proc/self/mountinfo and statvfs(3), as this process sees
them (proc(5)); an odd line is skipped, a missing file means "unknown".
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs", "rootfs"})
NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "beegfs", "glusterfs"}
    | {"gpfs", "wekafs", "ocfs2", "gfs2", "afs", "pvfs2"}
)

_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. ``options`` joins those of the mount and of the file system."""

    mount_id: int
    device: tuple[int, int]
    point: str
    file_system: str
    source: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """The value of ``name=value``, "" for a bare ``name``, None when not set."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


@dataclass(frozen=True)
class Space:
    """Room for files, from statvfs: what an unprivileged user gets, and what root keeps back."""

    total_bytes: int
    available_bytes: int
    reserved_bytes: int
    files_available: int | None  # None: the file system does not count files


def find_mount(directory: Path, root: Path = Path("/")) -> Mount | None:
    """The mount that ``directory`` is on. ``root`` is where ``proc`` is found.

    The kernel's own mount id decides; without it the longest mount point above the directory,
    among mounts of the same device number when there is one (btrfs gives files another).
    """
    mounts = parse_mountinfo(_read(root / "proc/self/mountinfo"))
    mount_id, device = _identify(directory, root)
    for mount in mounts:
        if mount.mount_id == mount_id:
            return mount
    above = [mount for mount in mounts if _is_above(mount.point, os.path.realpath(directory))]
    same = [mount for mount in above if mount.device == device]
    # Of equal length the later one counts: it was mounted over the earlier.
    return max(reversed(same or above), key=lambda mount: len(mount.point), default=None)


def parse_mountinfo(text: str) -> list[Mount]:
    """Every well-formed line, in order."""
    mounts = []
    for line in text.splitlines():
        head, separator, tail = line.partition(" - ")
        left, right = head.split(" "), tail.split(" ")
        if not separator or len(left) < 6 or len(right) < 2 or not left[0].isdecimal():
            continue
        major, _, minor = left[2].partition(":")
        if not (major.isdecimal() and minor.isdecimal()):
            continue
        options = [*left[5].split(","), *(right[2].split(",") if len(right) > 2 else [])]
        mounts.append(
            Mount(
                mount_id=int(left[0]),
                device=(int(major), int(minor)),
                point=_unescape(left[4]),
                file_system=right[0],
                source=_unescape(right[1]),
                options=tuple(dict.fromkeys(_unescape(option) for option in options)),
            )
        )
    return mounts


def read_space(directory: Path) -> Space:
    """Raises OSError when the file system does not answer."""
    answer = os.statvfs(directory)
    return Space(
        total_bytes=answer.f_blocks * answer.f_frsize,
        available_bytes=answer.f_bavail * answer.f_frsize,
        reserved_bytes=max(0, answer.f_bfree - answer.f_bavail) * answer.f_frsize,
        files_available=answer.f_favail if answer.f_files else None,
    )


def _identify(directory: Path, root: Path) -> tuple[int | None, tuple[int, int] | None]:
    """(mount id from /proc/self/fdinfo, device number), each None when not to be had."""
    try:
        file = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None, None
    try:
        status = os.fstat(file)
        fields = _read(root / f"proc/self/fdinfo/{file}").split()
    finally:
        os.close(file)
    device = (os.major(status.st_dev), os.minor(status.st_dev))
    following = dict(zip(fields[::2], fields[1::2], strict=False))
    mount_id = following.get("mnt_id:", "")
    return int(mount_id) if mount_id.isdecimal() else None, device


def _is_above(point: str, path: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _unescape(text: str) -> str:
    r"""mountinfo writes space, tab, newline and backslash as \ooo."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""
