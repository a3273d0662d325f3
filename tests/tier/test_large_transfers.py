"""Transfers of more than the queue or the ring holds: a long prompt's blocks come all at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvdisk.transfer import Direction, RowStatus
from tests.faults.rig import rig
from tests.tier.tier_rig import KIB, keys_of, ok, tier_rig

MIB = 1024 * KIB


def test_a_store_beyond_the_queue_keeps_its_head(tmp_path: Path) -> None:
    """The tail of a prefix is worth nothing without its head, the head much without its tail."""
    keys = keys_of(range(64))
    with tier_rig(tmp_path / "kv", block_bytes=64 * KIB, store_queue_bytes=MIB) as rig:
        assert rig.store(keys) == ok(16) + [RowStatus.REFUSED] * 48
        assert rig.hits(keys) == 16
        assert rig.tier.stats().counters.refusals["queue"] == 48
        assert rig.store(keys) == ok(32) + [RowStatus.REFUSED] * 32
        assert rig.load(keys[:32]) == ok(32)


def test_a_queue_smaller_than_a_block_takes_one_at_a_time(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv", block_bytes=64 * KIB, store_queue_bytes=4 * KIB) as rig:
        assert rig.store(keys_of(range(4))) == [RowStatus.OK, *[RowStatus.REFUSED] * 3]
        assert rig.store(keys_of(1)) == ok(1)


@pytest.mark.parametrize("paths", [1, 2])
def test_a_store_of_many_rings_is_whole(tmp_path: Path, paths: int) -> None:
    keys = keys_of(range(256))
    places = [tmp_path / f"disk{number}" for number in range(paths)]
    options = {"slots": 256, "block_bytes": 64 * KIB, "ring_bytes": paths * MIB}
    with tier_rig(*places, **options) as rig:
        assert rig.store(keys) == ok(256)
        assert rig.load(keys) == ok(256)


def test_the_rate_of_loads_is_measured_and_idle_time_is_not(tmp_path: Path) -> None:
    keys = keys_of(range(32))
    with tier_rig(tmp_path / "kv", block_bytes=64 * KIB) as rig:
        rig.store(keys)
        assert rig.tier.disk_rate(Direction.LOAD) is None
        stored = rig.tier.disk_rate(Direction.STORE)
        assert stored is not None
        rig.load(keys)
        assert rig.tier.disk_rate(Direction.STORE) == stored > 0
        rate = rig.tier.disk_rate(Direction.LOAD)
        assert rate is not None
        assert rate > 0
        rig.store(keys_of(range(100, 110)))
        assert rig.tier.disk_rate(Direction.LOAD) == rate


def test_the_rate_of_loads_is_measured_after_a_clear_too(tmp_path: Path) -> None:
    """It opens the path anew, and what was counted before does not stand against it."""
    keys = keys_of(range(32))
    with tier_rig(tmp_path / "kv", block_bytes=64 * KIB) as rig:
        rig.store(keys)
        for _ in range(5):
            rig.load(keys)
        rate = rig.tier.disk_rate(Direction.LOAD)
        assert rig.tier.clear()
        rig.store(keys)
        rig.load(keys)
        assert rig.tier.disk_rate(Direction.LOAD) != rate


def test_progress_counts_bytes_and_busy_time(tmp_path: Path) -> None:
    with rig(tmp_path / "kv", slots=32, slot_bytes=64 * KIB) as disk:
        began = time.monotonic_ns()
        assert disk.store(range(32)) == ok(32)
        [stored] = disk.engine.progress(Direction.STORE)
        assert disk.engine.progress(Direction.LOAD) == [(0, 0, False)]
        assert disk.load(range(32)) == ok(32)
        [loaded] = disk.engine.progress(Direction.LOAD)
        assert disk.engine.progress(Direction.STORE) == [stored]
        for progress in (stored, loaded):
            assert not progress.busy
            assert progress.bytes == 32 * 64 * KIB
            assert progress.busy_ns > 0
        assert stored.busy_ns + loaded.busy_ns <= time.monotonic_ns() - began
        disk.engine.reset_stats()
        assert disk.store(range(8), generation=1) == ok(8)
        assert disk.engine.progress(Direction.LOAD) == [loaded]
