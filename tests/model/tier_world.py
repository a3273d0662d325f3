"""A tier over simulated ranks, and a plain dict that knows what it may answer.

Shared by the stateful test, which looks for short counterexamples, and the soak, which looks for
rare ones. The content of a block follows from its key and the generation (how often all was
cleared), so that a stale block is a wrong one, and is found.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from kvdisk.messages import Clear, Transfer
from kvdisk.open_transfers import TierResult
from kvdisk.scheduler import TierScheduler
from kvdisk.testing import Faults, SimulatedDisk, SimulatedWorker, simulated_config
from kvdisk.transfer import Direction, RowStatus

BLOCK_BYTES = 64
POISON = 0xEE


class TierWorld:
    """``ranks`` workers, one scheduler, ``slots`` slots; keys are small numbers.

    Blocks are handed out so that no two transfers share one, as a serving engine does.
    """

    def __init__(
        self, seed: int, *, ranks: int = 2, slots: int = 253, blocks: int = 1024, faults: Faults
    ) -> None:
        self.random = random.Random(seed)
        self.disk = SimulatedDisk(seed + 1, faults)
        self.ranks = ranks
        self.config = simulated_config(slots, BLOCK_BYTES)
        self.blocks = [np.zeros((blocks, BLOCK_BYTES), np.uint8) for _ in range(ranks)]
        self.generation = 0
        self.generation_of = {0: 0}  # by the clear's number
        self.stored: set[int] = set()  # keys that may be found
        self.offered: defaultdict[int, set[int]] = defaultdict(set)  # by generation
        self.loads: dict[int, tuple[list[int], list[int]]] = {}  # id: keys, blocks
        self.stores: dict[int, tuple[list[int], list[int], int]] = {}
        self.ended: set[int] = set()
        self.freed: set[int] = set()
        self.ops = 0
        self.hits = 0
        self.wrong = 0
        self.start()

    def start(self) -> None:
        """Open the tier on what the disk holds."""
        self.scheduler = TierScheduler(self.config, self.blocks[0].shape[1], world_size=self.ranks)
        self.workers = [
            SimulatedWorker(self.disk, blocks, self.config, rank=rank, world_size=self.ranks)
            for rank, blocks in enumerate(self.blocks)
        ]
        order = list(range(self.ranks))
        self.random.shuffle(order)
        for rank in order:
            self.scheduler.attach(self.workers[rank].take_opened())
        self.free_blocks = list(range(len(self.blocks[0])))
        self.loads.clear()
        self.stores.clear()
        self.ended.clear()
        self.freed.clear()
        if self.scheduler.needs_clear:
            self.clear()
            for rank in range(self.ranks):
                self.step(rank)
        assert self.scheduler.ready

    # --- what an engine does

    def store(self, keys: Sequence[int]) -> None:
        blocks = self._take_blocks(len(keys))
        if blocks is None:
            return
        for key, block in zip(keys, blocks, strict=True):
            for rank in range(self.ranks):
                self.blocks[rank][block] = content(key, self.generation, rank)
        self.offered[self.generation].update(keys)
        transfer = self.scheduler.store([name(key) for key in keys], blocks)
        self.stores[transfer.id] = (list(keys), blocks, self.generation)
        self._send(transfer)

    def load(self, keys: Sequence[int]) -> None:
        blocks = self._take_blocks(len(keys))
        if blocks is None:
            return
        for rank in range(self.ranks):
            self.blocks[rank][blocks] = POISON
        transfer = self.scheduler.load([name(key) for key in keys], blocks)
        self.loads[transfer.id] = (list(keys), blocks)
        self._send(transfer)

    def lookup(self, keys: Sequence[int]) -> None:
        found = self.scheduler.lookup([name(key) for key in keys])
        for key in keys[:found]:
            assert key in self.stored, f"key {key} was found, but never stored"

    def drop(self, keys: Sequence[int]) -> None:
        names = [name(key) for key in keys]
        self.scheduler.drop(names)
        assert not self.scheduler.readable(names).any(), "a dropped key is readable"

    def clear(self) -> Clear:
        message = self.scheduler.clear()
        self.generation += 1
        self.generation_of[message.number] = self.generation
        self.stored.clear()
        for worker in self.workers:
            worker.clear(message)
        return message

    def step(self, rank: int) -> None:
        """One worker works and reports."""
        self.scheduler.apply(self.workers[rank].poll())
        self._take_news()

    def settle(self, rounds: int = 200) -> None:
        """Until nothing is under way and no slot is held."""
        for _ in range(rounds):
            for rank in range(self.ranks):
                self.step(rank)
            counts = self.scheduler.counts()
            idle = counts.resident - counts.pinned
            in_use = counts.total - counts.free - counts.withheld - idle
            if not (self.scheduler.open_transfers or in_use):
                break
        assert self.scheduler.open_transfers == 0, "a transfer never ended"
        assert in_use == 0, f"a slot was never let go: {counts}"
        assert not self.loads
        assert not self.stores
        self.scheduler.check()

    def restart(self, *, crash: bool) -> None:
        """End the workers, well or not, and open again. Nothing is promised of what is under way.

        A clear that no rank has made durable is undone by this; one that some have is not.
        """
        for worker in self.workers:
            if crash:
                worker.crash()
            else:
                worker.close()
                self.scheduler.apply(worker.poll())
        if not crash:
            self._take_news()
            assert not self.loads | self.stores, "close left a transfer open"
        last = max(self.disk.rank(rank).clears for rank in range(self.ranks))
        self.generation = self.generation_of[last]
        self.stored = set(self.offered[self.generation])  # published or not
        self.start()

    # --- checking

    def _send(self, transfer: Transfer) -> None:
        if len(transfer):
            for worker in self.workers:
                worker.submit(transfer)
        self._take_news()

    def _take_news(self) -> None:
        for store_id in self.scheduler.take_source_free():
            assert store_id in self.stores, "an unknown store's source is free"
            assert store_id not in self.freed, "a source was freed twice"
            self.freed.add(store_id)
            for rank in range(self.ranks):  # the engine uses the blocks for something else at once
                self.blocks[rank][self.stores[store_id][1]] = POISON
        for result in self.scheduler.take_finished():
            assert result.transfer_id not in self.ended, "a transfer ended twice"
            self.ended.add(result.transfer_id)
            if result.direction is Direction.STORE:
                self._end_store(result)
            else:
                self._end_load(result)

    def _end_store(self, result: TierResult) -> None:
        assert result.transfer_id in self.freed, "a store ended before its source was free"
        keys, blocks, generation = self.stores.pop(result.transfer_id)
        assert len(result.statuses) == len(keys)
        self.ops += len(keys)
        self.free_blocks.extend(blocks)
        for key, status in zip(keys, result.statuses.tolist(), strict=True):
            if status == RowStatus.OK and generation == self.generation:
                self.stored.add(key)

    def _end_load(self, result: TierResult) -> None:
        keys, blocks = self.loads.pop(result.transfer_id)
        assert len(result.statuses) == len(keys)
        self.ops += len(keys)
        for key, block, status in zip(keys, blocks, result.statuses.tolist(), strict=True):
            if status != RowStatus.OK:
                continue
            self.hits += 1
            for rank in range(self.ranks):
                right = content(key, self.generation, rank)
                if not np.array_equal(self.blocks[rank][block], right):
                    self.wrong += 1
        self.free_blocks.extend(blocks)

    def _take_blocks(self, count: int) -> list[int] | None:
        if count > len(self.free_blocks):
            return None
        taken, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        return taken


def name(key: int) -> bytes:
    """Keys of several lengths, some beyond the record's field."""
    text = b"key-%d" % key
    return text * (20 if key % 7 == 0 else 1)


_contents: dict[tuple[int, int, int], np.ndarray] = {}


def content(key: int, generation: int, rank: int) -> np.ndarray:
    found = _contents.get((key, generation, rank))
    if found is None:
        if len(_contents) > 20_000:
            _contents.clear()
        seed = hashlib.blake2b(b"%d/%d/%d" % (key, generation, rank), digest_size=32).digest()
        found = np.frombuffer(seed * 2, dtype=np.uint8)
        _contents[key, generation, rank] = found
    return found
