"""A18: closing while the disk answers nothing. A small ext4 on a loop device is frozen for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RunNative = Callable[..., str]

FITHAW = 0xC0045878  # linux/fs.h: _IOWR('X', 120, int)


@pytest.fixture
def small_ext4(tmp_path: Path) -> Iterator[Path]:
    """A mount point; whatever happens it is thawed, unmounted and detached."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with contextlib.ExitStack() as undo:
        with open(image, "wb") as file:
            file.truncate(64 << 20)
        loop = _run("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
        undo.callback(_run, "losetup", "--detach", loop)
        _run("mkfs.ext4", "-q", loop)
        _run("mount", loop, str(mount))
        undo.callback(_run, "umount", "--lazy", str(mount))
        undo.callback(_thaw, mount)
        yield mount


def _thaw(mount: Path) -> None:
    descriptor = os.open(mount, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # EINVAL: it was not frozen
            fcntl.ioctl(descriptor, FITHAW, 0)
    finally:
        os.close(descriptor)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.root
@pytest.mark.slow
def test_a_backend_leaves_a_frozen_disk(
    run_native: RunNative, small_ext4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDISK_FROZEN_DIRECTORY", str(small_ext4))
    output = run_native("A18: on a frozen disk*")
    assert "names no mount" not in output
