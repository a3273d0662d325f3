"""Small real disks that can be filled, frozen and cut off. Whatever is made here is undone on exit.

Freezing is described in fsfreeze(8) and linux/fs.h; everything here needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

FIFREEZE = 0xC0045877  # linux/fs.h: _IOWR('X', 119, int)
FITHAW = 0xC0045878  # linux/fs.h: _IOWR('X', 120, int)
FS_IOC_SHUTDOWN = 0x8004587D  # xfs/libxfs/xfs_fs.h: _IOR('X', 125, u32); ext4 has the same
SHUTDOWN_NO_LOG_FLUSH = 2
FROZEN_S_MAX = 30.0


class LoopDisk:
    """A mounted file system on a loop device. ``mount`` is where; ``remount`` after a power cut."""

    def __init__(self, directory: Path, loop: str) -> None:
        self.mount = directory / "mount"
        self.loop = loop
        self.mount.mkdir()
        self.attach()

    def attach(self, *options: str) -> None:
        _run("mount", *options, self.loop, str(self.mount))

    def detach(self) -> None:
        """Lazily: a process that still uses it does not keep us here."""
        thaw(self.mount)
        if os.path.ismount(self.mount):
            _run("umount", "--lazy", str(self.mount))

    def cut_power(self) -> None:
        """Nothing reaches the disk from now on, the journal's last entries included."""
        _ioctl(self.mount, FS_IOC_SHUTDOWN, struct.pack("I", SHUTDOWN_NO_LOG_FLUSH))

    def remount(self) -> None:
        """As after a power cut: the journal is replayed. Nobody may use the disk any more."""
        _run("umount", str(self.mount))
        self.attach()


@contextlib.contextmanager
def loop_disk(
    directory: Path, file_system: str = "ext4", size_mib: int = 64, *options: str
) -> Iterator[LoopDisk]:
    """A file system ("ext4" or "xfs", of at least 320 MiB) on a loop device; thawed, unmounted and
    detached whatever happens. ``options`` are those of mkfs."""
    image = directory / "image"
    with contextlib.ExitStack() as undo:
        with open(image, "wb") as file:
            file.truncate(size_mib << 20)
        loop = _run("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
        undo.callback(_run, "losetup", "--detach", loop)
        _run(f"mkfs.{file_system}", "-q", *options, loop)
        disk = LoopDisk(directory, loop)
        undo.callback(disk.detach)
        yield disk


@contextlib.contextmanager
def loop_ext4(directory: Path, size_mib: int = 64) -> Iterator[Path]:
    """A mounted ext4 on a loop device; thawed, unmounted and detached whatever happens."""
    with loop_disk(directory, "ext4", size_mib) as disk:
        yield disk.mount


@contextlib.contextmanager
def tmpfs(directory: Path, size_mib: int) -> Iterator[Path]:
    """A mounted tmpfs of a size."""
    mount = directory / "tmpfs"
    mount.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "kvdisk-test", str(mount))
    try:
        yield mount
    finally:
        _run("umount", "--lazy", str(mount))


def fill(mount: Path) -> None:
    """Take all the space that is left, to the last block, with a file ``tenant``."""
    with contextlib.suppress(OSError), (mount / "tenant").open("wb", buffering=0) as tenant:
        while True:
            tenant.write(bytes(1 << 20))
    assert os.statvfs(mount).f_bavail == 0, "it is not full"


def freeze(mount: Path) -> None:
    """Writes hang from now on, uncancellably; reads go on. Ends by itself after ``FROZEN_S_MAX``:
    a process with a write in flight cannot even be killed before."""
    _ioctl(mount, FIFREEZE)
    guard = threading.Timer(FROZEN_S_MAX, thaw, [mount])
    guard.daemon = True
    guard.start()


def thaw(mount: Path) -> bool:
    """Undo ``freeze``. Whether it was still frozen."""
    try:
        _ioctl(mount, FITHAW)
    except OSError:
        return False
    return True


def _ioctl(mount: Path, request: int, argument: int | bytes = 0) -> None:
    descriptor = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, request, argument)
    finally:
        os.close(descriptor)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """RLIMIT_FSIZE: a write across it is short, one beyond it is EFBIG (Python ignores SIGXFSZ)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
