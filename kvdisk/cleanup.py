"""Which namespaces of a root may go, and removing them without taking anything else along.

A cache's identity changes with every model, revision and layout, and what belonged to the old one
stays on the disk until somebody removes it.

What always holds:
    * Only a directory with a namespace's name is touched, and in it only files that carry our mark
      under our names. What is not ours is left, and so is the directory around it.
    * A namespace goes only while all its locks are held here, so never below a server.
    * No symbolic link is followed, and everything is removed by the directory's descriptor: what a
      stranger puts in its place meanwhile is not touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvdisk.identity import NAMESPACE_FILE, is_namespace_name, parse_identity
from kvdisk.looking import Lock, lock_of, open_directory, open_plain
from kvdisk.rank_file import has_mark
from kvdisk.rank_header import HEADER_BYTES, RankHeader, is_marked, parse_header
from kvdisk.survey import RANK_FILE, read_identity

_LEFTOVER: Final = re.compile(
    r"(rank-\d{1,9}-of-\d{1,9}\.(?:kv|idx)|kvdisk\.json)\.damaged-\d{1,4}"
)
_TEMPORARY: Final = re.compile(r"\.kvdisk\.json\.\d+\.\d+")
_IDENTITY_BYTES_MAX: Final = 1 << 20


@dataclass
class Contents:
    """Names in a namespace: ours, leftovers of ours, and the rest, which is never removed."""

    ours: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Namespace:
    """``used_s`` is when it was last written or opened, in seconds since 1970.

    ``leftover_bytes`` are part of ``allocated_bytes``.
    """

    directory: Path
    identity: dict[str, Any] | None
    contents: Contents
    allocated_bytes: int
    leftover_bytes: int
    used_s: float
    lock: Lock


@dataclass(frozen=True)
class Removal:
    """What came of removing. ``problem`` says why not all went; "" when it did."""

    freed_bytes: int
    problem: str = ""


def find(root: Path) -> tuple[list[Namespace], list[str]]:
    """The namespaces below ``root``, the latest used first; and what only has the name of one.

    Raises OSError when ``root`` cannot be read.
    """
    with ExitStack() as stack:
        parent = open_directory(root)
        stack.callback(os.close, parent)
        found, unreadable = [], []
        for name in sorted(os.listdir(parent)):
            if is_namespace_name(name):
                try:
                    found.append(_look(root, name, parent))
                except OSError as error:  # a link, a file, another user's
                    unreadable.append(f"{name} ({error.strerror})")
    return sorted(found, key=lambda each: (-each.used_s, each.directory.name)), unreadable


def select(
    namespaces: Sequence[Namespace],
    *,
    keep_newest: int | None = None,
    older_than_s: float | None = None,
    bytes_max: int | None = None,
    now_s: float,
) -> list[Namespace]:
    """Which of ``namespaces`` (the latest used first) are to go, the longest unused first.

    ``keep_newest`` and ``older_than_s`` say which may go; ``bytes_max`` says that they go only
    until all that stay take no more than this. Those in use stay. Without any, nothing goes.
    """
    if keep_newest is None and older_than_s is None and bytes_max is None:
        return []
    may_go = [
        each
        for each in namespaces[keep_newest or 0 :]
        if not each.lock.held and (older_than_s is None or each.used_s < now_s - older_than_s)
    ]
    may_go.reverse()
    if bytes_max is None:
        return may_go
    total = sum(each.allocated_bytes for each in namespaces)
    going = []
    for each in may_go:
        if total <= bytes_max:
            break
        total -= each.allocated_bytes
        going.append(each)
    return going


def remove(namespace: Namespace) -> Removal:
    """Remove what is ours, and the directory when nothing else is in it. Leftovers stay.

    Nothing goes while any of its files is in use.
    """
    with ExitStack() as stack:
        try:
            parent = open_directory(namespace.directory.parent)
            stack.callback(os.close, parent)
            name = namespace.directory.name
            folder = open_directory(name, parent, follow=False)
            stack.callback(os.close, folder)
            contents = _contents(folder)
            held: dict[str, int] = {}
            for each in contents.ours:
                held[each] = open_plain(folder, each)
                stack.callback(os.close, held[each])
                fcntl.flock(held[each], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Removal(0, "in use: a server has opened it meanwhile")
        except OSError as error:
            return Removal(0, f"cannot be opened ({error.strerror})")
        freed, problem = _unlink(folder, held)
        left = [*contents.leftovers, *contents.others]
        if problem or left:
            return Removal(freed, problem or f"left in it: {', '.join(sorted(left))}")
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            return Removal(freed, f"the directory stays ({error.strerror})")
        return Removal(freed)


def remove_leftovers(namespace: Namespace) -> Removal:
    """Remove files of ours that were set aside as damaged; no server ever opens them again."""
    with ExitStack() as stack:
        try:
            folder = open_directory(namespace.directory, follow=False)
            stack.callback(os.close, folder)
            held = {}
            for name in _contents(folder).leftovers:
                held[name] = open_plain(folder, name)
                stack.callback(os.close, held[name])
        except OSError as error:
            return Removal(0, f"cannot be opened ({error.strerror})")
        return Removal(*_unlink(folder, held))


def _unlink(folder: int, files: dict[str, int]) -> tuple[int, str]:
    """Unlink those names that still are these open files; bytes freed, and what went wrong."""
    freed = 0
    for name, file in sorted(files.items(), key=lambda item: _last_to_go(item[0])):
        status = os.fstat(file)
        try:
            named = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if (named.st_dev, named.st_ino) != (status.st_dev, status.st_ino):
                return freed, f"{name} was replaced meanwhile"
            os.unlink(name, dir_fd=folder)
        except OSError as error:
            return freed, f"{name} cannot be removed ({error.strerror})"
        freed += status.st_blocks * 512
    return freed, ""


def _last_to_go(name: str) -> int:
    """What proves that others are ours goes after them, should this be interrupted."""
    order = (".kv", ".idx", ".json")
    return next((n for n, end in enumerate(order) if name.endswith(end)), 0)


# What is ours -----------------------------------------------------------------------------------


def _look(root: Path, name: str, parent: int) -> Namespace:
    folder = open_directory(name, parent, follow=False)
    try:
        contents = _contents(folder)
        statuses = {
            each: os.stat(each, dir_fd=folder, follow_symlinks=False)
            for each in (*contents.ours, *contents.leftovers, *contents.others)
        }
        sizes = {each: status.st_blocks * 512 for each, status in statuses.items()}
        # Opening a cache writes a probe beside its files, which the directory's time tells.
        used_s = max([os.fstat(folder).st_mtime, *(each.st_mtime for each in statuses.values())])
        return Namespace(
            root / name,
            read_identity(folder),
            contents,
            sum(sizes.values()),
            sum(sizes[each] for each in contents.leftovers),
            used_s,
            _lock_of(folder, contents),
        )
    finally:
        os.close(folder)


def _lock_of(folder: int, contents: Contents) -> Lock:
    """The first lock that is held of all rank files here, also of those that prove nothing."""
    for name in (*contents.ours, *contents.others):
        if RANK_FILE.fullmatch(name):
            with suppress(OSError):
                file = open_plain(folder, name)
                try:
                    lock = lock_of(file)
                finally:
                    os.close(file)
                if lock.held:
                    return lock
    return Lock(False)


def _contents(folder: int) -> Contents:
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
        if status.st_size == 0 and RANK_FILE.fullmatch(name):
            return True  # of a server that was killed as it began; there is nothing to lose
        if kind.endswith(".idx"):
            return _is_record_file(file, kind, whole=not leftover)
        if kind.endswith(".kv"):
            # As at open: a file system without attributes leaves the record file to speak for both.
            return has_mark(file) or (not leftover and _has_record_file(folder, name, names))
        return parse_identity(os.pread(file, _IDENTITY_BYTES_MAX, 0)) is not None
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
    return isinstance(header, RankHeader) and name == (
        f"rank-{header.rank}-of-{header.world_size}.idx"
    )


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
