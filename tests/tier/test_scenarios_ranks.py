"""A3, A5, A10, A23 over several ranks: what one rank could not do, nobody has.

Two halves: a scheduler that is told by hand what its ranks report, in every order; and two real
workers on real files.
"""

from __future__ import annotations

import errno
import itertools
import pickle
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvdisk.messages import PathState, RankReport, Transfer
from kvdisk.scheduler import TierScheduler
from kvdisk.transfer import RowStatus
from kvdisk.worker import TierWorker
from tests.tier.by_hand import UP, opened, report
from tests.tier.tier_rig import (
    KIB,
    PATIENCE_S,
    Blocks,
    config_of,
    content,
    generation_in,
    identity_of,
    keys_of,
    ok,
)

OK, FAILED, TIMED_OUT = RowStatus.OK, RowStatus.FAILED, RowStatus.TIMED_OUT
BLOCK_BYTES = 16 * KIB


class TestToldByHand:
    """Ranks that exist only as the reports they send."""

    @pytest.fixture
    def scheduler(self, tmp_path: Path) -> TierScheduler:
        config = config_of([tmp_path], 64, BLOCK_BYTES, ranks=2)
        made = TierScheduler(config, BLOCK_BYTES, world_size=2)
        for rank in range(2):
            assert made.attach(opened(made, rank)) == (rank == 1)
        return made

    def test_a10_nothing_is_there_before_every_rank_is(self, tmp_path: Path) -> None:
        config = config_of([tmp_path], 64, BLOCK_BYTES, ranks=2)
        scheduler = TierScheduler(config, BLOCK_BYTES, world_size=2)
        keys = keys_of(range(4))
        scheduler.attach(opened(scheduler, 0))
        assert not scheduler.ready
        assert len(scheduler.store(keys, range(4))) == 0
        assert scheduler.take_finished()[0].statuses.tolist() == [RowStatus.REFUSED] * 4
        assert scheduler.lookup(keys) == 0

    @pytest.mark.parametrize("failing", [0, 1])
    @pytest.mark.parametrize("first", [0, 1])
    def test_a3_a_failure_in_one_rank_is_everybodys(
        self, scheduler: TierScheduler, failing: int, first: int
    ) -> None:
        keys = keys_of(range(4))
        stored = scheduler.store(keys, range(4))
        statuses = [[OK] * 4, [OK] * 4]
        statuses[failing][2] = FAILED
        for rank in (first, 1 - first):
            assert scheduler.lookup(keys) == 0, "not everybody has said so"
            scheduler.apply(report(rank, stored, statuses[rank], error=5))
        (result,) = scheduler.take_finished()
        assert result.statuses.tolist() == [OK, OK, FAILED, OK]
        assert result.errors.tolist() == [0, 0, 5, 0]
        assert scheduler.lookup(keys) == 2
        assert scheduler.counters.blocks_stored == 3
        assert scheduler.counters.errors == {("store", "EIO"): 1}

        loading = scheduler.load([*keys[:2], keys[3]], range(3))
        statuses = [[OK] * 3, [OK] * 3]
        statuses[failing][0] = RowStatus.CORRUPT
        for rank in (first, 1 - first):
            scheduler.apply(report(rank, loading, statuses[rank]))
        (result,) = scheduler.take_finished()
        assert result.statuses.tolist() == [RowStatus.CORRUPT, OK, OK]
        assert scheduler.counters.blocks_loaded == 2
        assert scheduler.lookup(keys) == 0, "what a rank has lost is lost for all, at once"
        scheduler.check()

    @pytest.mark.parametrize(
        "order",
        [each for each in itertools.permutations(range(4)) if each.index(1) < each.index(2)],
    )
    def test_a23_a_row_that_hangs_in_one_rank_keeps_its_slot_until_released(
        self, scheduler: TierScheduler, order: Sequence[int]
    ) -> None:
        """Rank 1 gives a store up and its disk lets go later; results and releases of the ranks
        come in every order in which a rank's release follows its result."""
        (key,) = keys_of(0)
        stored = scheduler.store([key], [0])
        slot = int(stored.slots[0])
        reports = [
            report(0, stored, [OK]),
            report(1, stored, [TIMED_OUT], quarantined=[True]),
            RankReport(1, released_slots=[slot]),
            RankReport(0, released_slots=[slot + 1]),  # of some other slot
        ]
        seen = set()
        for step in order:
            scheduler.apply(reports[step])
            seen.add(step)
            free = {0, 1, 2} <= seen
            assert (scheduler.counts().free == 64) == free, seen
            scheduler.check()
        assert scheduler.take_finished()[0].statuses.tolist() == [TIMED_OUT]
        assert scheduler.lookup([key]) == 0
        assert scheduler.counts().quarantined == 0

    def test_a23_both_ranks_hang_and_both_must_let_go(self, scheduler: TierScheduler) -> None:
        stored = scheduler.store(keys_of(0), [0])
        slot = int(stored.slots[0])
        for rank in (0, 1):
            scheduler.apply(report(rank, stored, [TIMED_OUT], quarantined=[True]))
        assert scheduler.counts().quarantined == 1
        scheduler.apply(RankReport(0, released_slots=[slot]))
        scheduler.apply(RankReport(0, released_slots=[slot]))  # twice by the same is not both
        assert scheduler.counts().quarantined == 1
        scheduler.apply(RankReport(1, released_slots=[slot]))
        assert scheduler.counts().free == 64
        scheduler.check()

    @pytest.mark.parametrize(
        ("number", "stays"), [(errno.EAGAIN, True), (errno.ENOMEM, True), (errno.EIO, False)]
    )
    def test_a22_only_a_lasting_error_costs_the_key(
        self, scheduler: TierScheduler, number: int, stays: bool
    ) -> None:
        keys = keys_of(range(2))
        stored = scheduler.store(keys, range(2))
        for rank in (0, 1):
            scheduler.apply(report(rank, stored, [OK, OK]))
        loading = scheduler.load(keys, range(2))
        scheduler.apply(report(0, loading, [OK, OK]))
        scheduler.apply(report(1, loading, [FAILED, OK], error=number))
        assert scheduler.take_finished()[1].statuses.tolist() == [FAILED, OK]
        assert scheduler.readable(keys).tolist() == [stays, True]
        assert scheduler.counts().pinned == 0
        assert scheduler.counters.misses == {"failed": 1}

    def test_a22_a_copy_that_fails_costs_no_key(self, scheduler: TierScheduler) -> None:
        """The block lies on the disk as well as before: a GPU's error is not the disk's."""
        keys = keys_of(range(2))
        stored = scheduler.store(keys, range(2))
        for rank in (0, 1):
            scheduler.apply(report(rank, stored, [OK, OK]))
        loading = scheduler.load(keys, range(2))
        scheduler.apply(report(0, loading, [OK, OK]))
        scheduler.apply(report(1, loading, [RowStatus.COPY_FAILED, OK], error=errno.EIO))
        (result,) = scheduler.take_finished()[1:]
        assert result.statuses.tolist() == [RowStatus.COPY_FAILED, OK]
        assert result.errors.tolist() == [errno.EIO, 0]
        assert scheduler.lookup(keys) == 2
        assert scheduler.counters.misses == {"copy_failed": 1}
        assert scheduler.counters.errors == {("load", "EIO"): 1}

    def test_a5_odd_orders_are_counted_and_change_nothing(self, scheduler: TierScheduler) -> None:
        keys = keys_of(range(2))
        stored = scheduler.store(keys, range(2))
        ghost = Transfer(
            999, stored.direction, keys, stored.slots, stored.block_ids, stored.positions
        )
        scheduler.apply(report(0, ghost, [OK, OK]))
        scheduler.apply(RankReport(1, source_free=[999], released_slots=[3], cleared=[998]))
        assert scheduler.counters.unknown_results == 1
        assert scheduler.take_finished() == []
        assert scheduler.take_source_free() == []
        for rank in (0, 1):
            scheduler.apply(report(rank, stored, [OK, OK]))
        assert scheduler.take_source_free() == [stored.id]
        scheduler.apply(report(0, stored, [FAILED, FAILED]))  # of what has ended
        assert scheduler.counters.unknown_results == 2
        assert len(scheduler.take_finished()) == 1
        assert scheduler.lookup(keys) == 2
        scheduler.check()

    def test_a10_one_rank_that_says_it_twice_does_not_speak_for_the_other(
        self, scheduler: TierScheduler
    ) -> None:
        keys = keys_of(range(2))
        stored = scheduler.store(keys, range(2))
        for _ in range(2):
            scheduler.apply(report(0, stored, [OK, OK]))
        assert scheduler.lookup(keys) == 0
        assert scheduler.take_source_free() == []
        assert scheduler.take_finished() == []
        cleared = scheduler.clear()
        scheduler.apply(RankReport(0, cleared=[cleared.id]))
        scheduler.apply(RankReport(0, cleared=[cleared.id]))
        assert not scheduler.cleared(cleared.id)
        scheduler.apply(RankReport(1, cleared=[cleared.id]))
        assert scheduler.cleared(cleared.id)

    def test_a8_a_clear_that_ended_with_both_ranks_is_asked_for_again(
        self, scheduler: TierScheduler
    ) -> None:
        lost = scheduler.clear()
        for rank in (0, 1):
            scheduler.detach(rank)
        for rank in (0, 1):
            scheduler.attach(opened(scheduler, rank))
        assert scheduler.needs_clear
        assert not scheduler.ready
        assert not scheduler.cleared(lost.id)
        again = scheduler.clear()
        assert scheduler.ready
        for rank in (0, 1):
            assert not scheduler.cleared(lost.id)
            scheduler.apply(RankReport(rank, cleared=[again.id]))
        assert scheduler.cleared(lost.id)
        assert scheduler.cleared(again.id)

    def test_a8_a_rank_that_ended_behind_its_clear_has_made_it_durable(
        self, scheduler: TierScheduler
    ) -> None:
        message = scheduler.clear()
        scheduler.apply(RankReport(0, cleared=[message.id]))
        scheduler.detach(1)  # its files have seen the clear, but nobody was told
        scheduler.attach(replace(opened(scheduler, 1), clears=message.number))
        assert scheduler.cleared(message.id)
        assert scheduler.ready

    def test_a8_a_clear_before_the_ranks_are_there_brings_nothing_back(
        self, tmp_path: Path
    ) -> None:
        scheduler = TierScheduler(
            config_of([tmp_path], 64, BLOCK_BYTES, ranks=2), BLOCK_BYTES, world_size=2
        )
        early = scheduler.clear()
        keys = keys_of(range(4))
        rows = np.zeros((4, 64), dtype=np.uint8)
        rows[:, :16] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(4, 16)
        for rank in (0, 1):
            restored = replace(
                opened(scheduler, rank),
                restored_slots=np.arange(4),
                restored_sequences=np.arange(4, dtype=np.uint64),
                restored_keys=rows,
                restored_key_lengths=np.full(4, 16, dtype=np.uint8),
                clears=5,
            )
            scheduler.attach(restored)
        assert scheduler.lookup(keys) == 0
        assert scheduler.needs_clear
        assert not scheduler.cleared(early.id)
        assert scheduler.clear().number > 5

    @pytest.mark.parametrize("first", [0, 1])
    def test_a8_a_rank_started_again_amid_a_clear_has_missed_it(
        self, scheduler: TierScheduler, first: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The message went to the process that died; nobody else will clear the new one's files."""
        message = scheduler.clear()
        if first == 0:  # the other rank is done before the new process is here, or after
            scheduler.apply(RankReport(0, cleared=[message.id]))
        scheduler.detach(1)
        scheduler.attach(opened(scheduler, 1))
        assert scheduler.needs_clear, "the engine is told at once, when it attaches the rank"
        assert "missed a clear" in caplog.text
        if first == 1:
            scheduler.apply(RankReport(0, cleared=[message.id]))
        assert not scheduler.ready
        assert not scheduler.cleared(message.id)
        again = scheduler.clear()
        assert again.number > message.number
        for rank in (0, 1):
            scheduler.apply(RankReport(rank, cleared=[again.id]))
        assert scheduler.ready
        assert scheduler.cleared(message.id)
        assert scheduler.cleared(again.id)
        assert len(scheduler.store(keys_of(0), [0])) == 1

    def test_a_path_that_sits_out_in_one_rank_sits_out(self, scheduler: TierScheduler) -> None:
        keys = keys_of(range(4))
        stored = scheduler.store(keys, range(4))
        for rank in (0, 1):
            scheduler.apply(report(rank, stored, [OK] * 4))
        scheduler.take_finished()
        down = PathState(loads=False, stores=False, reason="no answer")
        scheduler.apply(RankReport(1, paths=(down,)))
        assert scheduler.lookup(keys) == 0
        assert len(scheduler.load(keys, range(4))) == 0
        (result,) = scheduler.take_finished()
        assert result.statuses.tolist() == [RowStatus.REFUSED] * 4
        assert scheduler.counters.misses == {"unavailable": 4}
        assert scheduler.counts().pinned == 0
        scheduler.apply(RankReport(1, paths=(UP,)))
        assert scheduler.lookup(keys) == 4

    def test_a10_every_order_of_many_reports_adds_up(self, tmp_path: Path) -> None:
        """A thousand stores and loads over three ranks whose messages cross each other at random,
        some hanging, some failing."""
        chooser = random.Random(10)
        config = config_of([tmp_path], 32, 32 * KIB, ranks=3)
        scheduler = TierScheduler(config, 32 * KIB, world_size=3)
        for rank in range(3):
            scheduler.attach(opened(scheduler, rank))
        waiting: list[list[RankReport]] = [[], [], []]
        ended = begun = 0
        keys = keys_of(range(48))
        for step in range(4000):
            if step < 3000 and chooser.random() < 0.4:
                chosen = chooser.sample(keys, chooser.randrange(1, 6))
                move = scheduler.store if chooser.random() < 0.5 else scheduler.load
                transfer = move(chosen, range(len(chosen)))
                begun += 1
                for rank in range(3):
                    waiting[rank] += _random_reports(chooser, rank, transfer)
            queue = chooser.choice(waiting)
            if queue:
                scheduler.apply(queue.pop(0))
            ended += len(scheduler.take_finished())
            if step % 100 == 0:
                scheduler.check()
        for queue in waiting:
            for each in queue:
                scheduler.apply(each)
        ended += len(scheduler.take_finished())
        counts = scheduler.counts()
        assert (ended, scheduler.open_transfers) == (begun, 0)
        assert counts.quarantined == counts.storing == counts.pinned == counts.retired == 0
        assert scheduler.counters.blocks_loaded > 0
        scheduler.check()


def _random_reports(chooser: random.Random, rank: int, transfer: Transfer) -> list[RankReport]:
    if not len(transfer):
        return []
    statuses = [chooser.choice([OK] * 12 + [FAILED, TIMED_OUT]) for _ in range(len(transfer))]
    held = [status is TIMED_OUT and chooser.random() < 0.7 for status in statuses]
    released = [int(s) for s, held_ in zip(transfer.slots, held, strict=True) if held_]
    reports = [report(rank, transfer, statuses, error=5, quarantined=held)]
    return reports + [RankReport(rank, released_slots=[slot]) for slot in released]


# --- two real workers


class TwoRanks:
    """A scheduler and two workers in one process; every message is pickled on its way."""

    def __init__(self, root: Path) -> None:
        self.blocks = [Blocks(32, BLOCK_BYTES) for _ in range(2)]
        config = config_of([root], 64, BLOCK_BYTES, ranks=2)
        identity = identity_of(self.blocks[0].layout, parallel={"tensor": 2})
        self.directory = root / identity.namespace
        self.scheduler = TierScheduler(config, BLOCK_BYTES, world_size=2)
        self.workers = [
            TierWorker.open(blocks.layout, identity, config, rank=rank, world_size=2)
            for rank, blocks in enumerate(self.blocks)
        ]
        for worker in self.workers:
            self.scheduler.attach(pickle.loads(pickle.dumps(worker.take_opened())))

    def run(self, transfer: Transfer) -> list[int]:
        for worker in self.workers:
            worker.submit(pickle.loads(pickle.dumps(transfer)))
        until = time.monotonic() + PATIENCE_S
        while True:
            for worker in self.workers:
                worker.wait(0.02)
                self.scheduler.apply(pickle.loads(pickle.dumps(worker.poll())))
            for result in self.scheduler.take_finished():
                assert result.transfer_id == transfer.id
                return result.statuses.tolist()
            assert time.monotonic() < until

    def store(self, keys: Sequence[bytes]) -> tuple[Transfer, list[int]]:
        """Rank r stores generation r: each must get back its own."""
        for rank, blocks in enumerate(self.blocks):
            for block, key in enumerate(keys):
                blocks.fill(block, content(key, rank, BLOCK_BYTES))
        transfer = self.scheduler.store(keys, range(len(keys)))
        return transfer, self.run(transfer)

    def load(self, keys: Sequence[bytes]) -> list[int]:
        transfer = self.scheduler.load(keys, range(32, 32 + len(keys)))
        statuses = self.run(transfer)
        for rank, blocks in enumerate(self.blocks):
            for row, key in enumerate(keys):
                if statuses[row] == OK:
                    assert generation_in(blocks.read(32 + row), key) == rank
        return statuses

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.check()


@pytest.mark.parametrize("file", ["kv", "idx"])
def test_a10_ranks_agree_on_the_prefix_after_one_has_lost_a_block(
    tmp_path: Path, file: str
) -> None:
    """Block 5 of rank 1 loses its bytes (found at load) or its record (found at the restart)."""
    keys = keys_of(range(8))
    ranks = TwoRanks(tmp_path)
    transfer, statuses = ranks.store(keys)
    assert statuses == ok(8)
    ranks.close()
    slot = int(transfer.slots[5])
    with open(ranks.directory / f"rank-1-of-2.{file}", "r+b") as damaged:
        damaged.seek(slot * BLOCK_BYTES if file == "kv" else 4096 + slot * 128)
        damaged.write(bytes(128))
    ranks = TwoRanks(tmp_path)
    if file == "kv":
        assert ranks.scheduler.lookup(keys) == 8
        assert ranks.load(keys) == [*ok(5), RowStatus.CORRUPT, *ok(2)]
        assert ranks.scheduler.counters.blocks_loaded == 7
    for _ in range(3):
        assert ranks.scheduler.lookup(keys) == 5
    assert ranks.load(keys) == [*ok(5), RowStatus.MISS, *ok(2)]
    assert ranks.store(keys)[1] == ok(8)
    assert ranks.load(keys) == ok(8)
    ranks.close()


def test_a3_sixteen_blocks_of_which_two_are_damaged_in_rank_one(tmp_path: Path) -> None:
    keys = keys_of(range(16))
    ranks = TwoRanks(tmp_path)
    transfer, _ = ranks.store(keys)
    with open(ranks.directory / "rank-1-of-2.kv", "r+b") as damaged:
        for row in (3, 11):
            damaged.seek(int(transfer.slots[row]) * BLOCK_BYTES + 100)
            damaged.write(b"\xff" * 64)
    statuses = ranks.load(keys)
    assert [row for row, status in enumerate(statuses) if status != OK] == [3, 11]
    assert ranks.scheduler.counters.blocks_loaded == 14
    assert ranks.scheduler.counters.misses == {"corrupt": 2}
    ranks.close()


def test_a10_a_rank_that_starts_cold_makes_everything_a_miss(tmp_path: Path) -> None:
    keys = keys_of(range(16))
    ranks = TwoRanks(tmp_path)
    ranks.store(keys)
    ranks.close()
    (ranks.directory / "rank-1-of-2.idx").write_bytes(b"")
    ranks = TwoRanks(tmp_path)
    assert ranks.scheduler.lookup(keys) == 0
    assert ranks.store(keys)[1] == ok(16)
    assert ranks.load(keys) == ok(16)
    ranks.close()
