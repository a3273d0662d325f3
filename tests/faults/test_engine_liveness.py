"""A18, A23, A24, A29, A31, A33: a hanging, slow or busy disk stalls nobody and leaks nothing."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import freeze, loop_ext4, thaw
from rig import PATIENCE_S, Rig, ok, rig

from kvdisk.config import TierConfig
from kvdisk.errors import KVDiskError
from kvdisk.layout import Layout
from kvdisk.rank_file import RankFile
from kvdisk.transfer import RowStatus, TransferEngine

KIB, MIB = 1 << 10, 1 << 20
BACKENDS = ["uring", "threads"]


@pytest.fixture
def disk_mount(tmp_path: Path) -> Iterator[Path]:
    with loop_ext4(tmp_path) as mount:
        yield mount


def preallocate(path: Path, size_bytes: int) -> Path:
    """Space that a frozen disk need not find first."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    return path


# --- A18: ending with I/O in flight


def test_a18a_dropped_results_still_finish(tmp_path: Path) -> None:
    with rig(tmp_path / "kv", slots=64, slot_bytes=64 * KIB) as disk:
        assert disk.store(range(64)) == ok(64)
        for _ in range(20):
            disk.submit_load(range(64))
            disk.engine.poll()  # whatever it gives is thrown away
            gc.collect()
        statuses = disk.load(range(64))
        assert statuses == ok(64)


def test_a18a_engine_collected_with_loads_in_flight(tmp_path: Path) -> None:
    disk = Rig(tmp_path / "kv", slots=64, slot_bytes=64 * KIB)
    assert disk.store(range(64)) == ok(64)
    disk.submit_load(range(64))
    engine_threads = _engine_threads()
    assert engine_threads
    del disk
    gc.collect()
    assert not _engine_threads()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a18b_close_ends_every_transfer(tmp_path: Path, backend: str) -> None:
    disk = Rig(tmp_path / "kv", slots=64, slot_bytes=64 * KIB, backend=backend)
    assert disk.store(range(64)) == ok(64)
    loads = [disk.submit_load(range(64)) for _ in range(4)]
    assert disk.close() == 0
    assert all(disk.finish(load) for load in loads)
    assert disk.finish(loads[-1]) == ok(64)


@pytest.mark.root
@pytest.mark.parametrize("backend", BACKENDS)
def test_a18c_close_returns_on_a_frozen_disk(disk_mount: Path, backend: str) -> None:
    """In a process of its own: the kernel holds it until the thaw."""
    preallocate(disk_mount / "kv", 8 * 64 * KIB)
    program = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
