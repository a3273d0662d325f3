"""A23, A24, A25: disks that do not answer or cannot keep up; a kernel that refuses io_uring.

Every transfer ends in its time, nobody waits for a disk, and a disk that comes back is used again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvdisk.messages import PathState
from kvdisk.transfer import RowStatus
from tests.faults.disks import freeze, loop_ext4, thaw
from tests.faults.fuse_disk import fuse_disk, needs_fuse
from tests.tier.tier_rig import MIB, TierRig, keys_of, ok, tier_rig
from tests.tier.waiting import Clock, rounds_until

ROOT = Path(__file__).resolve().parents[2]
OK = RowStatus.OK
KEYS = keys_of(range(32))
MORE = keys_of(range(100, 132))


# --- A23: a disk that does not answer, beside one that does


@pytest.mark.root
@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_a23_one_of_two_disks_hangs_and_the_rest_goes_on(tmp_path: Path, backend: str) -> None:
    clock = Clock()
    with (
        loop_ext4(tmp_path) as mount,
        tier_rig(
            tmp_path / "well",
            mount / "kv",
            clock=clock,
            slots=64,
            backend=backend,
            store_deadline_ns=2_000_000_000,  # the disk that is well keeps to it on a busy machine
            load_deadline_ns=20_000_000_000,
        ) as rig,
    ):
        keys = keys_of(range(128))
        assert rig.store(keys[:64]) == ok(64)
        freeze(mount)
        began = time.monotonic()
        statuses = rig.store(keys[64:])
        assert time.monotonic() - began < 20
        assert set(statuses) == {OK, RowStatus.TIMED_OUT}
        held = rig.tier.stats().slots.quarantined
        assert held > 0
        rig.wait_until(lambda: rig.tier.health().status == "degraded")
        state = rig.tier.health().paths
        assert state[0].stores
        assert not state[1].stores
        assert "deadline" in state[1].reason

        # What was stored on either disk is served (reads are not frozen) or is a miss at once; new
        # stores go to the disk that is well, and nothing runs into a deadline any more.
        assert rig.tier.lookup(keys[:64]) > 0
        before = rig.tier.stats().counters.refusals["timed_out"]
        for first in range(200, 500, 10):
            assert set(rig.store(keys_of(range(first, first + 10)))) <= {OK, RowStatus.REFUSED}
        assert rig.store(keys_of(range(600, 610))) == ok(10)
        assert rig.tier.stats().counters.refusals["timed_out"] == before
        assert OK in rig.load(keys_of(range(600, 610)))

        thaw(mount)
        rounds_until(rig, clock, lambda: rig.tier.health().status == "ok")
        rounds_until(rig, clock, lambda: rig.tier.stats().slots.quarantined == 0)
        assert rig.store(keys_of(range(700, 764))) == ok(64)
        assert rig.load(keys_of(range(700, 764))) == ok(64)


@pytest.mark.root
def test_a23_close_returns_from_a_disk_that_hangs(tmp_path: Path) -> None:
    with loop_ext4(tmp_path) as mount:
        rig = TierRig(mount / "kv")
        assert rig.store(KEYS) == ok(32)
        freeze(mount)
        stuck = rig.submit_store(MORE)
        began = time.monotonic()
        abandoned = rig.close(0.5)
        assert time.monotonic() - began < 10
        assert abandoned > 0
        assert set(rig.results[stuck].statuses) <= {RowStatus.TIMED_OUT, RowStatus.REFUSED}
        assert stuck in rig.source_free
        thaw(mount)


@pytest.mark.root
def test_a23_a_clear_on_a_frozen_disk_waits_no_longer_than_told(tmp_path: Path) -> None:
    clock = Clock()
    with loop_ext4(tmp_path) as mount, tier_rig(mount / "kv", clock=clock) as rig:
        assert rig.store(KEYS) == ok(32)
        freeze(mount)
        began = time.monotonic()
        assert not rig.tier.clear(timeout_s=0.3), "not durable yet"
        assert time.monotonic() - began < 10
        assert rig.tier.lookup(KEYS) == 0, "but nothing older is found"
        assert set(rig.store(MORE)) == {RowStatus.REFUSED}
        thaw(mount)
        rounds_until(rig, clock, lambda: rig.tier.health().status == "ok")
        rig.legal.clear()
        assert rig.hits(KEYS) == 0
        assert rig.store(KEYS, generation=1) == ok(32)
        assert rig.load(KEYS) == ok(32)


@pytest.mark.root
def test_a23_close_returns_although_a_clear_hangs(tmp_path: Path) -> None:
    with loop_ext4(tmp_path) as mount:
        rig = TierRig(mount / "kv")
        assert rig.store(KEYS) == ok(32)
        freeze(mount)
        stuck = rig.submit_store(MORE)
        assert not rig.tier.clear(timeout_s=0.2)
        began = time.monotonic()
        assert rig.close(0.3) > 0
        assert time.monotonic() - began < 10
        assert set(rig.results[stuck].statuses) <= {RowStatus.TIMED_OUT, RowStatus.REFUSED}
        assert stuck in rig.source_free
        thaw(mount)


@pytest.mark.root
@needs_fuse
def test_a23_reads_that_hang_are_misses_in_time_and_come_back(tmp_path: Path) -> None:
    """No frozen file system holds up reads; this disk does, and its writes go on."""
    clock = Clock()
    with (
        fuse_disk(tmp_path) as disk,
        tier_rig(
            tmp_path / "well",
            disk.mount / "kv",
            clock=clock,
            block_bytes=64 << 10,
            load_deadline_ns=300_000_000,
        ) as rig,
    ):
        keys = keys_of(range(96))
        assert rig.store(keys) == ok(96)
        on_disk = rig.tier._scheduler.placement.path_of(rig.tier._scheduler._allocator.find(keys))
        disk.faults.set(read_hangs=1)
        statuses = rig.load(keys)
        for status, path in zip(statuses, on_disk.tolist(), strict=True):
            assert status == (RowStatus.TIMED_OUT if path else OK)
        rig.wait_until(lambda: rig.tier.health().status == "degraded")
        assert rig.tier.health().paths[0] == PathState()
        assert not rig.tier.health().paths[1].loads
        assert rig.tier.stats().slots.pinned == np.count_nonzero(on_disk)
        assert rig.tier.stats().engine_sum("ring_quarantined") > 0, "reads may still arrive there"

        # Nobody waits for that disk any more, and what is stored goes to the other one.
        timed_out = rig.tier.stats().counters.misses["timed_out"]
        assert set(rig.load(keys)) <= {OK, RowStatus.MISS, RowStatus.REFUSED}
        assert rig.tier.stats().counters.misses["timed_out"] == timed_out
        assert rig.store(MORE) == ok(32)
        assert rig.load(MORE) == ok(32)

        disk.faults.clear()
        rounds_until(rig, clock, lambda: rig.tier.health().status == "ok")
        rounds_until(rig, clock, lambda: rig.tier.stats().slots.pinned == 0)
        assert rig.store(keys) == ok(96)
        assert rig.load(keys) == ok(96)


@pytest.mark.root
@needs_fuse
def test_a23_a_load_may_have_a_deadline_of_its_own(tmp_path: Path) -> None:
    with (
        fuse_disk(tmp_path) as disk,
        tier_rig(disk.mount / "kv", clock=Clock(), load_deadline_ns=3600 * 10**9) as rig,
    ):
        assert rig.store(KEYS) == ok(32)
        disk.faults.set(read_hangs=1)
        assert set(rig.load(KEYS, within_s=0.2)) == {RowStatus.TIMED_OUT}
        disk.faults.clear()
        rig.wait_until(lambda: rig.tier.stats().slots.pinned == 0)


@pytest.mark.root
@needs_fuse
def test_a23_who_waits_looks_now_and_then_after_threads_that_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by an attack: an engine's thread that hung in a submission woke nobody who waited, so
    that a load of two seconds ended when the wait did.
    """
    with (
        fuse_disk(tmp_path) as disk,
        tier_rig(disk.mount / "kv", clock=Clock(), load_deadline_ns=300_000_000) as rig,
    ):
        assert rig.store(KEYS) == ok(32)
        disk.faults.set(read_hangs=1)
        rig.submit_load(KEYS)
        silent = SimpleNamespace(poll=lambda within_s: time.sleep(within_s))
        with monkeypatch.context() as patch:
            patch.setattr(rig.tier._worker, "_selector", silent)
            assert rig.tier.wait(10), "nobody has told, and the load has ended"
        disk.faults.clear()
        rig.wait_until(lambda: rig.tier.stats().slots.pinned == 0)


