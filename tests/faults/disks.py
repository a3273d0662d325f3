"""Small real disks that can be filled and frozen. Whatever is made here is undone on exit.

Freezing is described in fsfreeze(8) and linux/fs.h; everything here needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

FIFREEZE = 0xC0045877  # linux/fs.h: _IOWR('X', 119, int)
FITHAW = 0xC0045878  # linux/fs.h: _IOWR('X', 120, int)
FROZEN_S_MAX = 30.0


@contextlib.contextmanager
def loop_ext4(directory: Path, size_mib: int = 64) -> Iterator[Path]:
    """A mounted ext4 on a loop device; thawed, unmounted and detached whatever happens."""
    image, mount = directory / "image", directory / "mount"
    mount.mkdir()
    with contextlib.ExitStack() as undo:
        with open(image, "wb") as file:
            file.truncate(size_mib << 20)
        loop = _run("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
        undo.callback(_run, "losetup", "--detach", loop)
        _run("mkfs.ext4", "-q", loop)
        _run("mount", loop, str(mount))
        undo.callback(_run, "umount", "--lazy", str(mount))
        undo.callback(thaw, mount)
        yield mount


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


def freeze(mount: Path) -> None:
    """Writes hang from now on, uncancellably; reads go on. Ends by itself after ``FROZEN_S_MAX``:
    a process with a write in flight cannot even be killed before."""
    _ioctl(mount, FIFREEZE)
    guard = threading.Timer(FROZEN_S_MAX, thaw, [mount])
    guard.daemon = True
    guard.start()


def thaw(mount: Path) -> None:
    """Undo ``freeze``; no error if it was not frozen."""
    with contextlib.suppress(OSError):
        _ioctl(mount, FITHAW)


def _ioctl(mount: Path, request: int) -> None:
    descriptor = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, request, 0)
    finally:
        os.close(descriptor)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