from pathlib import Path
from rig import Rig
disk = Rig(Path({str(disk_mount)!r}) / "kv", slots=8, slot_bytes=65536, backend={backend!r})
disk.store(range(8))
print("stored", flush=True)
input()
stuck = disk.submit_store(range(8), generation=1)
print(disk.engine.close(1.0), flush=True)
disk.take(disk.engine.poll())
result = disk.results[stuck]
print(set(result.statuses.tolist()), result.quarantined.all(), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "stored\n"
        freeze(disk_mount)
        child.stdin.write("\n")
        child.stdin.flush()
        abandoned, result = child.stdout.readline(), child.stdout.readline()
        frozen_at_the_end = child.poll() is None
        thaw(disk_mount)
    assert frozen_at_the_end, "the disk had thawed before close returned"
    assert int(abandoned) > 0
    assert result == f"{{{int(RowStatus.TIMED_OUT)}}} True\n"
    assert child.returncode == 0


@pytest.mark.parametrize("ending", ["sys.exit(3)", "os.kill(os.getpid(), 15); time.sleep(60)"])
def test_a18d_exit_with_loads_in_flight(tmp_path: Path, ending: str) -> None:
    program = f"""
import os, sys, time; sys.path.insert(0, {os.path.dirname(__file__)!r})
from pathlib import Path
from rig import Rig
disk = Rig(Path({str(tmp_path)!r}) / "kv", slots=64, slot_bytes=65536)
disk.store(range(64))
for _ in range(4): disk.submit_load(range(64))
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == (3 if "exit" in ending else -signal.SIGTERM), done.stderr
    assert done.stderr == ""


def test_a18d_exit_while_a_daemon_thread_waits(tmp_path: Path) -> None:
    """It keeps the engine for ever, which is nothing to tell the user about."""
    program = f"""
import sys, threading; sys.path.insert(0, {os.path.dirname(__file__)!r})
from pathlib import Path
from rig import Rig
disk = Rig(Path({str(tmp_path)!r}) / "kv", slots=64, slot_bytes=65536)
disk.store(range(64))
waits = threading.Event()
def wait():
    while True:
        waits.set()
        disk.engine.wait({PATIENCE_S})
threading.Thread(target=wait, daemon=True).start()
waits.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a18e_submit_after_close(tmp_path: Path) -> None:
    disk = Rig(tmp_path / "kv", slots=2, slot_bytes=16 * KIB)
    disk.close()
    for call in (disk.submit_store, disk.submit_load):
        with pytest.raises(KVDiskError, match="closed"):
            call([0])
    assert disk.engine.close() == 0
    assert disk.engine.poll().finished == []


def test_a18f_stores_finish_though_nobody_polls(tmp_path: Path) -> None:
    disk = Rig(tmp_path / "kv", slots=64, slot_bytes=64 * KIB)
    disk.submit_store(range(64))
    patience = time.monotonic() + PATIENCE_S
    while disk.engine.stats()["rows_stored"] < 64:
        assert time.monotonic() < patience
    disk.close()
    with rig(tmp_path / "kv", slots=64, slot_bytes=64 * KIB) as again:
        assert len(again.engine.take_restored().keys) == 64
        assert again.load(range(64)) == ok(64)


def test_a18_forked_child_leaves_the_engine_alone(tmp_path: Path) -> None:
    """The child has none of the threads: nothing blocks it, and the parent goes on."""
    with rig(tmp_path / "kv", slots=8, slot_bytes=64 * KIB) as disk:
        assert disk.store(range(8)) == ok(8)
        child = os.fork()
        if child == 0:
            verdict = 1
            try:
                for call in (disk.engine.poll, disk.engine.stats, lambda: disk.submit_load([0])):
                    with contextlib.suppress(KVDiskError, RuntimeError):
                        call()
                        os._exit(2)
                verdict = disk.engine.close()
            finally:
                os._exit(verdict)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert disk.load(range(8)) == ok(8)


def test_a18_close_wakes_whoever_waits(tmp_path: Path) -> None:
    disk = Rig(tmp_path / "kv", slots=2, slot_bytes=16 * KIB)
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(disk.engine.wait()))
    waiter.start()
    disk.close()
    waiter.join(PATIENCE_S)
    assert answers == [False]


def test_a18_closed_engine_gives_its_memory_and_files_back(tmp_path: Path) -> None:
    """Although somebody still holds the object, for the last results say."""
    before = len(os.listdir("/proc/self/fd"))
    disk = Rig(tmp_path / "kv", slots=8, slot_bytes=MIB, buffers=64)
    assert disk.store(range(8)) == ok(8)
    disk.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # its eventfd
    assert disk.engine.stats()["rows_stored"] == 8


# --- A23, A24: a disk that hangs or cannot keep up


