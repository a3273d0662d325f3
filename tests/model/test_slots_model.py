"""The slot allocator against a model of dicts and lists, under every order of calls.

The model knows which operations are under way and what each should lead to. The one thing that it
takes from the allocator is which keys were evicted; it checks that they might be, and how many.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdisk.key_index import ABSENT, KeyBatch
from kvdisk.policy import make_eviction_policy
from kvdisk.slots import SlotAllocator, SlotState

# Several lengths, also keys that differ in trailing zeros only.
KEYS = [b"key-%d" % number for number in range(20)] + [b"z" + b"\0" * n for n in range(8)]
EVERY_KEY = sorted(KEYS)

LATE_RESULTS = ["commit", "unpin", "release", "quarantine", "invalidate"]

positions = st.integers(0, len(KEYS) - 1)


@dataclass
class ModelSlot:
    ticket: int
    key: bytes | None
    storing: bool
    resident: bool = False
    quarantined: bool = False
    pins: int = 0
    timed_out: int = 0  # operations that must be released

    @property
    def operations(self) -> int:
        return int(self.storing) + self.pins + self.timed_out

    @property
    def state(self) -> SlotState:
        if self.quarantined:
            return SlotState.QUARANTINED
        if self.storing:
            return SlotState.STORING if self.key is not None else SlotState.ABANDONED
        return SlotState.RESIDENT if self.key is not None else SlotState.RETIRED


@dataclass
class Model:
    total: int
    open: list[bool] = field(default_factory=lambda: [True, True])  # slots take turns on two paths
    slots: dict[int, ModelSlot] = field(default_factory=dict)  # those not free
    stale: int = 0

    def find(self, key: bytes) -> int | None:
        return next((number for number, slot in self.slots.items() if slot.key == key), None)

    def forget(self, number: int) -> None:
        self.slots[number].key = None
        self.slots[number].resident = False
        self.settle(number)

    def settle(self, number: int) -> None:
        slot = self.slots[number]
        if not slot.operations and slot.key is None:
            del self.slots[number]

    def readable(self, key: bytes) -> bool:
        number = self.find(key)
        return number is not None and self.slots[number].resident

    @property
    def evictable(self) -> set[int]:
        idle = {n for n, slot in self.slots.items() if slot.resident and not slot.operations}
        return {n for n in idle if self.open[n % 2]}

    def vacant(self, is_open: bool) -> int:
        numbers = set(range(self.total)) - self.slots.keys()
        return sum(self.open[n % 2] == is_open for n in numbers)


class AllocatorMachine(RuleBasedStateMachine):
    policy = "lru"

    @initialize(total=st.integers(1, 12))
    def open(self, total: int) -> None:
        self.allocator = SlotAllocator(
            total, make_eviction_policy(self.policy, total), path_count=2, path_of=lambda s: s % 2
        )
        self.model = Model(total)
        self.stores: list[tuple[int, int]] = []  # slot, ticket
        self.loads: list[tuple[int, int]] = []
        self.timed_out: list[tuple[int, int]] = []
        self.outdated: list[tuple[int, int]] = []
        self.tickets_seen: set[int] = set()

    @staticmethod
    def columns(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        return (
            np.array([slot for slot, _ in rows], dtype=np.int32),
            np.array([ticket for _, ticket in rows], dtype=np.int64),
        )

    @rule(
        first=positions,
        count=st.integers(0, 14),
        prefix=st.integers(0, 4),
        repeats=st.booleans(),
        encoded=st.booleans(),
    )
    def allocate(self, first: int, count: int, prefix: int, repeats: bool, encoded: bool) -> None:
        model = self.model
        keys = KEYS[first : first + count]
        keys = keys + keys[:2] if repeats else keys
        before = KEYS[max(0, first - prefix) : first]
        new = [key for key in dict.fromkeys(keys) if model.find(key) is None]
        present = {model.find(key) for key in keys + before} - {None}
        missing = len(new) - model.vacant(True)
        refused = missing > len(model.evictable - present)

        allocation = self.allocator.allocate(KeyBatch(keys) if encoded else keys, before)

        assert (allocation is None) == refused
        if allocation is None:
            return
        assert [keys[row] for row in allocation.rows] == new
        gone = {n for n in model.evictable if model.slots[n].key not in self.resident_keys()}
        assert not gone & present
        assert len(gone) == max(0, missing)
        for number in gone:
            del model.slots[number]
        assert sorted(allocation.slots.tolist()) == allocation.slots.tolist()
        for slot, ticket, key in zip(
            allocation.slots.tolist(), allocation.tickets.tolist(), new, strict=True
        ):
            assert slot not in model.slots
            assert 0 <= slot < model.total
            assert model.open[slot % 2]
            assert ticket not in self.tickets_seen
            self.tickets_seen.add(ticket)
            model.slots[slot] = ModelSlot(ticket, key, storing=True)
            self.stores.append((slot, ticket))

    def resident_keys(self) -> set[bytes]:
        return {
            key for key, there in zip(KEYS, self.allocator.readable(KEYS), strict=True) if there
        }

    @precondition(lambda self: self.stores)
    @rule(count=st.integers(1, 8), good=st.integers(0, 255), backwards=st.booleans())
    def commit(self, count: int, good: int, backwards: bool) -> None:
        rows, self.stores = self.stores[:count], self.stores[count:]
        rows = rows[::-1] if backwards else rows
        oks = [bool(good >> bit & 1) for bit in range(len(rows))]
        published = self.allocator.commit(*self.columns(rows), np.array(oks))
        for (number, _), ok, readable in zip(rows, oks, published.tolist(), strict=True):
            slot = self.model.slots[number]
            slot.storing = False
            assert readable == (ok and slot.key is not None)
            if readable:
                slot.resident = True
            else:
                slot.key = None
                self.model.settle(number)
        self.outdated += rows

    @rule(first=positions, count=st.integers(0, 8), repeats=st.booleans())
    def pin(self, first: int, count: int, repeats: bool) -> None:
        keys = KEYS[first : first + count]
        keys = keys + keys[:2] if repeats else keys
        pinned = self.allocator.pin(keys)
        for key, slot, ticket in zip(keys, *(column.tolist() for column in pinned), strict=True):
            if not self.model.readable(key):
                assert (slot, ticket) == (ABSENT, 0)
                continue
            assert slot == self.model.find(key)
            assert ticket == self.model.slots[slot].ticket
            self.model.slots[slot].pins += 1
            self.loads.append((slot, ticket))

    @precondition(lambda self: self.loads)
    @rule(count=st.integers(1, 8), absent=st.booleans())
    def unpin(self, count: int, absent: bool) -> None:
        rows, self.loads = self.loads[:count], self.loads[count:]
        self.allocator.unpin(*self.columns(rows + [(ABSENT, 0)] * absent))
        for number, _ in rows:
            self.model.slots[number].pins -= 1
            self.model.settle(number)

    @rule(first=positions, count=st.integers(0, 8))
    def touch(self, first: int, count: int) -> None:
        self.allocator.touch(KEYS[first : first + count] * 2)

    @rule(first=positions, count=st.integers(0, 8))
    def drop(self, first: int, count: int) -> None:
        keys = KEYS[first : first + count]
        here = [number for key in keys if (number := self.model.find(key)) is not None]
        assert self.allocator.drop(keys * 2) == len(here)
        for number in here:
            self.model.forget(number)

    @precondition(lambda self: self.loads)
    @rule(count=st.integers(1, 3))
    def invalidate_what_is_loaded(self, count: int) -> None:
        rows = self.loads[:count]
        here = {n for n, _ in rows if self.model.slots[n].key is not None}
        assert self.allocator.invalidate(*self.columns(rows)) == len(here)
        for number in here:
            self.model.forget(number)

    @precondition(lambda self: self.stores or self.loads)
    @rule(stores=st.integers(0, 3), loads=st.integers(0, 3))
    def time_out(self, stores: int, loads: int) -> None:
        late_stores, self.stores = self.stores[:stores], self.stores[stores:]
        late_loads, self.loads = self.loads[:loads], self.loads[loads:]
        self.allocator.quarantine(*self.columns(late_stores + late_loads))
        for number, _ in late_stores:
            self.model.slots[number].storing = False
        for number, _ in late_loads:
            self.model.slots[number].pins -= 1
        for number, _ in late_stores + late_loads:
            slot = self.model.slots[number]
            slot.key, slot.resident, slot.quarantined = None, False, True
            slot.timed_out += 1
        self.timed_out += late_stores + late_loads

    @precondition(lambda self: self.timed_out)
    @rule(count=st.integers(1, 4))
    def release(self, count: int) -> None:
        rows, self.timed_out = self.timed_out[:count], self.timed_out[count:]
        self.allocator.release(*self.columns(rows))
        for number, _ in rows:
            self.model.slots[number].timed_out -= 1
            self.model.settle(number)
        self.outdated += rows

    @precondition(lambda self: self.outdated)
    @rule(which=st.integers(0, 1 << 30), how=st.sampled_from(LATE_RESULTS))
    def late_result(self, which: int, how: str) -> None:
        number, ticket = row = self.outdated[which % len(self.outdated)]
        slot = self.model.slots.get(number)
        if slot is not None and slot.ticket == ticket and slot.operations:
            return  # the same tenant, used by others: a second end of one operation is no late one
        if how == "commit":
            assert not self.allocator.commit(*self.columns([row]), np.array([True])).any()
        elif how == "invalidate":
            slots, tickets = self.columns([row])
            assert self.allocator.invalidate(slots, tickets + (1 << 40)) == 0
            return
        else:
            getattr(self.allocator, how)(*self.columns([row]))
        self.model.stale += 1

    @rule(first=st.booleans(), second=st.booleans())
    def paths_open_or_close(self, first: bool, second: bool) -> None:
        self.allocator.set_open(np.array([first, second]))
        self.model.open = [first, second]

    @rule()
    def clear(self) -> None:
        self.allocator.clear()
        for number in [n for n, slot in self.model.slots.items() if slot.key is not None]:
            self.model.forget(number)

    @rule(total=st.integers(1, 16))
    def resize(self, total: int) -> None:
        in_use = any(n >= total and slot.operations for n, slot in self.model.slots.items())
        assert self.allocator.resize(total) == (not in_use)
        if not in_use:
            for number in [n for n in self.model.slots if n >= total]:
                del self.model.slots[number]
            self.model.total = total

    @rule(
        rows=st.lists(st.tuples(positions, st.integers(-1, 14), st.integers(1, 99)), max_size=8),
    )
    def restore(self, rows: list[tuple[int, int, int]]) -> None:
        sequences = [sequence for _, _, sequence in rows]
        if len(set(sequences)) < len(sequences):
            return
        taken = self.allocator.restore(
            [KEYS[position] for position, _, _ in rows],
            np.array([slot for _, slot, _ in rows], dtype=np.int64),
            np.array(sequences, dtype=np.uint64),
        )
        expected = set()
        slots_tried: set[int] = set()
        for position, number, sequence in sorted(rows, key=lambda row: -row[2]):
            if not 0 <= number < self.model.total or number in slots_tried:
                continue
            if number in self.model.slots:
                continue
            slots_tried.add(number)
            if self.model.find(KEYS[position]) is None:
                self.model.slots[number] = ModelSlot(0, KEYS[position], False, resident=True)
                expected.add(sequence)
        assert {s for s, there in zip(sequences, taken.tolist(), strict=True) if there} == expected
        for entry in self.allocator.entries():
            slot = self.model.slots[entry.slot]
            if slot.ticket == 0:
                assert entry.ticket not in self.tickets_seen
                self.tickets_seen.add(entry.ticket)
                slot.ticket = entry.ticket

    @rule(first=positions, count=st.integers(0, 10))
    def look(self, first: int, count: int) -> None:
        keys = KEYS[first : first + count]
        mask = [self.model.readable(key) for key in keys]
        assert self.allocator.readable(keys).tolist() == mask
        assert self.allocator.lookup(keys) == [*mask, False].index(False)
        assert [key in self.allocator for key in keys] == mask

    @invariant()
    def adds_up(self) -> None:
        model, counts = self.model, self.allocator.counts()
        self.allocator.check()
        vacant = counts.free + counts.withheld
        assert vacant + counts.used + counts.quarantined == counts.total == model.total
        assert (counts.free, counts.withheld) == (model.vacant(True), model.vacant(False))
        states = [slot.state for slot in model.slots.values()]
        for state in SlotState:
            if state not in (SlotState.FREE, SlotState.WITHHELD):
                assert getattr(counts, state.name.lower()) == states.count(state)
        assert counts.pinned == sum(s.resident and s.pins > 0 for s in model.slots.values())
        assert counts.stale == model.stale
        assert self.allocator.room == counts.free + len(model.evictable)
        entries = {
            e.slot: (e.key, e.state, e.operations, e.ticket) for e in self.allocator.entries()
        }
        assert entries == {
            number: (slot.key, slot.state, slot.operations, slot.ticket)
            for number, slot in model.slots.items()
            if slot.key is not None
        }


class S3FIFOAllocatorMachine(AllocatorMachine):
    policy = "s3fifo"


# A busy machine makes no test fail.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
usual = settings(patient, max_examples=80, stateful_step_count=50)


class TestAllocatorLRU(AllocatorMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = usual


class TestAllocatorS3FIFO(S3FIFOAllocatorMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = usual


@pytest.mark.slow
class TestAllocatorLong(AllocatorMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(patient, max_examples=200, stateful_step_count=120)
