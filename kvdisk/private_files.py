"""Files that only this user can read, opened so that nobody can slip in another, and locked.

KV blocks are people's prompts in another form, and cache directories tend to lie in shared places.

What always holds: directories made here are 0700 and files 0600 under any umask; nothing is opened
through a symbolic link that another user made; a FIFO, a device, a hard link or a foreign user's
file is refused untouched; a file is changed only by the holder of its lock.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from kvdisk.errors import BusyError, ConfigError, DeviceError
from kvdisk.safe_directory import Refusal, foreign_refusal, link_refusal, parent_refusal

_OPEN_ATTEMPTS: Final = 16
_SET_ASIDE_MAX: Final = 1000
# A killed process's I/O keeps its files open, and so its lock, until the kernel has done with it.
_GONE_HOLDER_PATIENCE_S: Final = 5.0
_LOCK_RETRY_S: Final = 0.02
_RENAME_NOREPLACE: Final = 1  # linux/fs.h
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def open_private_directory(path: Path, made: ExitStack) -> int:
    """A descriptor of ``path``, made 0700 and ours; its parent may be shared, but not careless.

    ``path`` is made when missing, and so is its parent, but nothing above: a disk that is not
    mounted must be noticed. ``made`` learns how to remove again what was made, unless others use
    it. Raises ConfigError for what is unsafe, DeviceError for what fails.
    """
    parent = _open_parent(path.parent, made)
    try:
        _make_directory(path, path.name, parent, made)
        status = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
        _require_directory(path, status)
        if status.st_uid != os.geteuid():
            raise ConfigError(foreign_refusal(status).about(path))
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.chmod(path.name, 0o700, dir_fd=parent)
        return os.open(
            path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
        )
    except OSError as error:
        raise DeviceError.from_os_error(error, "open directory", path, _advice(error)) from error
    finally:
        os.close(parent)


def _open_parent(path: Path, made: ExitStack) -> int:
    """The directory in which ours lies. It may belong to root or us, nobody else."""
    try:
        _make_directory(path, path, None, made)
        _accept(path, link_refusal(os.lstat(path)))
        parent = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            raise ConfigError(f"{path} is not a directory: name one for the cache.") from error
        raise DeviceError.from_os_error(error, "open directory", path, _advice(error)) from error
    try:
        _accept(path, parent_refusal(os.fstat(parent)))
    except BaseException:
        os.close(parent)
        raise
    return parent


def _accept(path: Path, refusal: Refusal | None) -> None:
    if refusal is not None:
        raise ConfigError(refusal.about(path))


def _make_directory(path: Path, name: str | Path, parent: int | None, made: ExitStack) -> None:
    """Like mkdir, but 0700 under any umask, content with what is there, and known to ``made``."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        return
    except FileNotFoundError as error:
        # An open parent has only now been removed, as another open does that made it and fails.
        # /proc takes no directories and says so in these words.
        if parent is not None or os.path.exists(path.parent):
            raise
        raise ConfigError(
            f"{path.parent} does not exist: make it, or mount the disk that should be there."
        ) from error
    made.callback(_remove_if_empty, path)
    # A umask may have taken bits away; nobody else could put something else here so soon, except
    # in a directory that the next check refuses.
    os.chmod(name, 0o700, dir_fd=parent)


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):
        os.rmdir(path)


def _require_directory(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"{path} is {_kind(status)}, not a directory: remove it, or use another directory."
        )


