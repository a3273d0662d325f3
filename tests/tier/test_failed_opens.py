"""Opens that fail: what they leave, also where the disk is too sick to be tidied up."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import select
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdisk import disk_path
from kvdisk.errors import BusyError, ConfigError, DeviceError
from kvdisk.identity import Identity
from kvdisk.layout import Layout
from kvdisk.transfer import TransferEngine
from kvdisk.units import parse_size
from tests.tier.rig import TierRig, ok, tier_rig

KEYS = list(range(100))


def fail_self_test(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    real = disk_path.self_test

    def fail(directory: Path, *options: Any) -> str | None:
        if directory.is_relative_to(root):
            raise DeviceError("the self-test failed", errno=errno.EROFS)
        return real(directory, *options)

    monkeypatch.setattr(disk_path, "self_test", fail)


def refuse_unlink(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.unlink

    def refuse(name: str, **options: Any) -> None:
        if name.startswith("rank-"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(name, **options)

    monkeypatch.setattr(os, "unlink", refuse)


def test_a_disk_too_sick_to_be_tidied_up_does_not_hide_what_was_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        fail_self_test(patch, tmp_path)
        refuse_unlink(patch)
        with pytest.raises(DeviceError, match="the self-test failed"):
            TierRig(tmp_path / "kv")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with tier_rig(tmp_path / "kv"):  # its lock is free again
        pass


@pytest.mark.parametrize("order", [("sick", "well"), ("well", "sick")])
def test_a_disk_too_sick_to_be_tidied_up_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    with monkeypatch.context() as patch:
        fail_self_test(patch, tmp_path / "sick")
        refuse_unlink(patch)
        rig = TierRig(*(tmp_path / each for each in order))
    with rig.tier:
        assert len(rig.tier.health().paths) == 2
        assert rig.tier.health().status == "degraded"


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG, errno.ENOTCONN, errno.ESTALE])
@pytest.mark.parametrize("order", [("lost", "well"), ("well", "lost")])
def test_a_path_that_cannot_be_looked_at_is_left_out_in_either_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, order: tuple[str, str]
) -> None:
    lose(monkeypatch, tmp_path / "lost", number)
    with tier_rig(*(tmp_path / each for each in order)) as rig:
        assert rig.tier.health().status == "degraded"


def test_a_path_that_cannot_be_looked_at_is_an_error_of_ours_if_it_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(monkeypatch, tmp_path / "lost", errno.ENOTCONN)
    with pytest.raises(DeviceError, match="lost: Transport endpoint is not connected"):
        TierRig(tmp_path / "lost")


@pytest.mark.parametrize("order", [("sick", "well"), ("well", "sick")])
def test_whatever_a_path_raises_is_about_that_path_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    order: tuple[str, str],
) -> None:
    def raw(directory: Path, *_: object) -> str | None:
        if directory.is_relative_to(tmp_path / "well"):
            return None
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(disk_path, "self_test", raw)
    with tier_rig(*(tmp_path / each for each in order)) as rig:
        assert rig.tier.health().status == "degraded"
    assert f"left out, its slots are misses: open {tmp_path / 'sick'}" in caplog.text
    with pytest.raises(DeviceError, match="/sicker/"):
        TierRig(tmp_path / "sick", tmp_path / "sicker")


def lose(monkeypatch: pytest.MonkeyPatch, root: Path, number: int) -> None:
    """Whatever is asked of ``root`` or below it fails: a dead mount, or a directory not ours."""

    def losing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if isinstance(path, (str, Path)) and Path(path).is_relative_to(root):
                raise OSError(number, os.strerror(number))
            return real(path, *args, **options)

        return call

    for name in ("stat", "lstat", "mkdir", "open", "statvfs"):
        monkeypatch.setattr(os, name, losing(getattr(os, name)))


@pytest.mark.parametrize("step", ["self_test", "engine", "label", "second path"])
@pytest.mark.parametrize(
    "change",
    [{"capacity": "32MiB"}, {"capacity": "8MiB"}, {"persist": False}, {"block_bytes": 32 << 10}],
    ids=["growing", "shrinking", "nameless", "other slots"],
)
def test_an_open_that_fails_leaves_a_cache_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], step: str
) -> None:
    root, busy = tmp_path / "kv", tmp_path / "busy"
    with monkeypatch.context() as patch:
        # So that slots of another size are the same cache's, as where ranks' blocks differ.
        patch.setattr(Layout, "fingerprint_fields", lambda _: {"any": 1})
        with tier_rig(root) as rig:
            assert rig.store(KEYS) == ok(100)
        before = facts_of(root)
        if step == "second path":
            capacity_bytes = 2 * parse_size(change.get("capacity", "16MiB"))
            with tier_rig(busy), pytest.raises(BusyError):
                TierRig(root, busy, **{**change, "capacity": capacity_bytes})
        else:
            fail_step(patch, step)
            with pytest.raises(DeviceError, match="it is broken"):
                TierRig(root, **change)
    assert facts_of(root) == before


@pytest.mark.parametrize("there", [False, True], ids=["new", "there"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOSPC])
def test_any_call_that_is_refused_once_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, number: int
) -> None:
    """Each call of an open in turn: it succeeds all the same, or raises an error of ours."""
    root, capacity = tmp_path / "kv", {"capacity": "1MiB"}
    if there:
        with tier_rig(root, **capacity) as rig:
            assert rig.store(KEYS[:10]) == ok(10)
    before, descriptors = facts_of(root), len(os.listdir("/proc/self/fd"))
    failed = 0
    for nth in itertools.count(1):
        with monkeypatch.context() as patch:
            refused = refuse_nth(patch, nth, number)
            try:
                TierRig(root, **capacity).close()
            except (BusyError, ConfigError, DeviceError):
                failed += 1
                assert facts_of(root) == before, refused
                assert there or not root.exists(), refused
        if not there and root.exists():
            shutil.rmtree(root)
        assert len(os.listdir("/proc/self/fd")) == descriptors, refused
        if not refused:
            break
    assert failed > 10
    if there:
        with tier_rig(root, **capacity) as rig:
            assert rig.load(KEYS[:10]) == ok(10)


def refuse_nth(monkeypatch: pytest.MonkeyPatch, nth: int, number: int) -> list[str]:
    """Have the ``nth`` call that may well be refused fail, and say here which one that was."""
    calls = itertools.count(1)
    refused: list[str] = []

    def refusing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            names = {frame.name for frame in traceback.extract_stack()}
            # Reading kvdisk.json, which is then written anew, and what comes after it.
            if not names & {"label_namespace", "finish", "close"} and next(calls) == nth:
                refused.append(name)
                raise OSError(number, os.strerror(number))
            return real(*args, **options)

        return call

    for module, name in (
        *((os, name) for name in ("open", "mkdir", "chmod", "fchmod", "ftruncate")),
        *((os, name) for name in ("fsync", "pwritev", "eventfd", "statvfs", "fstatvfs")),
        (fcntl, "flock"),
        (select, "epoll"),
    ):
        monkeypatch.setattr(module, name, refusing(name, getattr(module, name)))
    return refused


def test_a_machine_out_of_descriptors_in_the_last_step_costs_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tier_rig(tmp_path) as rig:
        assert rig.store(KEYS) == ok(100)
    before = facts_of(tmp_path)

    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(select, "epoll", refuse)
        with pytest.raises(DeviceError, match="ulimit -n"):
            TierRig(tmp_path, capacity="8MiB")
    assert facts_of(tmp_path) == before


def test_a_kernel_that_watches_no_more_descriptors_costs_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a path was away during a clear, so that its engine is opened anew."""
    whole, away = tmp_path / "whole", tmp_path / "away"
    with tier_rig(whole) as rig:
        assert rig.tier.clear()
        assert rig.store(KEYS) == ok(100)
    with tier_rig(away):
        pass
    before = facts_of(whole)
    for nth in itertools.count(1):
        with monkeypatch.context() as patch:
            refused = refuse_nth_register(patch, nth)
            try:
                TierRig(whole, away, capacity="8MiB").close()
            except DeviceError:
                assert facts_of(whole) == before, refused
        if not refused:
            break
    assert nth > 3  # what wakes the worker, and the engine of each path
    assert facts_of(whole) != before


