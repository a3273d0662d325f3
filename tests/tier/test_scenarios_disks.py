"""A20, A21, A22, A23, A28, A30, A36: disks that fill up, hang, fail, turn read-only or lie still.

Real file systems, small ones. Whatever the disk does, a load is right or a miss, every transfer
ends, and what was lost comes back into service once the disk does.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdisk.config import TierConfig
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.transfer import RowStatus
from tests.faults.disks import file_size_limit, freeze, loop_disk, loop_ext4, thaw, tmpfs
from tests.tier.tier_rig import KIB, MIB, TierRig, config_of, keys_of, ok, tier_rig

ROOT = Path(__file__).resolve().parents[2]
OK = RowStatus.OK
KEYS = keys_of(range(32))
MORE = keys_of(range(100, 132))


class Clock:
    """Real time that can be moved on, so that nobody waits for a probe to be due."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def used_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def rounds_until(rig: TierRig, clock: Clock, true: Callable[[], bool]) -> None:
    """Poll, moving on so that probes are due, until ``true()``."""

    def moved_on() -> bool:
        clock.ahead_s += 1.0
        return true()

    rig.wait_until(moved_on)


# --- A20: space


def test_a20_the_limit_holds_while_storing_and_after_it_was_halved(tmp_path: Path) -> None:
    """Data, records and everything else that is made stay below the limit and some pages."""
    slack_bytes = 64 * KIB  # kvdisk.json, directories
    full = {"slots": 128, "block_bytes": 32 * KIB}
    with tier_rig(tmp_path, **full) as rig:
        limit_bytes = rig.config.capacity_bytes
        for first in range(0, 2048, 64):
            assert set(rig.store(keys_of(range(first, first + 64)))) == {OK}
            assert used_bytes(tmp_path) <= limit_bytes + slack_bytes
        assert rig.tier.stats().slots.evicted >= 2048 - 128
        assert rig.hits(keys_of(range(2048))) == rig.tier.stats().slots.resident
    half = {**full, "slots": 64, "blocks": 128}
    with tier_rig(tmp_path, legal=rig.legal, **half) as rig:
        assert used_bytes(tmp_path) <= rig.config.capacity_bytes + slack_bytes
        assert rig.tier.stats().slots.total == 64
        assert 0 < rig.hits(keys_of(range(2048))) <= 64


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capacty": "1GiB"}, "capacity"),
        ({"capacity": "1 gigabyte"}, "capacity"),
        ({"capacity": "0"}, "capacity"),
        ({"capacity": "64MiB", "iodpeth": 4}, "iodepth"),
    ],
)
def test_a20_misspelt_options_and_units_are_errors(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        TierConfig.from_mapping({"path": str(tmp_path), **options})


def test_a20_effective_settings_are_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvdisk"), tier_rig(tmp_path):
        (line,) = [text for text in caplog.messages if "blocks recovered" in text]
    for word in (str(tmp_path), "64 slots of 16.00 KiB", "uring", "0 blocks recovered"):
        assert word in line


# --- A28: promised space


@pytest.mark.root
def test_a28_a_cache_beyond_the_disk_is_refused_with_numbers(tmp_path: Path) -> None:
    with tmpfs(tmp_path, size_mib=8) as mount:
        with pytest.raises(DeviceError, match=r"64\.00 MiB more needed.*free") as caught:
            TierRig(mount, slots=1024, block_bytes=64 * KIB)
        assert caught.value.errno == errno.ENOSPC
        assert used_bytes(mount) <= 64 * KIB, "what was taken is given back"
        with tier_rig(mount, slots=64, block_bytes=64 * KIB) as rig:
            assert rig.store(KEYS) == ok(32)


@pytest.mark.root
def test_a28_another_tenant_fills_the_disk_after_the_start(tmp_path: Path) -> None:
    with (
        tmpfs(tmp_path, size_mib=8) as mount,
        tier_rig(mount, slots=64, block_bytes=64 * KIB) as rig,
    ):
        assert rig.store(KEYS) == ok(32)
        with pytest.raises(OSError, match="No space"):
            (mount / "tenant").write_bytes(bytes(16 * MIB))
        for _ in range(3):
            assert rig.store(MORE) == ok(32)
            assert rig.load([*KEYS, *MORE]) == ok(64)
            rig.tier.drop(MORE)
        assert rig.tier.health().status == "ok"


def test_a28_stores_stop_and_come_back_while_loads_go_on(tmp_path: Path) -> None:
    """No byte can be written for a while, as with a quota; then it can."""
    clock = Clock()
    with tier_rig(tmp_path, clock=clock, slots=64, block_bytes=64 * KIB) as rig:
        assert rig.store(KEYS) == ok(32)
        with file_size_limit(0):
            refused = 0
            for _ in range(10):
                statuses = set(rig.store(MORE))
                assert statuses <= {RowStatus.FAILED, RowStatus.REFUSED}
                refused += statuses == {RowStatus.REFUSED}
            assert refused >= 5, "stores go on against a disk that takes none"
            assert rig.tier.health().status == "degraded"
            assert "EFBIG" in rig.tier.health().paths[0].reason
            assert not rig.tier.readable(MORE).any(), "no listed key without data"
            assert rig.load(KEYS) == ok(32)
            clock.ahead_s += 5  # a probe is due, and fails
            rig.wait_until(lambda: rig.tier.health().status == "degraded")
            assert set(rig.store(MORE)) <= {RowStatus.FAILED, RowStatus.REFUSED}
        rounds_until(rig, clock, lambda: rig.tier.health().status == "ok")
        assert rig.store(MORE) == ok(32)
        assert rig.load([*KEYS, *MORE]) == ok(64)
        assert rig.tier.stats().counters.errors["store", "EFBIG"] > 0
        assert rig.tier.stats().slots.quarantined == 0


def test_a28_records_that_cannot_be_written_make_no_block(tmp_path: Path) -> None:
    """The data file takes the block, the record file (it is smaller) ends before its record."""
    with tier_rig(tmp_path, slots=64, block_bytes=16 * KIB) as rig:
        record_file = rig.record_files[0]
        assert rig.store(KEYS) == ok(32)
        size_bytes = record_file.stat().st_size
        os.truncate(record_file, 4096)
        with file_size_limit(4096):
            statuses = rig.store(MORE)
        assert OK not in statuses
        assert not rig.tier.readable(MORE).any()
        assert rig.load(KEYS) == ok(32)
        os.truncate(record_file, size_bytes)


# --- A21: failing I/O gives everything back


def test_a21_a_hundred_failing_stores_leak_nothing(tmp_path: Path) -> None:
    clock = Clock()
    with tier_rig(tmp_path, clock=clock, ring_bytes=MIB, block_bytes=64 * KIB) as rig:
        free = rig.tier.stats().engine_sum("ring_free")
        with file_size_limit(0):
            for round_ in range(100):
                clock.ahead_s += 60
                statuses = rig.store(keys_of(range(8)))
                assert OK not in statuses
                assert rig.tier.stats().engine_sum("ring_free") == free, round_
                slots = rig.tier.stats().slots
                assert slots.free + slots.withheld == 64
        rounds_until(rig, clock, lambda: rig.tier.health().status == "ok")
        assert rig.tier.stats().slots.free == 64
        for first in range(0, 800, 8):
            keys = keys_of(range(first, first + 8))
            assert rig.store(keys) == ok(8)
            assert rig.load(keys) == ok(8)


# --- A22: a load that fails is not tried for ever


@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_a22_bytes_removed_behind_a_key_cost_one_load(tmp_path: Path, backend: str) -> None:
    with tier_rig(tmp_path, backend=backend) as rig:
        assert rig.store(KEYS) == ok(32)
        size_bytes = rig.data_files[0].stat().st_size
        os.truncate(rig.data_files[0], 0)
        tried = 0
        for _ in range(50):
            found = rig.tier.lookup(KEYS[:1])
            if not found:
                break
            tried += 1
            assert rig.load(KEYS[:1]) != ok(1)
        assert tried == 1
        assert rig.load(KEYS[:1]) == [RowStatus.MISS]
        os.truncate(rig.data_files[0], size_bytes)
        rig.tier.drop(KEYS)
        assert rig.store(KEYS, generation=1) == ok(32)
        assert rig.load(KEYS) == ok(32)


def test_a12_the_file_is_deleted_from_outside(tmp_path: Path) -> None:
    """The open file is still ours: nobody notices, and the next start is cold."""
    with tier_rig(tmp_path) as rig:
        assert rig.store(KEYS) == ok(32)
        for path in (*rig.data_files, *rig.record_files):
            path.unlink()
        assert rig.load(KEYS) == ok(32)
        assert rig.store(MORE) == ok(32)
        assert rig.load([*KEYS, *MORE]) == ok(64)
    with tier_rig(tmp_path) as again:
        assert again.hits([*KEYS, *MORE]) == 0
        assert again.store(KEYS) == ok(32)


@pytest.mark.slow
@pytest.mark.parametrize("eviction", ["lru", "s3fifo"])
def test_a12_readers_and_writers_of_more_keys_than_fit(tmp_path: Path, eviction: str) -> None:
    """64 slots, 200 keys, 8 readers and 4 writers at a time: right bytes or a miss, always."""
    chooser = random.Random(12)
    keys = keys_of(range(200))
    lanes: dict[int, int] = {}  # by transfer
    moved = {"load": 0, "store": 0}
    with tier_rig(
        tmp_path, blocks=12 * 4, slots=64, block_bytes=32 * KIB, eviction=eviction
    ) as rig:
        while moved["load"] < 4000:
            for lane in set(range(12)) - set(lanes.values()):
                chosen = chooser.sample(keys, chooser.randrange(1, 5))
                kind = "load" if lane < 8 else "store"
                submit = rig.submit_load if kind == "load" else rig.submit_store
                lanes[submit(chosen, first_block=4 * lane)] = lane
                moved[kind] += 1
            rig.tier.wait(1.0)
            rig.poll()
            for transfer_id in [each for each in lanes if each in rig.results]:
                del lanes[transfer_id]
        rig.finish_all()
        stats = rig.tier.stats()
        assert stats.counters.blocks_loaded > 500
        assert stats.slots.evicted > 500
        assert stats.slots.pinned == 0
        assert stats.counters.misses["corrupt"] == stats.counters.misses["lost"] == 0


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
            store_deadline_ns=300_000_000,
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


# --- A30: a disk that turns bad or read-only


@pytest.mark.root
def test_a30_read_only_in_service_serves_loads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with loop_disk(tmp_path) as disk:
        subprocess.run(["mount", "-o", "remount,errors=remount-ro", str(disk.mount)], check=True)
        clock = Clock()
        with tier_rig(disk.mount / "kv", clock=clock) as rig:
            assert rig.store(KEYS) == ok(32)
            trigger = Path("/sys/fs/ext4") / Path(disk.loop).name / "trigger_fs_error"
            if not trigger.exists():
                pytest.skip("this kernel cannot be told to find an error")
            trigger.write_text("test")
            caplog.clear()
            for _ in range(10):
                statuses = set(rig.store(MORE))
                assert OK not in statuses
            assert rig.load(KEYS) == ok(32)
            health = rig.tier.health()
            assert health.status == "degraded"
            assert health.paths[0].loads
            assert "EROFS" in health.paths[0].reason
            told = [text for text in caplog.messages if "EROFS" in text]
            assert 1 <= len(told) <= 2, told
            assert set(rig.tier.stats().counters.errors) == {("store", "EROFS")}


@pytest.mark.root
def test_a30_a_disk_that_is_gone_makes_everything_a_miss(tmp_path: Path) -> None:
    with loop_disk(tmp_path) as disk, tier_rig(disk.mount / "kv", clock=Clock()) as rig:
        assert rig.store(KEYS) == ok(32)
        disk.cut_power()
        for first in range(0, 32, 8):
            assert OK not in rig.load(KEYS[first : first + 8])
            assert OK not in rig.store(MORE)
        assert rig.tier.lookup(KEYS) == 0
        assert rig.tier.health().status == "down"
        assert "EIO" in rig.tier.health().paths[0].reason


@pytest.mark.root
def test_a30_one_of_two_disks_dies(tmp_path: Path) -> None:
    clock = Clock()
    with (
        loop_disk(tmp_path) as disk,
        tier_rig(tmp_path / "well", disk.mount / "kv", clock=clock) as rig,
    ):
        keys = keys_of(range(96))
        assert rig.store(keys) == ok(96)
        placement = rig.tier._scheduler.placement
        on_dead = placement.path_of(rig.tier._scheduler._allocator.find(keys)) == 1
        assert 0 < on_dead.sum() < 96
        disk.cut_power()
        statuses = rig.load(keys)
        for status, dead in zip(statuses, on_dead.tolist(), strict=True):
            assert (status is OK) == (not dead)
        for round_ in range(20):
            rig.store(keys_of(range(1000 + 10 * round_, 1010 + 10 * round_)))
        assert rig.tier.health().status == "degraded"
        assert rig.store(keys_of(range(2000, 2010))) == ok(10)
        assert rig.load(keys_of(range(2000, 2010))) == ok(10)


@pytest.mark.root
def test_a30_a_root_that_cannot_be_written_fails_at_start_and_says_why(tmp_path: Path) -> None:
    with tmpfs(tmp_path, size_mib=16) as mount:
        with tier_rig(mount / "kv") as rig:
            assert rig.store(KEYS) == ok(32)
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        with pytest.raises(DeviceError, match="Read-only") as caught:
            TierRig(mount / "kv")
        assert caught.value.errno == errno.EROFS
        # With another path that works, that one is left out.
        with tier_rig(tmp_path / "well", mount / "kv") as rig:
            assert rig.tier.health().status == "degraded"
            assert OK in rig.store(KEYS)


# --- A36: dead, and nobody can tell


def test_a36_a_root_where_every_write_fails_is_noticed_at_the_start(tmp_path: Path) -> None:
    with file_size_limit(0), pytest.raises(DeviceError, match=r"ulimit|large|EFBIG") as caught:
        TierRig(tmp_path)
    assert caught.value.errno == errno.EFBIG


def test_a36_failures_are_told_with_errno_and_place_and_not_too_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with tier_rig(tmp_path, clock=clock) as rig, file_size_limit(0):
        for _ in range(57):
            rig.store(MORE)
        told = [text for text in caplog.messages if "EFBIG" in text]
        assert 1 <= len(told) < 10
        assert str(rig.data_files[0]) in told[0]
        assert "offset" in told[0]
        counters = rig.tier.stats().counters
        assert counters.errors["store", "EFBIG"] == counters.refusals["failed"]
        assert counters.refusals.total() == 57 * 32
        assert rig.tier.health().status != "ok"


def test_a36_much_stored_and_nothing_ever_found_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tier_rig(tmp_path, slots=1024, block_bytes=4 * KIB) as rig:
        assert rig.store(keys_of(range(1024))) == ok(1024)
        for first in range(10_000, 13_000, 100):
            assert rig.tier.lookup(keys_of(range(first, first + 100))) == 0
        told = [text for text in caplog.messages if "not one was found" in text]
        assert len(told) == 1


def test_a36_full_and_idle_are_two_things(tmp_path: Path) -> None:
    with tier_rig(tmp_path) as rig:
        assert rig.store(keys_of(range(64))) == ok(64)
        stats = rig.tier.stats()
        assert stats.slots.resident == stats.slots.total == 64
        assert stats.open_transfers == stats.slots.storing == stats.slots.pinned == 0
        assert stats.bytes_stored == 64 * 16 * KIB
        assert stats.bytes_loaded == 0
        rig.load(KEYS)
        stats = rig.tier.stats()
        assert stats.bytes_loaded == 32 * 16 * KIB
        assert stats.counters.misses.total() == 0


def test_a_configuration_has_room_for_exactly_as_many_slots_as_tests_ask(tmp_path: Path) -> None:
    with tier_rig(tmp_path, slots=77) as rig:
        assert rig.tier.stats().slots.total == 77
        assert rig.config == config_of([tmp_path], 77, 16 * KIB)
