"""A30, A36: disks that die or turn read-only, and how an operator gets to know.

What can be served is served, the rest are misses, and the log says why without repeating itself.
"""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

from kvdisk.errors import DeviceError
from kvdisk.transfer import RowStatus
from tests.faults.disks import file_size_limit, loop_disk, tmpfs
from tests.tier.tier_rig import KIB, TierRig, config_of, keys_of, ok, tier_rig
from tests.tier.waiting import Clock

OK = RowStatus.OK
KEYS = keys_of(range(32))
MORE = keys_of(range(100, 132))


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
