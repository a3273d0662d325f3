"""A18: closing while the disk answers nothing. A small ext4 on a loop device is frozen for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from disks import loop_ext4

RunNative = Callable[..., str]


@pytest.mark.root
@pytest.mark.slow
def test_a_backend_leaves_a_frozen_disk(
    run_native: RunNative, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loop_ext4(tmp_path) as mount:
        monkeypatch.setenv("KVDISK_FROZEN_DIRECTORY", str(mount))
        output = run_native("A18: on a frozen disk*")
    assert "names no mount" not in output
