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

import fcntl
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdisk.looking import Lock, lock_of, open_directory, open_plain
from kvdisk.ours import RANK_FILE, Contents, contents_of, namespaces_in
from kvdisk.survey import read_identity


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
        names, impostors = namespaces_in(parent)
        found, unreadable = [], [f"{name} (not a directory)" for name in impostors]
        for name in names:
            try:
                found.append(_look(root, name, parent))
            except OSError as error:  # another user's
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
            contents = contents_of(folder)
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
            for name in contents_of(folder).leftovers:
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


def _look(root: Path, name: str, parent: int) -> Namespace:
    folder = open_directory(name, parent, follow=False)
    try:
        contents = contents_of(folder)
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
