"""A23, A30: what a path that takes no stores keeps, and what the others do meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvdisk.messages import PathState, RankReport
from kvdisk.scheduler import TierScheduler
from kvdisk.transfer import RowStatus
from tests.tier.by_hand import UP, opened, report
from tests.tier.tier_rig import KIB, config_of, keys_of, ok

READ_ONLY = PathState(loads=True, stores=False, reason="EROFS")
DOWN = PathState(loads=False, stores=False, reason="EIO")
BLOCK_BYTES = 64 * KIB
SLOTS = 64  # of each of two paths


class Tier:
    """A scheduler of one rank whose disks do all that they are asked."""

    def __init__(self, root: Path, eviction: str = "lru") -> None:
        config = config_of([root / "a", root / "b"], SLOTS, BLOCK_BYTES, eviction=eviction)
        self.scheduler = TierScheduler(config, BLOCK_BYTES)
        self.scheduler.attach(opened(self.scheduler, 0))
        assert self.scheduler.placement.slot_count == 2 * SLOTS

    def store(self, keys: list[bytes]) -> list[int]:
        transfer = self.scheduler.store(keys, range(len(keys)))
        if len(transfer):
            self.scheduler.apply(report(0, transfer, ok(len(transfer))))
        (result,) = self.scheduler.take_finished()
        self.scheduler.check()
        return [int(status) for status in result.statuses]

    def load(self, keys: list[bytes]) -> list[int]:
        transfer = self.scheduler.load(keys, range(len(keys)))
        if len(transfer):
            self.scheduler.apply(report(0, transfer, ok(len(transfer))))
        (result,) = self.scheduler.take_finished()
        return [int(status) for status in result.statuses]

    def paths(self, *states: PathState) -> None:
        self.scheduler.apply(RankReport(0, paths=states))
        self.scheduler.check()

    def on_path(self, keys: list[bytes], path: int) -> list[bytes]:
        slots = self.scheduler._allocator.find(keys)
        there = (slots >= 0) & (self.scheduler.placement.path_of(slots) == path)
        return [keys[row] for row in np.flatnonzero(there).tolist()]


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path)


@pytest.mark.parametrize("eviction", ["lru", "s3fifo"])
def test_a30_a_read_only_path_keeps_its_blocks_whatever_is_stored(
    tmp_path: Path, eviction: str
) -> None:
    """Stores that it cannot take must not push out what it still serves."""
    tier = Tier(tmp_path, eviction)
    old = keys_of(range(2 * SLOTS))
    assert tier.store(old) == ok(2 * SLOTS)
    kept = tier.on_path(old, 1)
    assert len(kept) == SLOTS
    tier.paths(UP, READ_ONLY)
    for first in range(1000, 1500, 10):
        assert tier.store(keys_of(range(first, first + 10))) == ok(10)
    assert tier.load(kept) == ok(SLOTS)
    assert tier.scheduler.counters.refusals.total() == 0
    counts = tier.scheduler.counts()
    assert (counts.quarantined, counts.pinned) == (0, 0)

    tier.paths(UP, UP)
    assert tier.load(kept) == ok(SLOTS)
    for first in range(2000, 2500, 10):
        assert tier.store(keys_of(range(first, first + 10))) == ok(10)
    if eviction == "lru":
        assert not tier.on_path(kept, 1), "it takes its part again"


def test_a30_free_slots_of_a_path_that_is_out_are_neither_handed_out_nor_lost(tier: Tier) -> None:
    tier.paths(READ_ONLY, UP)
    counts = tier.scheduler.counts()
    assert (counts.free, counts.withheld, counts.quarantined) == (SLOTS, SLOTS, 0)
    new = keys_of(range(SLOTS))
    assert tier.store(new) == ok(SLOTS), "the other path has room for all of it"
    assert len(tier.on_path(new, 1)) == SLOTS
    tier.paths(UP, UP)
    counts = tier.scheduler.counts()
    assert (counts.free, counts.withheld) == (SLOTS, 0)
    assert tier.store(keys_of(range(100, 100 + SLOTS))) == ok(SLOTS)
    assert tier.load(new) == ok(SLOTS)


def test_a30_a_store_under_way_when_its_path_goes_out_ends_as_it_must(tier: Tier) -> None:
    scheduler, keys = tier.scheduler, keys_of(range(2 * SLOTS))
    transfer = scheduler.store(keys, range(2 * SLOTS))
    tier.paths(UP, READ_ONLY)
    on_path = scheduler.placement.path_of(transfer.slots) == 1
    statuses = np.where(on_path & (np.arange(2 * SLOTS) % 2 == 0), RowStatus.FAILED, RowStatus.OK)
    scheduler.apply(report(0, transfer, statuses.tolist(), error=30))
    scheduler.check()
    counts = scheduler.counts()
    failed = int(np.count_nonzero(statuses == RowStatus.FAILED))
    assert (counts.withheld, counts.free) == (failed, 0)
    assert counts.resident == 2 * SLOTS - failed
    tier.paths(UP, UP)
    assert scheduler.counts().free == failed


def test_a23_what_cannot_be_read_now_is_stored_again_on_another_path(tier: Tier) -> None:
    """Or a disk that is gone for good would keep the best known prefixes from being cached."""
    keys = keys_of(range(SLOTS))
    assert tier.store(keys) == ok(SLOTS)
    gone = tier.on_path(keys, 1)
    assert gone
    tier.paths(UP, DOWN)
    assert tier.scheduler.lookup(keys) < SLOTS
    assert tier.store(keys) == ok(SLOTS)
    assert tier.scheduler.lookup(keys) == SLOTS
    assert tier.load(keys) == ok(SLOTS)
    assert len(tier.on_path(keys, 0)) == SLOTS
    tier.paths(UP, UP)
    assert tier.scheduler.counts().resident == SLOTS


def test_a30_no_path_that_takes_stores_refuses_them_and_evicts_nothing(tier: Tier) -> None:
    keys = keys_of(range(2 * SLOTS))
    assert tier.store(keys) == ok(2 * SLOTS)
    tier.paths(READ_ONLY, READ_ONLY)
    assert tier.store(keys_of(range(900, 910))) == [RowStatus.REFUSED] * 10
    assert tier.scheduler.counters.refusals == {"paused": 10}
    assert tier.load(keys) == ok(2 * SLOTS)
    assert tier.scheduler.counts().evicted == 0