def open_locked(folder: int, path: Path) -> int:
    """A descriptor, read and write, of the file ``path.name`` in ``folder``, made when missing.

    It holds the file's exclusive lock (flock(2)), which ends with the last copy of the descriptor,
    so with the process or, after a kill, with its last I/O: that is waited for, a while. Raises
    BusyError, naming the holder, when it is taken; ConfigError for a planted or foreign object;
    DeviceError when the file system cannot do it.
    """
    for _ in range(_OPEN_ATTEMPTS):
        file, is_new = _open_private(folder, path)
        try:
            _make_private(file, path)
            _lock(file, path)
            if _is_still(folder, path.name, file):
                return file
        except BaseException as error:
            # Of a file system that has no locks, say. What BusyError is about is somebody else's.
            if is_new and isinstance(error, (OSError, DeviceError)):
                undo_create(folder, path.name, file)
            os.close(file)
            if isinstance(error, OSError):  # here, where it is known what helps against EPERM
                raise DeviceError.from_os_error(error, "open", path, _advice(error)) from error
            raise
        os.close(file)  # renamed or removed between open and lock: not the one others would see
    raise BusyError(f"{path} keeps being replaced by another process.", path=str(path))


def set_aside(folder: int, path: Path) -> str:
    """Rename ``path.name`` to the first free ``.damaged-N``; the new name. The lock is held."""
    for number in range(1, _SET_ASIDE_MAX):
        name = f"{path.name}.damaged-{number}"
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            try:
                os.rename(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError as error:
                raise DeviceError.from_os_error(error, "rename", path, _advice(error)) from error
            return name
    raise DeviceError(
        f"{path}: too many damaged files beside it; look at them and remove what is not needed.",
        errno=errno.EEXIST,
        op="rename",
        path=str(path),
    )


def put_back(folder: int, aside: str, name: str) -> None:
    """Undo ``set_aside`` as far as the disk lets, unless the name is taken again."""
    with suppress(OSError):
        _rename_no_replace(folder, aside, name)


def unlink_if_same(folder: int, name: str, file: int) -> bool:
    """Remove the name, if it is still that of the open file."""
    if not _is_still(folder, name, file):
        return False
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    return True


def undo_create(folder: int, name: str, file: int) -> None:
    """``unlink_if_same`` as far as the disk lets: what made undoing needful is what is told."""
    with suppress(OSError):
        unlink_if_same(folder, name, file)


def shrink_back(file: int, size_bytes: int) -> None:
    """Undo the growth of a file as far as the disk lets."""
    with suppress(OSError):
        if os.fstat(file).st_size > size_bytes:
            os.ftruncate(file, size_bytes)


def read_private(path: Path, bytes_max: int, folder: int | None = None) -> bytes:
    """The content of a plain file of ours, never through a link; at most ``bytes_max``.

    Raises OSError when it cannot be read, ConfigError when it is not what it should be.
    """
    name = path if folder is None else path.name
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    _require_own_file(path, status)
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(file, "rb") as opened:
        return opened.read(bytes_max)


def write_private(folder: int, path: Path, content: bytes) -> None:
    """Make the file ``path.name`` with this content, whole or not at all, whoever else does so.

    Raises DeviceError when the disk does not take it.
    """
    temporary = f".{path.name}.{os.getpid()}.{threading.get_ident()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)  # of a dead process that had our number
        file = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(file, "wb") as opened:
                os.fchmod(file, 0o600)
                opened.write(content)
                opened.flush()
                os.fsync(file)
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
    except OSError as error:
        raise DeviceError.from_os_error(error, "write", path, _advice(error)) from error


def _rename_no_replace(folder: int, source: str, target: str) -> None:
    """renameat2(2): a look before the rename could miss what another process makes after it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = folder, os.fsencode(source), folder, os.fsencode(target)
    if call is not None and call(*names, _RENAME_NOREPLACE) == 0:
        return
    if call is not None and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # Not here. Second best, since for an instant the file has two names, which others refuse.
    os.link(source, target, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    os.unlink(source, dir_fd=folder)


def _open_private(folder: int, path: Path) -> tuple[int, bool]:
    """A descriptor, and whether the file was made here. Never through a link, nor of a FIFO."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with suppress(FileNotFoundError):
            # Looked at before it is opened: opening a FIFO or a device can already have effects.
            status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            _require_own_file(path, status)
            if stat.S_IMODE(status.st_mode) != 0o600:
                os.chmod(path.name, 0o600, dir_fd=folder)
        with suppress(FileExistsError):
            made = os.open(path.name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            return made, True
        return os.open(path.name, flags | os.O_CREAT, 0o600, dir_fd=folder), False
    except OSError as error:
        raise DeviceError.from_os_error(error, "open", path, _advice(error)) from error


def _make_private(file: int, path: Path) -> None:
    """0600 under any umask, and never what is not a plain file of ours."""
    status = os.fstat(file)
    if status.st_nlink > 0:
        _require_own_file(path, status)
    os.fchmod(file, 0o600)


def _require_own_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is {_kind(status)}, not a file: find out who put it there.")
    if status.st_uid != os.geteuid():
        raise ConfigError(foreign_refusal(status).about(path))
    if status.st_nlink > 1:
        raise ConfigError(
            f"{path} has {status.st_nlink} hard links, so writing to it would change another "
            "file: find out who made them, then remove this name."
        )


def _lock(file: int, path: Path) -> None:
    began = time.monotonic()
    tries = 0
    while not _try_lock(file, path):
        tries += 1
        holder = lock_holder(file)
        gone = holder is None or not _is_alive(holder)
        # "kvdisk inspect" may try the lock for an instant: that must not stop a server.
        if tries == 1 or (gone and time.monotonic() < began + _GONE_HOLDER_PATIENCE_S):
            time.sleep(_LOCK_RETRY_S)
            continue
        if holder == os.getpid():
            raise BusyError(
                f"{path} is in use by this process itself: close the tier that has it open. One "
                "that was closed while its disk hung, or that a forked child has too, keeps the "
                "file until this process, and that child, have ended.",
                path=str(path),
                holder=holder,
            )
        who = f"process {holder}" if holder else "a process that cannot be seen from here"
        raise BusyError(
            f"{path} is in use by {who}: give each rank its own number and each server its own "
            "directory, or stop that process.",
            path=str(path),
            holder=holder,
        )


def _try_lock(file: int, path: Path) -> bool:
    """False: somebody has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        advice = (
            "This file system has no locks, so two servers could overwrite each other: use a "
            "directory on a local disk."
            if error.errno in _NO_LOCKS
            else _advice(error)
        )
        raise DeviceError.from_os_error(error, "lock", path, advice) from error
    return True


def _is_alive(process: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not (proc(5))."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def lock_holder(file: int, locks: Path = Path("/proc/locks")) -> int | None:
    """The process that took the lock of an open file, from the kernel's list (proc(5)).

    None when it cannot be seen, as from within another container.
    """
    status = os.fstat(file)
    exact = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = locks.read_text().splitlines()
    except OSError:
        return None
    same_inode = None
    for line in lines:
        words = line.split()  # "1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF"
        if len(words) < 6 or words[1] != "FLOCK" or not words[4].isdecimal() or words[4] == "0":
            continue
        if words[5] == exact:
            return int(words[4])
        # btrfs and overlay show another device number here than stat does.
        if words[5].endswith(f":{status.st_ino}"):
            same_inode = int(words[4])
    return same_inode


def _is_still(folder: int, name: str, file: int) -> bool:
    try:
        named = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = os.fstat(file)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _kind(status: os.stat_result) -> str:
    for test, name in (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if test(status.st_mode):
            return name
    return "a device"


def _advice(error: OSError) -> str:
    return {
        errno.EACCES: f"Give user {os.geteuid()} the right to read and write there.",
        errno.EPERM: "Look for an immutable flag (lsattr) or a security module's denial.",
        errno.EROFS: "Mount the file system writable, or use another directory.",
        errno.ENOSPC: "Free space or inodes there.",
        errno.EDQUOT: "Raise the quota of this user.",
        errno.ENAMETOOLONG: "Use a shorter directory name.",
        errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    }.get(error.errno or 0, "Check the disk (dmesg), or use another directory.")