def refuse_nth_register(monkeypatch: pytest.MonkeyPatch, nth: int) -> list[int]:
    """The ``nth`` descriptor to be watched is refused: fs.epoll.max_user_watches (epoll(7))."""
    real = select.epoll
    calls = itertools.count(1)
    refused: list[int] = []

    class Epoll:
        def __init__(self) -> None:
            self._real = real()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def register(self, file: int, events: int) -> None:
            if next(calls) == nth:
                refused.append(file)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._real.register(file, events)

    monkeypatch.setattr(select, "epoll", Epoll)
    return refused


def test_a_path_that_is_refused_in_the_last_step_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk_path.label_namespace

    def refuse(directory: Path, identity: Identity) -> None:
        if directory.is_relative_to(tmp_path / "second"):
            raise ConfigError("it is writable for everyone by now")
        real(directory, identity)

    monkeypatch.setattr(disk_path, "label_namespace", refuse)
    with tier_rig(tmp_path / "first", tmp_path / "second") as rig:
        assert rig.tier.health().status == "degraded"
    assert not (tmp_path / "second").exists()


def facts_of(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, bytes on the disk and content of each file."""
    return {
        str(path): (path.stat().st_ino, path.stat().st_blocks, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def fail_step(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DeviceError("it is broken", errno=errno.EIO)

    target, function = {
        "self_test": (disk_path, "self_test"),
        "engine": (TransferEngine, "open"),
        "label": (disk_path, "label_namespace"),
    }[step]
    monkeypatch.setattr(target, function, fail)
