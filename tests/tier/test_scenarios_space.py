"""A6, A12, A20, A21, A22, A28: disks that fill up, files that vanish, writes that fail.

Real file systems, small ones. Whatever the disk does, a load is right or a miss, nothing leaks, and
what was lost comes back into service once the disk does.
"""

from __future__ import annotations

import errno
import logging
import os
import random
from pathlib import Path

import pytest

from kvdisk.config import TierConfig
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.transfer import RowStatus
from tests.faults.disks import file_size_limit, loop_disk, tmpfs
from tests.faults.fuse_disk import fuse_disk, needs_fuse
from tests.tier.tier_rig import KIB, MIB, TierRig, keys_of, ok, tier_rig
from tests.tier.waiting import Clock, rounds_until

OK = RowStatus.OK
KEYS = keys_of(range(32))
MORE = keys_of(range(100, 132))


def used_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


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
        with pytest.raises(DeviceError, match=r"64\.13 MiB more needed.*free") as caught:
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


@pytest.mark.root
@pytest.mark.parametrize("file_system", ["ext4", "xfs"])
def test_a28_a_cache_opens_again_and_grows_where_less_is_free_than_it_has(
    tmp_path: Path, file_system: str
) -> None:
    """xfs wants room for all of a range that is reserved, whatever of it is there already."""
    with loop_disk(tmp_path, file_system, 340) as disk:
        with tier_rig(disk.mount / "kv", slots=512, block_bytes=64 * KIB) as rig:
            assert rig.store(KEYS) == ok(32)
        space = os.statvfs(disk.mount)
        with (disk.mount / "tenant").open("wb") as tenant:
            free_bytes = space.f_bavail * space.f_frsize
            os.posix_fallocate(tenant.fileno(), 0, free_bytes - 16 * MIB)
        for slots in (512, 640, 512):
            options = {"block_bytes": 64 * KIB, "legal": rig.legal}
            with tier_rig(disk.mount / "kv", slots=slots, **options) as rig:
                assert rig.load(KEYS) == ok(32)


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


@pytest.mark.root
@needs_fuse
def test_a28_a_quota_that_is_used_up_stops_stores_until_there_is_room(tmp_path: Path) -> None:
    clock = Clock()
    with fuse_disk(tmp_path) as disk, tier_rig(disk.mount / "kv", clock=clock) as rig:
        assert rig.store(KEYS) == ok(32)
        disk.faults.set(write_error=errno.EDQUOT)
        for _ in range(5):
            assert set(rig.store(MORE)) <= {RowStatus.FAILED, RowStatus.REFUSED}
        assert "EDQUOT" in rig.tier.health().paths[0].reason
        assert rig.load(KEYS) == ok(32)
        assert not rig.tier.readable(MORE).any()
        disk.faults.clear()
        rounds_until(rig, clock, lambda: rig.tier.health().status == "ok")
        assert rig.store(MORE) == ok(32)
        assert rig.load([*KEYS, *MORE]) == ok(64)
        assert rig.tier.stats().counters.errors["store", "EDQUOT"] > 0


@pytest.mark.root
@needs_fuse
def test_a28_a_quota_that_is_too_small_is_said_at_the_start(tmp_path: Path) -> None:
    with fuse_disk(tmp_path) as disk:
        disk.faults.set(write_error=errno.EDQUOT)
        with pytest.raises(DeviceError, match="quota") as caught:
            TierRig(disk.mount / "kv")
        assert caught.value.errno == errno.EDQUOT
        disk.faults.clear()
        with tier_rig(disk.mount / "kv") as rig:
            assert rig.store(KEYS) == ok(32)


# --- A6: a part of a block


def test_a6_a_block_of_which_only_a_part_was_written_is_never_published(tmp_path: Path) -> None:
    """The write of the last slot ends early, wherever: its key is not there, now or later."""
    block_bytes, slots = 16 * KIB, 64
    keys = keys_of(range(slots))
    for cut_bytes in (0, 512, 4 * KIB, 8 * KIB, 12 * KIB, block_bytes - 512):
        root = tmp_path / str(cut_bytes)
        with tier_rig(root, slots=slots, block_bytes=block_bytes) as rig:
            with file_size_limit((slots - 1) * block_bytes + cut_bytes):
                statuses = rig.store(keys)
            assert sorted(statuses) == [*ok(slots - 1), RowStatus.FAILED]
            short = keys[statuses.index(RowStatus.FAILED)]
            whole = [key for key in keys if key != short]
            assert rig.tier.lookup([short]) == 0
            assert rig.load([short]) == [RowStatus.MISS]
            assert rig.load(whole) == ok(slots - 1)
        with tier_rig(root, slots=slots, block_bytes=block_bytes, legal=rig.legal) as again:
            assert again.tier.lookup([short]) == 0
            assert again.tier.stats().counters.restored == slots - 1
            assert again.load(whole) == ok(slots - 1)


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
        while moved["load"] < 4000 or rig.tier.stats().slots.evicted <= 500:
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
        assert stats.slots.pinned == 0
        assert stats.counters.misses["corrupt"] == stats.counters.misses["lost"] == 0
