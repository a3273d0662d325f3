"""Clears and probes run in the background: what they leave behind, and when they cannot run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvdisk.disk_path import DiskPath
from kvdisk.rank_file import RankFile
from kvdisk.rank_pages import write_header
from kvdisk.transfer import RowStatus, TransferEngine
from kvdisk.worker import TierWorker
from tests.faults.disks import file_size_limit, freeze, loop_ext4, thaw
from tests.faults.fuse_disk import fuse_disk, needs_fuse
from tests.tier.tier_rig import PATIENCE_S, TierRig, keys_of, ok, tier_rig
from tests.tier.waiting import Clock, rounds_until

KEYS = keys_of(range(32))
MORE = keys_of(range(100, 132))


def only_path(rig: TierRig) -> DiskPath:
    worker = rig.tier._worker
    assert isinstance(worker, TierWorker)
    return worker._paths[0]


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < limit, "it never became so"
        time.sleep(0.01)


def open_descriptors(below: str = "") -> int:
    """How many descriptors this process has, of files below a directory."""
    targets = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(each) and os.readlink(each).startswith(below) for each in targets)


def no_threads(patch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", start)


def test_a18_close_while_a_clear_cannot_open_the_engine_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = TierRig(tmp_path)
    failed = threading.Event()

    def failing() -> TransferEngine:
        failed.set()
        raise MemoryError("for this test")

    monkeypatch.setattr(only_path(rig), "_open_engine", failing)
    assert not rig.tier.clear(timeout_s=0.05)
    assert failed.wait(PATIENCE_S)
    rig.close(0.05)
    until(lambda: open_descriptors(str(tmp_path)) == 0)


@pytest.mark.root
def test_a23_a_slot_that_hangs_over_a_clear_comes_back_with_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine before a clear still has writes under way: their slots are kept, then released."""

    def bump_epoch_in_memory(file: RankFile, clears: int) -> int:
        file.header = replace(file.header, epoch=file.header.epoch + 1, clears=clears)
        return file.header.epoch

    clock = Clock()
    with loop_ext4(tmp_path) as mount, tier_rig(mount / "kv", clock=clock) as rig:
        assert rig.store(KEYS) == ok(32)
        freeze(mount)
        stuck = rig.submit_store(MORE)
        with monkeypatch.context() as patch:  # the header's page hangs no less than the blocks do
            patch.setattr(RankFile, "bump_epoch", bump_epoch_in_memory)
            assert rig.tier.clear(timeout_s=PATIENCE_S)
        assert set(rig.finish(stuck)) <= {RowStatus.TIMED_OUT, RowStatus.REFUSED}
        held = rig.tier.stats().slots.quarantined
        assert held > 0
        rig.legal.clear()
        thaw(mount)
        file = only_path(rig).file
        write_header(file.record_fd, file.record_path, file.header)

        rounds_until(
            rig,
            clock,
            lambda: rig.tier.stats().slots.quarantined == 0 and rig.tier.health().status == "ok",
        )

        def quiet() -> bool:
            news = rig.tier.wait(0.05)
            rig.poll()
            return not news

        until(quiet)  # else something stays readable although there is no news
        assert len(only_path(rig).engines) == 1, "the engine before the clear is kept"
        assert rig.store(KEYS, generation=1) == ok(32)
        assert rig.load(KEYS) == ok(32)


def test_a_machine_without_threads_delays_probes_and_costs_no_descriptor(tmp_path: Path) -> None:
    clock = Clock()
    with tier_rig(tmp_path, clock=clock) as rig:
        assert rig.store(KEYS) == ok(32)
        with pytest.MonkeyPatch.context() as patch:
            with file_size_limit(0):
                while rig.tier.health().status == "ok":
                    rig.store(MORE)
            before = open_descriptors()
            no_threads(patch)
            for _ in range(10):
                clock.ahead_s += 60
                rig.poll()
            assert open_descriptors() == before
            assert "EAGAIN" in rig.tier.health().paths[0].reason
            assert rig.load(KEYS) == ok(32)

        rounds_until(rig, clock, lambda: rig.tier.health().status == "ok")
        assert rig.store(MORE) == ok(32)


def test_a_machine_without_threads_delays_a_clear(tmp_path: Path) -> None:
    clock = Clock()
    with tier_rig(tmp_path, clock=clock) as rig:
        assert rig.store(KEYS) == ok(32)
        with pytest.MonkeyPatch.context() as patch:
            no_threads(patch)
            assert not rig.tier.clear(timeout_s=0.05)
            clock.ahead_s += 60
            rig.poll()
            assert rig.tier.lookup(KEYS) == 0
        clock.ahead_s += 60
        rig.legal.clear()
        rig.wait_until(lambda: rig.tier.health().status == "ok")
        assert rig.store(KEYS, generation=1) == ok(32)
        assert rig.load(KEYS) == ok(32)


@pytest.mark.parametrize("step", ["bump_epoch", "open"])
def test_a_clear_goes_on_after_whatever_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Not only what a disk may answer: memory or threads may be short just then."""
    with tier_rig(tmp_path) as rig:
        assert rig.store(KEYS) == ok(32)
        path = only_path(rig)
        owner, name = (path.file, step) if step == "bump_epoch" else (path, "_open_engine")
        real, failures = getattr(owner, name), [MemoryError("short"), RuntimeError("short")]

        def failing(*arguments: object) -> object:
            if failures:
                raise failures.pop()
            return real(*arguments)

        monkeypatch.setattr(owner, name, failing)
        assert rig.tier.clear(timeout_s=PATIENCE_S)
        assert not failures
        rig.legal.clear()
        assert rig.hits(KEYS) == 0
        assert rig.store(KEYS, generation=1) == ok(32)
        assert rig.load(KEYS) == ok(32)


@pytest.mark.root
@needs_fuse
def test_a8_a_clear_whose_header_the_disk_loses_is_not_durable(tmp_path: Path) -> None:
    """The disk says that it has written it, and has not: a restart would bring all of it back."""
    clock = Clock()
    with fuse_disk(tmp_path) as disk:
        with tier_rig(disk.mount / "kv", clock=clock) as rig:
            assert rig.store(KEYS) == ok(32)
            disk.faults.set(losses=1)
            assert not rig.tier.clear(timeout_s=0.5)
            assert rig.tier.lookup(KEYS) == 0
            disk.faults.clear()
            rounds_until(rig, clock, lambda: rig.tier.health().status == "ok")
        with tier_rig(disk.mount / "kv") as again:
            assert again.hits(KEYS) == 0


def test_closing_waits_for_a_clear_without_spinning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What engines have to tell stays readable meanwhile, since nobody takes it."""
    rig = TierRig(tmp_path)
    go_on = threading.Event()
    path = only_path(rig)
    real = path.file.bump_epoch

    def slowly(clears: int) -> int:
        assert go_on.wait(PATIENCE_S)
        return real(clears)

    monkeypatch.setattr(path.file, "bump_epoch", slowly)
    rig.submit_store(KEYS)
    rig.tier._worker.clear(rig.tier._scheduler.clear())
    until(lambda: path.engine.wait(1.0))
    looks = 0
    tend = path.tend

    def counted(now_s: float) -> list[int]:
        nonlocal looks
        looks += 1
        return tend(now_s)

    monkeypatch.setattr(path, "tend", counted)
    rig.close(0.3)
    go_on.set()
    assert looks < 10
