"""What in a cache's directories is ours: one answer, for all who look and for the one who removes.

What always holds: a name is not enough. A file is ours when it also carries our mark, and a
namespace is a directory, never a link to one. Nothing is changed, and no link is followed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvdisk.identity import (
    NAMESPACE_FILE,
    NAMESPACE_FILE_BYTES_MAX,
    is_namespace_name,
    parse_identity,
)
from kvdisk.looking import open_plain
from kvdisk.rank_file import has_mark
from kvdisk.rank_header import HEADER_BYTES, RankHeader, file_names, is_marked, parse_header

RANK_FILE: Final = re.compile(r"rank-(\d{1,9})-of-(\d{1,9})\.(kv|idx)")
_LEFTOVER: Final = re.compile(
    r"(rank-\d{1,9}-of-\d{1,9}\.(?:kv|idx)|kvdisk\.json)\.damaged-\d{1,4}"
)
_TEMPORARY: Final = re.compile(r"\.kvdisk\.json\.\d+\.\d+")


@dataclass
class Contents:
    """Names in a namespace: ours, leftovers of ours, and the rest, which is never removed."""

    ours: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def namespaces_in(root: int) -> tuple[list[str], list[str]]:
    """Names of the namespaces in an open directory, and of what only has the name of one.

    Raises OSError.
    """
    namespaces: list[str] = []
    impostors: list[str] = []
    for name in sorted(os.listdir(root)):
        if is_namespace_name(name):
            try:
                status = os.stat(name, dir_fd=root, follow_symlinks=False)
            except FileNotFoundError:  # removed since it was listed
                continue
            (namespaces if stat.S_ISDIR(status.st_mode) else impostors).append(name)
    return namespaces, impostors


def contents_of(folder: int) -> Contents:
    """Every name in an open directory, in one of three kinds. Raises OSError."""
    names = sorted(os.listdir(folder))
    contents = Contents()
    for name in names:
        if _LEFTOVER.fullmatch(name) and _is_ours(folder, name, names):
            contents.leftovers.append(name)
        elif _is_ours(folder, name, names):
            contents.ours.append(name)
        else:
            contents.others.append(name)
    return contents


def _is_ours(folder: int, name: str, names: Sequence[str]) -> bool:
    """Whether a plain file has one of our names and our mark."""
    leftover = _LEFTOVER.fullmatch(name)
    kind = leftover[1] if leftover else name
    temporary = _TEMPORARY.fullmatch(name) is not None
    if not (RANK_FILE.fullmatch(kind) or kind == NAMESPACE_FILE or temporary):
        return False
    try:
        file = open_plain(folder, name)
    except OSError:
        return False
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            return False
        if status.st_size == 0 and (temporary or RANK_FILE.fullmatch(name)):
            return True  # of a server that was killed as it began; there is nothing to lose
        if kind.endswith(".idx"):
            return _is_record_file(file, kind, whole=not leftover)
        if kind.endswith(".kv"):
            # As at open: a file system without attributes leaves the record file to speak for both.
            return has_mark(file) or (not leftover and _has_record_file(folder, name, names))
        return parse_identity(os.pread(file, NAMESPACE_FILE_BYTES_MAX, 0)) is not None
    except OSError:
        return False
    finally:
        os.close(file)


def _is_record_file(file: int, name: str, *, whole: bool) -> bool:
    """Whether it has our header, of this rank; of what was damaged the magic must do."""
    page = os.pread(file, HEADER_BYTES, 0)
    if not whole:
        return is_marked(page)
    header = parse_header(page)
    return isinstance(header, RankHeader) and name == file_names(header.rank, header.world_size)[1]


def _has_record_file(folder: int, name: str, names: Sequence[str]) -> bool:
    record_name = name.removesuffix(".kv") + ".idx"
    if record_name not in names:
        return False
    try:
        file = open_plain(folder, record_name)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            return False
        raise
    try:
        return _is_record_file(file, record_name, whole=True)
    finally:
        os.close(file)
