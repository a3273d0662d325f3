"""What the slot allocator promises, one promise a test. The model test covers their combinations.

Names of the form A19 are scenarios: what went wrong in other tiers, retold as tests.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvdisk.free_slots import run_count
from kvdisk.key_index import ABSENT, KeyBatch
from kvdisk.memory import SCHEDULER_BYTES_PER_SLOT
from kvdisk.policy import LRUPolicy, make_eviction_policy
from kvdisk.slots import Allocation, SlotAllocator, SlotState


def names(first: int, count: int, what: str = "key") -> list[bytes]:
    return [b"%s-%d" % (what.encode(), number) for number in range(first, first + count)]


def put(
    allocator: SlotAllocator, keys: Sequence[bytes], prefix: Sequence[bytes] = (), ok: bool = True
) -> Allocation:
    allocation = allocator.allocate(keys, prefix)
    assert allocation is not None
    commit(allocator, allocation, ok)
    return allocation


def commit(allocator: SlotAllocator, allocation: Allocation, ok: bool = True) -> list[bool]:
    count = len(allocation.slots)
    published = allocator.commit(allocation.slots, allocation.tickets, np.full(count, ok))
    return [bool(flag) for flag in published]


def held(allocator: SlotAllocator) -> set[bytes]:
    return {entry.key for entry in allocator.entries()}


class TestStore:
    def test_readable_only_after_success(self) -> None:
        allocator = SlotAllocator(4)
        allocation = allocator.allocate([b"a", b"b"])
        assert allocation is not None
        assert allocator.lookup([b"a", b"b"]) == 0
        assert b"a" not in allocator
        published = allocator.commit(allocation.slots, allocation.tickets, np.array([True, False]))
        assert published.tolist() == [True, False]
        assert allocator.readable([b"b", b"a"]).tolist() == [False, True]
        assert allocator.counts().free == 3
        allocator.check()

    def test_a14_one_key_is_stored_once(self) -> None:
        allocator = SlotAllocator(4)
        first = allocator.allocate([b"a", b"b"])
        assert first is not None
        second = allocator.allocate([b"a", b"b", b"c", b"c"])
        assert second is not None
        assert second.rows.tolist() == [2]
        commit(allocator, first)
        commit(allocator, second)
        third = allocator.allocate([b"c", b"b"])
        assert third is not None
        assert len(third.slots) == 0
        assert allocator.counts().used == 3

    def test_a_failed_store_leaves_the_key_storable(self) -> None:
        allocator = SlotAllocator(2)
        for _ in range(5):
            put(allocator, [b"a", b"b"], ok=False)
            assert allocator.counts().free == 2
        put(allocator, [b"a", b"b"])
        assert allocator.lookup([b"a", b"b"]) == 2

    def test_a_drop_during_a_store_keeps_its_result_unpublished(self) -> None:
        allocator = SlotAllocator(2)
        old = allocator.allocate([b"a"])
        assert old is not None
        assert allocator.drop([b"a"]) == 1
        assert allocator.counts().abandoned == 1
        new = allocator.allocate([b"a"])
        assert new is not None
        assert old.slots.tolist() != new.slots.tolist(), "the old store may still write"
        assert allocator.allocate([b"b"]) is None
        assert commit(allocator, old) == [False]
        assert b"a" not in allocator
        assert commit(allocator, new) == [True]
        assert b"a" in allocator
        allocator.check()

    def test_a_late_result_does_not_touch_the_next_tenant(self) -> None:
        allocator = SlotAllocator(1)
        old = put(allocator, [b"a"], ok=False)
        new = allocator.allocate([b"b"])
        assert new is not None
        assert old.slots.tolist() == new.slots.tolist()
        assert commit(allocator, old) == [False]
        allocator.quarantine(old.slots, old.tickets)
        allocator.release(old.slots, old.tickets)
        allocator.unpin(old.slots, old.tickets)
        assert allocator.invalidate(old.slots, old.tickets) == 0
        assert commit(allocator, new) == [True]
        assert allocator.counts().stale == 4

    def test_completions_in_any_order_and_in_pieces(self) -> None:
        allocator = SlotAllocator(8)
        allocation = allocator.allocate(names(0, 6))
        assert allocation is not None
        for part in ([5, 3, 4, 0], [2, 1]):
            allocator.commit(
                allocation.slots[part], allocation.tickets[part], np.array([True] * len(part))
            )
            allocator.check()
        assert allocator.lookup(names(0, 6)) == 6

    def test_nothing_at_all(self) -> None:
        allocator = SlotAllocator(2)
        empty = allocator.allocate([])
        assert empty is not None
        assert len(empty.slots) == 0
        assert commit(allocator, empty) == []
        assert allocator.lookup([]) == 0
        assert allocator.readable([]).tolist() == []
        allocator.unpin(*allocator.pin([]))
        allocator.touch([])
        assert allocator.drop([]) == 0
        allocator.check()


class TestRoom:
    def test_a19_budget_of_two(self) -> None:
        allocator = SlotAllocator(2)
        put(allocator, [b"a"])
        put(allocator, [b"a"])
        put(allocator, [b"b"])
        assert held(allocator) == {b"a", b"b"}

    @pytest.mark.parametrize("policy", ["lru", "s3fifo"])
    def test_a19_counters_equal_the_recount(self, policy: str) -> None:
        generator = random.Random(19)
        allocator = SlotAllocator(48, make_eviction_policy(policy, 48))
        for step in range(10_000):
            keys = names(generator.randrange(120), generator.randrange(1, 12))
            action = generator.random()
            if action < 0.6:
                allocation = allocator.allocate(keys)
                assert allocation is not None
                ok = np.array([generator.random() < 0.7 for _ in allocation.slots], dtype=np.bool_)
                allocator.commit(allocation.slots, allocation.tickets, ok)
            elif action < 0.8:
                allocator.drop(keys)
            elif action < 0.995:
                allocator.unpin(*allocator.pin(keys))
            else:
                allocator.clear()
            if step % 100 == 0:
                allocator.check()
        counts = allocator.counts()
        assert counts.evicted > 1000
        assert counts.refused == 0
        assert counts.free + counts.resident == 48

    def test_a19_an_oversized_call_evicts_nothing_and_harms_no_key(self) -> None:
        allocator = SlotAllocator(4)
        put(allocator, names(0, 4))
        before = list(allocator.entries())
        assert allocator.allocate(names(10, 5)) is None
        assert list(allocator.entries()) == before
        assert allocator.counts().refused == 1
        put(allocator, names(10, 4))
        assert held(allocator) == set(names(10, 4))

    def test_a_refused_call_changes_no_recency(self) -> None:
        allocator = SlotAllocator(4)
        put(allocator, [b"old"])
        put(allocator, [b"young"])
        allocator.pin([b"young"])
        assert allocator.allocate([b"old", *names(0, 3)], [b"young"]) is None
        put(allocator, names(5, 3))
        assert held(allocator) == {b"young", *names(5, 3)}

    def test_a19_a_pinned_oldest_is_passed_over(self) -> None:
        allocator = SlotAllocator(8)
        put(allocator, [b"oldest"])
        pinned = allocator.pin([b"oldest"])
        put(allocator, names(0, 7))
        for first in range(7, 700, 7):
            put(allocator, names(first, 7))
        assert b"oldest" in allocator
        assert allocator.allocate(names(0, 8)) is None
        allocator.unpin(*pinned)
        put(allocator, names(0, 8))
        assert b"oldest" not in allocator

    def test_room_is_never_made_from_the_keys_of_the_call(self) -> None:
        for policy in ("lru", "s3fifo"):
            allocator = SlotAllocator(4, make_eviction_policy(policy, 4))
            put(allocator, names(0, 4))  # 3 would go first
            allocation = put(allocator, [b"new", *names(3, 1)], prefix=names(2, 1))
            assert allocation.rows.tolist() == [0]
            assert {b"new", *names(2, 2)} <= held(allocator)
            assert allocator.allocate(names(10, 2), prefix=[b"new", *names(2, 2)]) is None
            put(allocator, names(20, 4))  # what was safe in those calls may go again

    @pytest.mark.parametrize("policy", ["lru", "s3fifo"])
    def test_a_store_that_was_passed_over_may_go_once_it_has_ended(self, policy: str) -> None:
        allocator = SlotAllocator(4, make_eviction_policy(policy, 4))
        storing = allocator.allocate([b"storing"])
        assert storing is not None
        for first in range(0, 30, 3):
            put(allocator, names(first, 3))
        assert allocator.room == 3
        commit(allocator, storing)
        put(allocator, names(50, 4))
        assert b"storing" not in allocator

    def test_room_tells_what_would_be_taken(self) -> None:
        allocator = SlotAllocator(6)
        put(allocator, names(0, 3))
        pinned = allocator.pin(names(0, 1))
        assert allocator.room == 5
        storing = allocator.allocate(names(10, 1))
        assert storing is not None
        assert allocator.room == 4
        assert allocator.allocate(names(20, 5)) is None
        put(allocator, names(20, 4))
        allocator.unpin(*pinned)

    def test_a20_never_more_than_there_are(self) -> None:
        allocator = SlotAllocator(10)
        for first in range(0, 1000, 3):
            put(allocator, names(first, 3))
            assert allocator.counts().used <= 10
            assert len(held(allocator)) <= 10

    @pytest.mark.parametrize("slots", [0, -1, 1 << 31])
    def test_impossible_sizes(self, slots: int) -> None:
        with pytest.raises(AssertionError):
            SlotAllocator(slots)

    def test_a_policy_that_breaks_its_promise_is_caught(self) -> None:
        class Careless(LRUPolicy):
            def evict(self, count: int, may_go: Callable[..., np.ndarray]) -> np.ndarray:
                return super().evict(count, lambda slots: np.ones_like(slots, dtype=bool))

        allocator = SlotAllocator(2, Careless(2))
        allocator.allocate([b"storing"])
        put(allocator, [b"resident"])
        with pytest.raises(AssertionError, match="in use"):
            allocator.allocate([b"new"])


class TestRecency:
    def test_the_tail_of_a_prefix_goes_before_its_head(self) -> None:
        allocator = SlotAllocator(8)
        put(allocator, names(0, 8))
        for left in range(7, 0, -1):
            put(allocator, names(100 + left, 1))
            assert allocator.lookup(names(0, 8)) == left

    def test_also_when_a_prefix_is_stored_in_chunks(self) -> None:
        allocator = SlotAllocator(12)
        prompt = names(0, 9)
        for start in range(0, 9, 3):
            put(allocator, prompt[start : start + 3], prefix=prompt[:start])
        put(allocator, names(100, 8))
        assert allocator.readable(prompt).tolist() == [True] * 4 + [False] * 5

    def test_also_when_old_and_new_alternate(self) -> None:
        allocator = SlotAllocator(8)
        put(allocator, names(0, 8))
        allocator.drop(names(0, 1))
        allocator.drop(names(4, 2))
        allocation = put(allocator, names(0, 8))
        assert allocation.rows.tolist() == [0, 4, 5]
        put(allocator, names(100, 3))
        assert allocator.readable(names(0, 8)).tolist() == [True] * 5 + [False] * 3

    def test_a_use_keeps_and_looking_does_not(self) -> None:
        for use in ("pin", "touch", "allocate", "look"):
            allocator = SlotAllocator(3)
            put(allocator, [b"a"])
            put(allocator, [b"b"])
            if use == "pin":
                allocator.unpin(*allocator.pin([b"a"]))
            elif use == "touch":
                allocator.touch([b"absent", b"a", b"a"])
            elif use == "allocate":
                put(allocator, [b"a"])
            else:
                assert allocator.lookup([b"a"]) == 1
                assert b"a" in allocator
            put(allocator, [b"c", b"d"])
            assert (b"a" in allocator) == (use != "look")

    def test_evicts_like_an_ordered_dict(self) -> None:
        generator = random.Random(8)
        allocator, model = SlotAllocator(40), OrderedDict[bytes, None]()
        for _ in range(3000):
            keys = names(generator.randrange(90), generator.randrange(1, 9))
            put(allocator, keys)
            missing = len(model.keys() | set(keys)) - 40
            for key in [key for key in model if key not in keys][: max(0, missing)]:
                del model[key]
            for key in reversed(keys):
                model[key] = None
                model.move_to_end(key)
            assert held(allocator) == set(model)


class TestPins:
    def test_a12_a_slot_in_use_is_not_handed_out(self) -> None:
        generator = random.Random(12)
        allocator = SlotAllocator(64)
        loads: list[tuple[np.ndarray, np.ndarray, list[bytes]]] = []
        for _ in range(3000):
            keys = names(generator.randrange(200), generator.randrange(1, 6))
            if generator.random() < 0.5:
                if len(loads) < 8:
                    pinned = allocator.pin(keys)
                    loads.append((*pinned, keys))
                else:
                    slots, tickets, _ = loads.pop(generator.randrange(len(loads)))
                    allocator.unpin(slots, tickets)
            elif (allocation := allocator.allocate(keys)) is not None:
                in_use = {slot for slots, _, _ in loads for slot in slots.tolist()}
                assert not in_use & set(allocation.slots.tolist())
                commit(allocator, allocation, generator.random() < 0.9)
            elif generator.random() < 0.1:
                allocator.drop(keys)
            for slots, tickets, loaded in loads:
                for slot, ticket, key in zip(slots, tickets, loaded, strict=True):
                    if slot != ABSENT and key in allocator:
                        here = next(e for e in allocator.entries() if e.key == key)
                        assert here.slot != slot or here.ticket == ticket
        for slots, tickets, _ in loads:
            allocator.unpin(slots, tickets)
        assert allocator.counts().pinned == 0
        allocator.check()

    def test_a_key_evicted_between_lookup_and_pin_is_a_miss(self) -> None:
        allocator = SlotAllocator(2)
        put(allocator, [b"a", b"b"])
        assert allocator.lookup([b"a", b"b"]) == 2
        put(allocator, [b"c"])
        pinned = allocator.pin([b"a", b"b"])
        assert (pinned.slots >= 0).tolist() == [True, False]
        assert pinned.tickets[1] == 0
        allocator.unpin(*pinned)
        allocator.check()

    def test_pins_are_counted(self) -> None:
        allocator = SlotAllocator(1)
        put(allocator, [b"a"])
        first, twice = allocator.pin([b"a"]), allocator.pin([b"a", b"a"])
        for pinned in (first, twice):
            assert allocator.allocate([b"b"]) is None
            allocator.unpin(*pinned)
        put(allocator, [b"b"])

    def test_one_unpin_too_many_is_noticed(self) -> None:
        allocator = SlotAllocator(2)
        put(allocator, [b"a"])
        pinned = allocator.pin([b"a"])
        with pytest.raises(AssertionError, match="ended twice"):
            allocator.unpin(np.repeat(pinned.slots, 2), np.repeat(pinned.tickets, 2))

    def test_a_dropped_key_keeps_its_slot_until_loads_end(self) -> None:
        allocator = SlotAllocator(1)
        put(allocator, [b"a"])
        pinned = allocator.pin([b"a"])
        allocator.drop([b"a"])
        assert allocator.counts().retired == 1
        assert b"a" not in allocator
        assert allocator.allocate([b"a"]) is None
        allocator.unpin(*pinned)
        put(allocator, [b"a"])


class TestBadBytes:
    def test_a10_a_block_lost_on_one_rank_ends_the_prefix_for_all(self) -> None:
        allocator = SlotAllocator(16)
        put(allocator, names(0, 9))
        allocator.drop(names(5, 1))
        for _ in range(3):
            assert allocator.lookup(names(0, 8)) == 5

    def test_a13_a_failed_proof_drops_that_slot_and_no_neighbour(self) -> None:
        allocator = SlotAllocator(4)
        put(allocator, names(0, 4))
        pinned = allocator.pin(names(1, 1))
        assert allocator.invalidate(*pinned) == 1
        allocator.unpin(*pinned)
        assert allocator.readable(names(0, 4)).tolist() == [True, False, True, True]
        assert allocator.counts().free == 1

    def test_a13_a_newer_copy_elsewhere_is_left_alone(self) -> None:
        allocator = SlotAllocator(4)
        put(allocator, [b"a"])
        pinned = allocator.pin([b"a"])
        allocator.drop([b"a"])
        put(allocator, [b"a"])
        assert allocator.invalidate(*pinned) == 0
        allocator.unpin(*pinned)
        assert b"a" in allocator

    def test_a22_at_most_one_failed_load_then_a_miss_until_stored_again(self) -> None:
        allocator = SlotAllocator(4)
        put(allocator, [b"a"])
        failed = 0
        for _ in range(10):
            if b"a" in allocator:
                pinned = allocator.pin([b"a"])
                failed += 1
                allocator.invalidate(*pinned)
                allocator.unpin(*pinned)
        assert failed == 1
        put(allocator, [b"a"])
        assert b"a" in allocator


class TestTimeouts:
    def test_a23_the_slot_of_a_late_store_is_set_aside(self) -> None:
        allocator = SlotAllocator(2)
        late = allocator.allocate([b"a"])
        assert late is not None
        allocator.quarantine(late.slots, late.tickets)
        counts = allocator.counts()
        assert (counts.free, counts.used, counts.quarantined) == (1, 0, 1)
        assert put(allocator, [b"a"]).slots.tolist() != late.slots.tolist()
        assert allocator.allocate([b"b", b"c"]) is None
        assert commit(allocator, late) == [False], "a late success is no success"
        allocator.release(late.slots, late.tickets)
        put(allocator, [b"b"])
        assert held(allocator) == {b"a", b"b"}
        allocator.check()

    def test_a23_the_slot_of_a_late_load_waits_for_all_that_use_it(self) -> None:
        allocator = SlotAllocator(1)
        put(allocator, [b"a"])
        in_time, late, later = (allocator.pin([b"a"]) for _ in range(3))
        allocator.quarantine(*late)
        allocator.quarantine(*later)
        assert b"a" not in allocator
        allocator.release(*later)
        allocator.unpin(*in_time)
        assert allocator.allocate([b"b"]) is None
        allocator.release(*late)
        put(allocator, [b"b"])
        allocator.check()

    def test_two_late_loads_of_one_slot_in_one_call(self) -> None:
        allocator = SlotAllocator(1)
        put(allocator, [b"a"])
        late = allocator.pin([b"a", b"a"])
        allocator.quarantine(*late)
        allocator.release(*late)
        assert allocator.counts().free == 1
        allocator.check()

    def test_a_whole_tier_of_late_stores_refuses_fast_and_recovers(self) -> None:
        allocator = SlotAllocator(100)
        late = allocator.allocate(names(0, 100))
        assert late is not None
        allocator.quarantine(late.slots, late.tickets)
        for _ in range(50):
            assert allocator.allocate(names(0, 1)) is None
        allocator.release(late.slots, late.tickets)
        put(allocator, names(0, 100))


class TestEverything:
    def test_clear_with_everything_under_way(self) -> None:
        allocator = SlotAllocator(8)
        put(allocator, names(0, 4))
        pinned = allocator.pin(names(0, 2))
        storing = allocator.allocate(names(10, 2))
        late = allocator.allocate(names(20, 1))
        assert storing is not None
        assert late is not None
        allocator.quarantine(late.slots, late.tickets)
        allocator.clear()
        assert held(allocator) == set()
        assert allocator.counts().free == 3
        assert commit(allocator, storing) == [False, False]
        allocator.unpin(*pinned)
        allocator.release(late.slots, late.tickets)
        assert allocator.counts().free == 8
        assert put(allocator, names(0, 8)).slots.tolist() == list(range(8))

    def test_restore_takes_recency_from_the_sequence(self) -> None:
        allocator = SlotAllocator(6)
        keys = names(0, 4)
        taken = allocator.restore(keys, np.array([5, 0, 3, 1]), np.array([7, 9, 8, 2]))
        assert taken.all()
        assert allocator.lookup(keys) == 4
        assert [(e.slot, e.key) for e in allocator.entries()] == [
            (0, keys[1]),
            (1, keys[3]),
            (3, keys[2]),
            (5, keys[0]),
        ]
        gone = []
        for number in range(6):
            put(allocator, names(100 + number, 1))
            gone += [key for key in keys if key not in allocator and key not in gone]
        assert gone == [keys[3], keys[0], keys[2], keys[1]]

    def test_restore_takes_the_latest_and_skips_what_does_not_fit(self) -> None:
        allocator = SlotAllocator(4)
        put(allocator, [b"here"])  # in slot 0
        keys = [b"a", b"a", b"b", b"c", b"here", b"d", b"e", b"f"]
        slots = np.array([1, 2, 2, 4, 3, 0, 3, 1 << 40], dtype=np.uint64)
        sequences = np.array([5, 6, 4, 9, 99, 9, 1, 1], dtype=np.uint64)
        taken = allocator.restore(keys, slots, sequences)
        # b lost its slot to a later a; c and f lie beyond; "here" is here; d's slot is not free;
        # e shares a slot with the later "here", whose bytes the slot holds.
        assert taken.tolist() == [False, True, *[False] * 6]
        assert held(allocator) == {b"here", b"a"}
        allocator.check()
        put(allocator, names(0, 2))

    def test_restore_of_rows_as_they_are_read(self) -> None:
        keys = names(0, 1000)
        read = KeyBatch(keys)
        allocator = SlotAllocator(1000)
        rows = KeyBatch.from_rows(read.rows, read.lengths)
        assert allocator.restore(rows, np.arange(1000)[::-1], np.arange(1000)).all()
        assert allocator.lookup(keys) == 1000
        allocator.check()

    def test_grow_and_shrink(self) -> None:
        allocator = SlotAllocator(4)
        put(allocator, names(0, 4))
        assert allocator.resize(600)
        put(allocator, names(4, 596))
        assert allocator.lookup(names(0, 600)) == 600
        pinned = allocator.pin(names(500, 1))
        before = list(allocator.entries())
        assert not allocator.resize(100)
        assert list(allocator.entries()) == before
        allocator.unpin(*pinned)
        assert allocator.resize(100)
        assert len(allocator) == 100
        assert allocator.counts().resident == 100
        assert allocator.lookup(names(0, 600)) == 100
        allocator.check()

    def test_a_result_may_outlive_its_slot(self) -> None:
        allocator = SlotAllocator(8)
        old = put(allocator, names(0, 8), ok=False)
        assert allocator.resize(2)
        storing = allocator.allocate(names(0, 2))
        assert storing is not None
        assert commit(allocator, old) == [False] * 8
        for end in (allocator.unpin, allocator.release, allocator.quarantine):
            end(old.slots, old.tickets)
        assert allocator.invalidate(old.slots, old.tickets) == 0
        assert commit(allocator, storing) == [True, True]
        allocator.check()

    def test_what_leaves_is_told_when_that_is_wanted(self) -> None:
        allocator = SlotAllocator(4, tell_removed=True)
        put(allocator, names(0, 4))
        assert allocator.take_removed() == []
        put(allocator, [b"failed"], ok=False)
        assert allocator.take_removed() == [b"key-3", b"failed"]
        put(allocator, [b"longer than the others"])
        allocator.drop([b"key-0"])
        allocator.clear()
        left = allocator.take_removed()
        assert left[0] == b"key-0"
        assert sorted(left[1:]) == [b"key-1", b"key-2", b"longer than the others"]
        assert allocator.take_removed() == []
        silent = SlotAllocator(1)
        put(silent, [b"a"])
        put(silent, [b"b"])
        assert silent.take_removed() == []

    def test_entries_tell_everything(self) -> None:
        allocator = SlotAllocator(4)
        stored = put(allocator, [b"a"])
        allocator.pin([b"a"])
        storing = allocator.allocate([b"b"])
        assert storing is not None
        assert list(allocator.entries()) == [
            (0, b"a", SlotState.RESIDENT, 1, int(stored.tickets[0])),
            (1, b"b", SlotState.STORING, 1, int(storing.tickets[0])),
        ]

    def test_check_notices_a_drifted_counter(self) -> None:
        allocator = SlotAllocator(4)
        put(allocator, [b"a"])
        allocator._table._idle[0] = 0
        with pytest.raises(AssertionError, match="idle"):
            allocator.check()
        allocator._table._idle[0] = 1
        allocator._table.count[SlotState.FREE] += 1
        with pytest.raises(AssertionError, match="add up"):
            allocator.allocate([b"b"])


class TestLargeTier:
    """At sizes where room is made in batches and queues are swept in steps."""

    @pytest.mark.parametrize("policy", ["lru", "s3fifo"])
    def test_churn(self, policy: str) -> None:
        generator = random.Random(4)
        slots = 1 << 13
        allocator = SlotAllocator(slots, make_eviction_policy(policy, slots))
        stored = 0
        for number in range(1200):
            prompt = generator.randrange(1 << 9)
            keys = names(0, generator.randrange(1, 128), f"prompt-{prompt}")
            hits = allocator.lookup(keys)
            pinned = allocator.pin(keys[:hits])
            allocation = put(allocator, keys[hits:], prefix=keys[:hits])
            stored += len(allocation.slots)
            allocator.unpin(*pinned)
            assert allocator.lookup(keys) == len(keys)
            if number % 200 == 0:
                allocator.check()
        counts = allocator.counts()
        assert stored > 3 * slots
        assert counts.stale == counts.refused == 0
        assert counts.free <= slots // 512
        allocator.check()

    def test_stores_get_runs_of_neighbours(self) -> None:
        """Also in a full tier, where prompts of all lengths come and go and some are used again."""
        generator = random.Random(6)
        allocator = SlotAllocator(1 << 13)
        runs = blocks = 0
        for number in range(2000):
            prompt = number if generator.random() < 0.7 else generator.randrange(number + 1)
            allocation = put(allocator, names(0, 16 + prompt % 48, f"prompt-{prompt}"))
            if number > 500 and len(allocation.slots):
                runs += run_count(allocation.slots)
                blocks += len(allocation.slots)
        assert blocks / runs > 8

    def test_bytes_a_slot(self) -> None:
        slots = 1 << 16
        for policy, most in (("lru", 150), ("s3fifo", 215)):
            gc.collect()
            tracemalloc.start()
            allocator = SlotAllocator(slots, make_eviction_policy(policy, slots))
            for first in range(0, slots, 64):
                put(allocator, [b"%036d" % number for number in range(first, first + 64)])
            gc.collect()
            size = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            assert size / slots <= most < SCHEDULER_BYTES_PER_SLOT[policy]

    def test_nothing_grows_in_the_steady_state(self) -> None:
        slots = 1 << 12
        allocator = SlotAllocator(slots)

        def churn(first: int) -> None:
            for number in range(first, first + 400):
                keys = names(number * 64, 64)
                put(allocator, keys)
                allocator.unpin(*allocator.pin(keys[:32]))
                allocator.touch(names((number - 9) * 64, 64))

        churn(100)
        gc.collect()
        tracemalloc.start()
        churn(500)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert grown < 64 << 10
