"""Eviction orders against slow references, and admission against an injected clock."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np
import pytest

from kvdisk.errors import ConfigError
from kvdisk.policy import (
    AdmitAll,
    AdmitIfAll,
    GhostTable,
    LRUPolicy,
    S3FIFOPolicy,
    SecondTouch,
    WriteBudget,
    make_eviction_policy,
)
from kvdisk.slot_queue import SlotQueue


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def hashes(*numbers: int) -> np.ndarray:
    """As good as real hashes, but the same in every run (the finaliser of splitmix64)."""
    mixed = np.array(numbers, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int64)


def unused(count: int) -> np.ndarray:
    return np.zeros(count, dtype=np.int32)


def idle(operations: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Only what no operation uses may go."""
    return lambda slots: operations.take(slots) == 0


def insert(policy: LRUPolicy | S3FIFOPolicy, *numbers: int) -> None:
    policy.insert(slots(*numbers), hashes(*numbers))


POLICIES = [LRUPolicy, S3FIFOPolicy]


class TestQueue:
    @pytest.mark.parametrize("size", [1, 2, 7, 5000])
    def test_order_is_that_of_the_last_push_however_often_it_is_swept(self, size: int) -> None:
        generator = random.Random(size)
        queue, model = SlotQueue(size), OrderedDict[int, None]()
        for _ in range(3000):
            count = generator.randrange(1, min(size, 40) + 1)
            batch = [generator.randrange(size) for _ in range(count)]
            action = generator.random()
            if action < 0.8:
                queue.push(slots(*batch))
                for slot in batch:
                    model[slot] = None
                    model.move_to_end(slot)
            elif action < 0.9:
                queue.remove(slots(*batch))
                for slot in batch:
                    model.pop(slot, None)
            else:
                popped = queue.pop(count).tolist()
                assert popped == [model.popitem(last=False)[0] for _ in popped]
                assert len(popped) == count or not model
        assert queue.ordered().tolist() == list(model)
        assert queue.has(np.arange(size)).tolist() == [slot in model for slot in range(size)]

    def test_a_large_queue_is_swept_in_small_steps_only(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = 20_000
        queue = SlotQueue(size)
        steps: list[int] = []
        step = SlotQueue._sweep_step

        def counted(self: SlotQueue, entries: int) -> None:
            steps.append(entries)
            step(self, entries)

        monkeypatch.setattr(SlotQueue, "_sweep_step", counted)
        everything = np.arange(size, dtype=np.int32)
        for start in [*range(0, size, 50)] * 12:
            before = len(steps)
            queue.push(everything[start : start + 50])
            assert len(steps) - before <= 1
        assert max(steps) <= 1024
        assert queue.ordered().tolist() == everything.tolist()

    def test_more_than_there_are_slots_in_one_push(self) -> None:
        queue = SlotQueue(3)
        queue.push(slots(*[0, 1, 2] * 100, 1, 0))
        assert queue.ordered().tolist() == [2, 1, 0]

    def test_resized_keeps_the_order(self) -> None:
        queue = SlotQueue(5)
        queue.push(slots(3, 1, 4, 0))
        queue.push(slots(3))
        assert queue.resized(9).ordered().tolist() == [1, 4, 0, 3]
        queue.remove(slots(3, 4))
        assert queue.resized(2).ordered().tolist() == [1, 0]
        queue.push(slots(4))
        with pytest.raises(AssertionError, match="beyond"):
            queue.resized(2)


class TestLRU:
    def test_the_tail_of_a_call_goes_before_its_head(self) -> None:
        policy = LRUPolicy(8)
        insert(policy, 0, 1, 2)
        insert(policy, 3, 4)
        policy.touch(slots(0, 1))
        assert policy.evict(8, idle(unused(8))).tolist() == [2, 4, 3, 1, 0]

    def test_no_block_outlives_a_block_before_it_when_calls_name_the_whole_prefix(self) -> None:
        """Random trees of prefixes: whatever is left is closed towards the root."""
        generator = random.Random(11)
        for _ in range(30):
            size = 200
            parent = {0: -1} | {node: generator.randrange(node) for node in range(1, size)}
            policy, inside = LRUPolicy(size), set[int]()
            for _ in range(120):
                path = [generator.randrange(size)]
                while parent[path[0]] >= 0:
                    path.insert(0, parent[path[0]])
                new = [node for node in path if node not in inside]
                if new:
                    insert(policy, *new)
                if len(new) < len(path):
                    policy.touch(slots(*path[: len(path) - len(new)]))
                inside |= set(path)
                if generator.random() < 0.4:
                    inside -= set(
                        policy.evict(generator.randrange(1, 8), idle(unused(size))).tolist()
                    )
                    assert all(parent[node] < 0 or parent[node] in inside for node in inside)

    def test_equals_an_ordered_dict(self) -> None:
        generator = random.Random(5)
        policy, model = LRUPolicy(64), OrderedDict[int, None]()
        for _ in range(4000):
            batch = generator.sample(range(64), generator.randrange(1, 10))
            old = [slot for slot in batch if slot in model]
            new = [slot for slot in batch if slot not in model]
            action = generator.random()
            if action < 0.4:
                insert(policy, *new)
                model |= dict.fromkeys(reversed(new))
            elif action < 0.7:
                policy.touch(slots(*old))
                for slot in reversed(old):
                    model.move_to_end(slot)
            elif action < 0.8:
                policy.remove(slots(*old))
                for slot in old:
                    del model[slot]
            else:
                victims = policy.evict(len(batch), idle(unused(64))).tolist()
                assert victims == [model.popitem(last=False)[0] for _ in victims]
                assert len(victims) == len(batch) or not model
            assert policy.order().tolist() == list(model)

    def test_resize_and_clear(self) -> None:
        policy = LRUPolicy(4)
        insert(policy, 0, 1, 2, 3)
        policy.remove(slots(3))
        policy.resize(3)
        assert policy.order().tolist() == [2, 1, 0]
        policy.resize(300)
        insert(policy, 299)
        assert policy.order().tolist() == [2, 1, 0, 299]
        policy.clear()
        assert policy.evict(1, idle(unused(300))).tolist() == []


class TestStuckVictims:
    @pytest.mark.parametrize("make", POLICIES)
    def test_a_stuck_victim_is_passed_over(self, make: type[LRUPolicy | S3FIFOPolicy]) -> None:
        policy, operations = make(8), unused(8)
        for slot in range(6):
            insert(policy, slot)
        operations[[0, 2]] = 1
        assert policy.evict(2, idle(operations)).tolist() == [1, 3]
        assert sorted(policy.evict(8, idle(operations)).tolist()) == [4, 5]
        operations[[0, 2]] = 0
        assert policy.evict(8, idle(operations)).tolist() == [], "not told yet that they may go"
        policy.unblock(slots(0, 2))
        assert sorted(policy.evict(8, idle(operations)).tolist()) == [0, 2]

    @pytest.mark.parametrize("make", POLICIES)
    def test_stuck_victims_are_looked_at_once(
        self, make: type[LRUPolicy | S3FIFOPolicy], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size, stuck = 20_000, 10_000
        policy, operations = make(size), unused(size)
        policy.insert(np.arange(size, dtype=np.int32)[::-1], hashes(*range(size)))
        operations[:stuck] = 1
        looked = 0
        pop = SlotQueue.pop

        def counted(self: SlotQueue, count: int) -> np.ndarray:
            nonlocal looked
            popped = pop(self, count)
            looked += len(popped)
            return popped

        monkeypatch.setattr(SlotQueue, "pop", counted)
        assert len(policy.evict(10, idle(operations))) == 10
        assert stuck <= looked <= stuck + 10
        looked = 0
        for _ in range(100):
            assert len(policy.evict(10, idle(operations))) == 10
        assert looked == 1000

    @pytest.mark.parametrize("make", POLICIES)
    def test_removed_or_cleared_while_set_aside(self, make: type[LRUPolicy | S3FIFOPolicy]) -> None:
        policy, operations = make(4), unused(4)
        insert(policy, 0, 1)
        operations[:] = 1
        assert len(policy.evict(1, idle(operations))) == 0
        operations[:] = 0
        policy.remove(slots(0))
        policy.unblock(slots(0, 1))
        assert policy.evict(4, idle(operations)).tolist() == [1]
        insert(policy, 2)
        operations[:] = 1
        assert len(policy.evict(1, idle(operations))) == 0
        policy.clear()
        operations[:] = 0
        policy.unblock(slots(2))
        assert policy.evict(4, idle(operations)).tolist() == []


class ReferenceS3FIFO:
    """One slot at a time, with deques: algorithm 1 of the paper with the documented differences."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.ghost: dict[int, int] = {}  # name → how many were remembered before it
        self.remembered = 0
        self.uses: dict[int, int] = {}

    def insert(self, slot: int, name: int) -> None:
        self.uses[slot] = 0
        stamp = self.ghost.pop(name, None)
        if stamp is not None and self.remembered - stamp <= self.size - self.size // 10:
            self.main.append(slot)
        else:
            self.small.append(slot)

    def touch(self, slot: int) -> None:
        self.uses[slot] = min(3, self.uses[slot] + 1)

    def evict(self, names: dict[int, int]) -> int:
        while True:
            if self.small and (len(self.small) >= self.size // 10 or not self.main):
                slot = self.small.popleft()
                if self.uses[slot] <= 1:
                    self.ghost[names[slot]] = self.remembered
                    self.remembered += 1
                    return slot
                self.uses[slot] = 0
            else:
                slot = self.main.popleft()
                if not self.uses[slot]:
                    return slot
                self.uses[slot] -= 1
            self.main.append(slot)


class TestS3FIFO:
    @pytest.mark.parametrize("seed", range(4))
    def test_equals_the_reference(self, seed: int) -> None:
        generator = random.Random(seed)
        size, names = 50, dict[int, int]()
        policy, reference = S3FIFOPolicy(size), ReferenceS3FIFO(size)
        slot_of: dict[int, int] = {}
        for _ in range(6000):
            name = int(generator.paretovariate(0.6)) % 400
            if name in slot_of:
                policy.touch(slots(slot_of[name]))
                reference.touch(slot_of[name])
                continue
            if len(slot_of) == size:
                (victim,) = policy.evict(1, idle(unused(size))).tolist()
                assert victim == reference.evict(names)
                del slot_of[names.pop(victim)]
            slot = min(set(range(size)) - set(names))
            names[slot], slot_of[name] = name, slot
            policy.insert(slots(slot), hashes(name))
            reference.insert(slot, name)
            small, main = policy.order()
            assert small.tolist() == list(reference.small)
            assert main.tolist() == list(reference.main)

    def test_what_is_used_survives_a_scan_that_empties_an_lru(self) -> None:
        size = 100
        left: dict[str, int] = {}
        for make in POLICIES:
            policy = make(size)
            held: dict[int, int] = {}
            for name in range(50):
                held[name] = name
                insert(policy, name)
            for _ in range(3):
                policy.touch(np.arange(50, dtype=np.int32))
            for name in range(50, 1050):
                if len(held) == size:
                    (slot,) = policy.evict(1, idle(unused(size))).tolist()
                    held = {n: s for n, s in held.items() if s != slot}
                slot = min(set(range(size)) - set(held.values()))
                held[name] = slot
                policy.insert(slots(slot), hashes(name))
            left[make.__name__] = sum(name < 50 for name in held)
        assert left == {"LRUPolicy": 0, "S3FIFOPolicy": 50}

    def test_a_call_never_goes_round_a_used_queue_for_long(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = 100_000
        policy = S3FIFOPolicy(size)
        everything = np.arange(size, dtype=np.int32)
        numbers = hashes(*range(size))
        policy.insert(everything, numbers)
        policy.evict(size, idle(unused(size)))
        policy.insert(everything, numbers)  # known to the ghost: most go to the main queue
        assert len(policy.order()[1]) > size // 2
        for _ in range(3):
            policy.touch(everything)
        looked = 0
        pop = SlotQueue.pop

        def counted(self: SlotQueue, count: int) -> np.ndarray:
            nonlocal looked
            popped = pop(self, count)
            looked += len(popped)
            return popped

        policy.remove(policy.order()[0])  # so that the main queue has to give
        monkeypatch.setattr(SlotQueue, "pop", counted)
        assert len(policy.evict(8, idle(unused(size)))) == 8
        assert looked <= 4096 + 8 + 8

    def test_resize(self) -> None:
        policy = S3FIFOPolicy(40)
        insert(policy, *range(30))
        policy.remove(slots(*range(20, 30)))
        policy.resize(20)
        assert sorted(policy.evict(40, idle(unused(20))).tolist()) == list(range(20))
        policy.resize(400)
        insert(policy, 399)
        assert policy.evict(2, idle(unused(400))).tolist() == [399]


class TestGhost:
    def test_remembers_about_the_last_keys_and_no_more(self) -> None:
        ghost = GhostTable(1000)
        numbers = np.arange(20_000, dtype=np.int64)
        all_hashes = hashes(*numbers.tolist())
        for start in range(0, 20_000, 100):
            assert not ghost.remember(all_hashes[start : start + 100]).any()
        assert ghost.forget(all_hashes[-1000:]).mean() > 0.95
        assert not ghost.forget(all_hashes[:19_000]).any()
        assert not ghost.forget(all_hashes).any(), "forgotten means forgotten"

    def test_one_large_batch_is_remembered_like_many_small_ones(self) -> None:
        ghost = GhostTable(1000)
        ghost.remember(hashes(*range(1000)))
        assert ghost.forget(hashes(*range(1000))).mean() > 0.95

    def test_seen_again_is_young_again(self) -> None:
        ghost = GhostTable(100)
        assert ghost.remember(hashes(7)).tolist() == [False]
        for start in range(1000, 2000, 50):
            ghost.remember(hashes(*range(start, start + 50)))
            assert ghost.remember(hashes(7)).tolist() == [True]

    def test_counts_beyond_32_bits(self) -> None:
        ghost = GhostTable(100)
        ghost._now = (1 << 32) - 5
        ghost.remember(hashes(*range(10)))
        assert ghost.remember(hashes(*range(10))).all()


class FakeClock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class TestAdmission:
    keys = (b"a", b"b", b"c", b"d")

    def test_all(self) -> None:
        policy = AdmitAll()
        policy.charge(3)
        assert policy.admit(self.keys).tolist() == [True] * 4
        assert policy.admit([]).tolist() == []

    def test_second_touch(self) -> None:
        policy = SecondTouch(100)
        assert policy.admit(self.keys[:2]).tolist() == [False, False]
        assert policy.admit(self.keys).tolist() == [True, True, False, False]
        assert policy.admit(self.keys).tolist() == [True] * 4
        policy.charge(4)

    def test_second_touch_memory_is_bounded(self) -> None:
        policy = SecondTouch(64)
        policy.admit(self.keys)
        for start in range(0, 6400, 64):
            policy.admit([b"other-%d" % number for number in range(start, start + 64)])
        assert not policy.admit(self.keys).any()

    def test_write_budget_serves_the_head_and_refills_evenly(self) -> None:
        clock = FakeClock()
        budget = WriteBudget(86_400 * 10, 5, burst_bytes=10, clock=clock)
        assert budget.admit(self.keys).tolist() == [True, True, False, False]
        assert budget.admit(self.keys).tolist() == [True, True, False, False], "asking is free"
        budget.charge(2)
        assert not budget.admit(self.keys).any()
        clock.seconds += 0.5  # ten bytes a second
        assert budget.admit(self.keys).tolist() == [True, False, False, False]
        clock.seconds += 3600
        assert budget.admit(self.keys).tolist() == [True, True, False, False], "burst is capped"

    def test_write_budget_keeps_the_days_limit(self) -> None:
        clock = FakeClock()
        budget = WriteBudget(1_000_000, 1000, clock=clock)
        written = 0
        for _ in range(3 * 24 * 60):
            admitted = int(budget.admit([b"k%d" % number for number in range(50)]).sum())
            budget.charge(admitted)
            written += admitted * 1000
            clock.seconds += 60
        assert 2_990_000 <= written <= 3_000_000 + 1_000_000 / 24

    def test_write_budget_with_a_clock_that_steps_back(self) -> None:
        clock = FakeClock()
        budget = WriteBudget(86_400, 1, burst_bytes=1, clock=clock)
        budget.charge(1)
        clock.seconds -= 500
        assert not budget.admit(self.keys).any()
        clock.seconds += 1
        assert budget.admit(self.keys).tolist() == [True, False, False, False]

    @pytest.mark.parametrize(("per_day", "block"), [(0, 1), (-1, 1), (100, 0), (100, 50)])
    def test_write_budget_that_never_admits_is_an_error(self, per_day: int, block: int) -> None:
        with pytest.raises(ConfigError):
            WriteBudget(per_day, block)

    def test_all_of_several_asks_only_for_what_is_left(self) -> None:
        budget = WriteBudget(86_400, 1, burst_bytes=2, clock=FakeClock())
        policy = AdmitIfAll([SecondTouch(100), budget])
        assert not policy.admit(self.keys[1:]).any()
        assert policy.admit(self.keys).tolist() == [False, True, True, False]
        policy.charge(2)
        assert not policy.admit(self.keys).any()


def test_policies_by_name() -> None:
    assert isinstance(make_eviction_policy("lru", 4), LRUPolicy)
    assert isinstance(make_eviction_policy("s3fifo", 4), S3FIFOPolicy)
    with pytest.raises(ConfigError, match="there are: lru, s3fifo"):
        make_eviction_policy("fifo", 4)