@pytest.mark.root
@pytest.mark.parametrize("backend", BACKENDS)
def test_a23_frozen_disk_times_out_and_recovers(disk_mount: Path, backend: str) -> None:
    path = preallocate(disk_mount / "kv", 16 * 64 * KIB)
    with rig(path, slots=16, slot_bytes=64 * KIB, backend=backend) as disk:
        assert disk.store(range(16)) == ok(16)
        freeze(disk_mount)
        stuck = disk.submit_store(range(4), generation=1, timeout_s=0.2)
        statuses = disk.finish(stuck)
        assert statuses == [RowStatus.TIMED_OUT] * 4
        assert stuck in disk.source_free
        held = disk.results[stuck].quarantined
        assert disk.engine.stats()["ring_quarantined"] == int(held.sum()) > 0

        # Others go on: reads are not frozen, and a quarantined slot is refused rather than reused.
        assert disk.load(range(8, 16), timeout_s=PATIENCE_S) == ok(8)
        assert disk.store([0], generation=2, timeout_s=0.2) == [RowStatus.BUSY]
        assert disk.load([0], timeout_s=0.2) == [RowStatus.BUSY]

        thaw(disk_mount)
        while len(disk.released) < int(held.sum()):
            assert disk.engine.wait(PATIENCE_S), "a slot stayed in quarantine"
            disk.take(disk.engine.poll())
        stats = disk.engine.stats()
        assert stats["ring_quarantined"] == 0
        assert stats["late_completions"] == int(held.sum())
        assert disk.load([0]) == [RowStatus.MISS]  # nothing late was published
        assert disk.store(range(16), generation=3) == ok(16)
        assert disk.load(range(16), generation=3) == ok(16)


@pytest.mark.root
def test_a24_full_queue_refuses_stores_and_lets_loads_pass(disk_mount: Path) -> None:
    """Nothing can be written for a while, and stores keep coming."""
    path = preallocate(disk_mount / "kv", 32 * 64 * KIB)
    with rig(path, slots=32, slot_bytes=64 * KIB, store_queue_bytes=2 * MIB) as disk:
        assert disk.store(range(32)) == ok(32)
        freeze(disk_mount)
        accepted = []
        for offered in range(200):
            items = [offered % 24]
            stored = disk.engine.submit_store([b"offered-%d" % offered], items, items)
            if stored is not None:
                accepted.append(stored)
        stats = disk.engine.stats()
        assert stats["stores_refused"] == 200 - len(accepted) > 0
        assert stats["store_queue_bytes"] <= 2 * MIB
        assert disk.load(range(24, 32)) == ok(8)

        waiting = accepted[-1]  # behind a full ring: it has not begun
        disk.engine.cancel_waiting(waiting)
        assert disk.finish(waiting) == [RowStatus.REFUSED]

        thaw(disk_mount)
        for stored in accepted:
            assert disk.finish(stored)[0] in (RowStatus.OK, RowStatus.BUSY, RowStatus.REFUSED)
        assert sorted(disk.source_free) == sorted({1, *accepted})
        assert disk.store(range(32), generation=1) == ok(32)


@pytest.mark.root
def test_a24_store_without_a_buffer_in_time_is_refused(disk_mount: Path) -> None:
    path = preallocate(disk_mount / "kv", 32 * 64 * KIB)
    with rig(path, slots=32, slot_bytes=64 * KIB, iodepth=2) as disk:
        freeze(disk_mount)
        filling = disk.submit_store(range(12))
        late = disk.submit_store([20, 21], start_within_s=0.05)
        assert disk.finish(late) == [RowStatus.REFUSED] * 2
        thaw(disk_mount)
        assert disk.finish(filling) == ok(12)


def test_a4_source_is_not_read_before_its_event(tmp_path: Path) -> None:
    ready = os.eventfd(0)
    with rig(tmp_path / "kv", slots=4, slot_bytes=64 * KIB) as disk:
        waiting = disk.engine.submit_store([b"block-0"], [0], [0], event=ready)
        assert not disk.engine.wait(0.05)  # it has not begun, so nothing can have happened
        disk.fill(0, disk.content(b"block-0"))
        os.eventfd_write(ready, 1)
        assert disk.finish(waiting) == ok(1)
        assert disk.load([0]) == ok(1)

        never = os.eventfd(0)
        stuck = disk.engine.submit_store([b"n"], [1], [1], event=never, timeout_s=0.05)
        assert disk.store([2]) == ok(1)  # others pass it by
        assert disk.finish(stuck) == [RowStatus.TIMED_OUT]
        assert disk.engine.stats()["rows_timed_out"] == 1

        broken = disk.engine.submit_store([b"b"], [3], [3], event=1 << 20)
        assert disk.finish(broken) == [RowStatus.COPY_FAILED]
        assert disk.results[broken].errors[0] == errno.EIO  # type: ignore[index]
    os.close(ready)
    os.close(never)