@pytest.mark.root
@needs_fuse
@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_a23_a_disk_whose_server_stops_holds_up_nobody(tmp_path: Path, backend: str) -> None:
    """SIGSTOP of the process behind a file system: reads, writes and names all hang."""
    clock = Clock()
    with fuse_disk(tmp_path) as disk:
        rig = TierRig(
            disk.mount / "kv",
            clock=clock,
            backend=backend,
            load_deadline_ns=200_000_000,
            store_deadline_ns=200_000_000,
        )
        assert rig.store(KEYS) == ok(32)
        disk.stop()
        assert set(rig.load(KEYS)) == {RowStatus.TIMED_OUT}
        assert OK not in rig.store(MORE)
        rig.wait_until(lambda: rig.tier.health().status == "down")
        assert rig.tier.lookup(KEYS) == 0
        disk.go_on()
        rounds_until(rig, clock, lambda: rig.tier.health().status == "ok")
        rounds_until(rig, clock, lambda: rig.tier.stats().slots.quarantined == 0)
        assert rig.store(KEYS) == ok(32)
        assert rig.load(KEYS) == ok(32)
        disk.stop()
        stuck = rig.submit_load(KEYS)
        assert rig.close(0.3) > 0
        assert set(rig.results[stuck].statuses) == {RowStatus.TIMED_OUT}