# --- A29: signals


@pytest.mark.parametrize("backend", BACKENDS)
def test_a29_interval_timer_disturbs_nothing(tmp_path: Path, backend: str) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        with rig(tmp_path / "kv", slots=64, slot_bytes=16 * KIB, backend=backend) as disk:
            signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
            for generation in range(16):  # 2,048 operations
                assert disk.store(range(64), generation) == ok(64)
                assert disk.load(range(64), generation) == ok(64)
            assert disk.engine.stats()["rows_loaded"] == 16 * 64
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- A31, A33: cost


@pytest.mark.cost
def test_a31_ring_costs_what_was_asked(tmp_path: Path) -> None:
    """An odd size just above a power of two; resident memory follows it within 2 %."""
    asked_bytes = 133 * MIB
    config = TierConfig(
        paths=(tmp_path,), capacity_bytes=64 * MIB, ring_bytes=asked_bytes, merge_bytes=64 * KIB
    )
    with RankFile.create_or_open(tmp_path / "kv", 0, 1, 16, 64 * KIB, bytes(32)) as files:
        layout = Layout.from_tensors(_zeros(16, 64 * KIB))
        before_bytes = _resident_bytes()
        engine = TransferEngine.open(layout, files, config)
        grown_bytes = _resident_bytes() - before_bytes
        assert asked_bytes * 0.98 <= engine.stats()["pinned_bytes"] <= asked_bytes * 1.02
        assert grown_bytes <= asked_bytes * 1.02 + 4 * MIB  # the engine's own tables and stacks
        engine.close()
        del engine
        gc.collect()
        assert _resident_bytes() - before_bytes <= 4 * MIB


@pytest.mark.cost
@pytest.mark.parametrize("backend", BACKENDS)
def test_a33_idle_engine_sleeps(tmp_path: Path, backend: str) -> None:
    """Nothing polls: over an idle second the engine's threads are not scheduled at all."""
    with rig(tmp_path / "kv", slots=8, slot_bytes=64 * KIB, backend=backend) as disk:
        assert disk.store(range(8)) == ok(8)
        assert disk.load(range(8)) == ok(8)
        before, until = -1, time.monotonic() + PATIENCE_S
        while before != _switches():  # what they still had to do
            if time.monotonic() > until:
                pytest.fail("the engine's threads are scheduled again and again while it is idle")
            before = _switches()
            time.sleep(0.1)
        time.sleep(1.0)
        assert _switches() - before <= 2


def test_events_wake_a_selector(tmp_path: Path) -> None:
    with rig(tmp_path / "kv", slots=8, slot_bytes=64 * KIB) as disk:
        storing = disk.submit_store(range(8))
        while storing not in disk.results:
            assert select.select([disk.engine], [], [], PATIENCE_S)[0]
            disk.take(disk.engine.poll())
        assert select.select([disk.engine], [], [], 0)[0] == []


def _zeros(blocks: int, block_bytes: int) -> object:
    import numpy as np

    return np.zeros((blocks, block_bytes), dtype=np.uint8)


def _engine_threads() -> list[int]:
    """Ids of this process's threads that the engine has started."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("kvdisk"):
            found.append(int(task.name))
    return found


def _switches() -> int:
    """How often the engine's threads have been scheduled."""
    total = 0
    for thread in _engine_threads():
        for line in Path(f"/proc/self/task/{thread}/status").read_text().splitlines():
            if "ctxt_switches" in line:
                total += int(line.split()[1])
    return total


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