# --- A24, A25: a disk that cannot keep up; a kernel that refuses io_uring


@pytest.mark.root
def test_a24_stores_offered_to_a_silent_disk_are_bounded_and_dropped(tmp_path: Path) -> None:
    """Ten times what the queue holds: no call waits, the surplus is counted, loads pass by."""
    with (
        loop_ext4(tmp_path) as mount,
        tier_rig(
            mount / "kv",
            slots=1024,  # as many as are offered before anything is told
            blocks=64,
            store_queue_bytes=MIB,
            store_wait_ns=100_000_000,
        ) as rig,
    ):
        assert rig.store(KEYS) == ok(32)
        freeze(mount)
        offered = [
            rig.tier.store(keys_of(range(1000 + 8 * n, 1008 + 8 * n)), range(8)) for n in range(100)
        ]
        assert rig.tier.stats().engine_sum("store_queue_bytes") <= MIB
        assert rig.load(KEYS) == ok(32)
        rig.wait_until(lambda: rig.tier.stats().counters.refusals["queue"] > 400)
        thaw(mount)
        for transfer_id in offered:
            rig.finish(transfer_id)
        assert rig.source_free >= set(offered)
        rig.wait_until(lambda: rig.tier.health().status == "ok")
        assert rig.store(MORE) == ok(32)
        assert rig.load([*KEYS, *MORE]) == ok(64)


@pytest.mark.parametrize("number", ["EPERM", "ENOSYS"])
def test_a25_without_io_uring_all_is_the_same(tmp_path: Path, number: str) -> None:
    program = f"""
from pathlib import Path
from tests.faults.fuse_disk import fuse_disk, needs_fuse
from tests.tier.tier_rig import TierRig, keys_of, ok
rig = TierRig(Path({str(tmp_path)!r}))
assert rig.store(keys_of(range(32))) == ok(32)
assert rig.load(keys_of(range(32))) == ok(32)
facts = rig.tier.health().facts
print(facts["backend"], facts["backend_reason"])
rig.close()
"""
    seccomp = [sys.executable, "tests/faults/seccomp.py", "--syscall", "io_uring_setup"]
    done = subprocess.run(
        [*seccomp, "--errno", number, "--", sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("threads")
    assert len(done.stdout.split()) > 3, "it says why"
    with tier_rig(tmp_path, legal={key: {0} for key in KEYS}) as rig:
        assert rig.load(KEYS) == ok(32)
