"""Every slot's state, who uses it and whose turn it is: the counters that must always add up.

Knows no keys and no order of eviction; ``slots.py`` joins it with those. All changes of state are
made here, so the counters cannot drift: a change and its counting are the same statement.

What always holds:
    * free + used + quarantined = total.
    * ``operations[slot]`` is 0 exactly for free slots and for resident ones that nothing uses.
    * A slot is handed out under a new ticket each time; tickets grow and are never reused.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdisk.free_slots import FreeSlots
from kvdisk.key_index import ABSENT, Mask, Slots, Where, require
from kvdisk.slot_queue import resized

Tickets = npt.NDArray[np.int64]
States = npt.NDArray[np.uint8]


class SlotState(IntEnum):
    FREE = 0
    STORING = 1  # has a key, not readable; a store uses it
    ABANDONED = 2  # the same, but its key was dropped: the store's result will not be published
    RESIDENT = 3  # has a key, readable
    RETIRED = 4  # was resident, its key was dropped while loads used it
    QUARANTINED = 5  # an operation on it timed out and may still happen


# Plain numbers: numpy looks for array attributes on every operand, and enum members are slow there.
FREE, STORING, ABANDONED, RESIDENT, RETIRED, QUARANTINED = map(int, SlotState)
_AFTER_DROP: Final = np.array(
    [FREE, ABANDONED, ABANDONED, RETIRED, RETIRED, QUARANTINED], dtype=np.uint8
)


class SlotTable:
    """States of ``slots`` slots. 17 bytes a slot, with the free ones."""

    def __init__(self, slots: int) -> None:
        require(0 < slots < 1 << 31, f"slots must be in 1 .. 2**31 - 1, not {slots}")
        self.total = slots
        self.free = FreeSlots(slots)
        # One more than there are slots, always FREE: ABSENT, which is -1, looks there.
        self.state: States = np.full(slots + 1, FREE, dtype=np.uint8)
        self.operations = np.full(slots, 0, dtype=np.int32)
        self.ticket: Tickets = np.full(slots, 0, dtype=np.int64)
        self.next_ticket = 1
        self.count = [0] * len(SlotState)
        self.count[FREE] = slots
        self.evictable = 0  # resident, used by nothing

    def resident(self, slots: Slots) -> Mask:
        """Which of ``slots`` are readable; ``ABSENT`` is not."""
        mask: Mask = self.state.take(slots) == RESIDENT
        return mask

    def current(self, slots: Slots, tickets: Tickets) -> Mask:
        """Which slots still are what the ticket says.

        A row may outlive its slot, when the table shrinks: it looks at the last slot, "clip", and
        finds another ticket there.
        """
        mask: Mask = self.ticket.take(slots, mode="clip") == tickets
        return mask

    def state_in_use(self, slots: Slots, tickets: Tickets) -> States:
        """The state of each row's slot; FREE where it is outdated or no operation is under way."""
        current = self.current(slots, tickets) & (self.operations.take(slots, mode="clip") > 0)
        states: States = self.state.take(slots, mode="clip") * current
        return states

    def with_key(self) -> Slots:
        """The slots that have a key, ascending. O(slots)."""
        state = self.state[: self.total]
        return _numbers((state == STORING) | (state == RESIDENT))

    def take(self, count: int) -> tuple[Slots, Where, Tickets]:
        """Free → storing for ``count`` slots: they, an index for them, and their tickets."""
        slots = self.free.take(count)
        first, last = int(slots[0]), int(slots[-1])
        where = slice(first, last + 1) if last - first == count - 1 else slots
        tickets = self._new_tickets(count)
        self.ticket[where] = tickets
        self.state[where] = STORING
        self.operations[where] = 1
        self._move(count, FREE, STORING)
        return slots, where, tickets

    def publish(self, slots: Slots) -> None:
        """Storing → resident, for distinct slots."""
        self.state[slots] = RESIDENT
        self.operations[slots] = 0
        self._move(len(slots), STORING, RESIDENT)
        self.evictable += len(slots)

    def restore(self, slots: Slots) -> None:
        """Free → resident, the last of ``slots`` under the oldest ticket. Then rebuild_free."""
        self.state[slots] = RESIDENT
        self.ticket[slots] = self._new_tickets(len(slots))[::-1]
        self._move(len(slots), FREE, RESIDENT)
        self.evictable += len(slots)

    def drop(self, slots: Slots) -> None:
        """Distinct storing or resident slots lose their key; free are those that nothing uses."""
        state = self.state.take(slots)
        idle = slots[self.operations.take(slots) == 0]
        self.state[slots] = _AFTER_DROP.take(state)
        storing = int(np.count_nonzero(state == STORING))
        self._move(storing, STORING, ABANDONED)
        self._move(len(slots) - storing, RESIDENT, RETIRED)
        self.evictable -= len(idle)
        self.set_free(idle, RETIRED)

    def evict(self, slots: Slots) -> None:
        """Resident and used by nothing → free."""
        require(
            np.count_nonzero(self.resident(slots)) == len(slots)
            and not np.count_nonzero(self.operations.take(slots)),
            "the policy gave up a slot in use",
        )
        self.evictable -= len(slots)
        self.set_free(slots, RESIDENT)

    def begin_operations(self, slots: Slots, *, distinct: bool) -> None:
        """One operation more for each row of resident ``slots``."""
        idle = slots[self.operations.take(slots) == 0]
        self.evictable -= len(idle) if distinct else len(np.unique(idle))
        np.add.at(self.operations, slots, 1)

    def end_operations(self, slots: Slots) -> Slots:
        """One operation less for each row; frees what waited for that.

        Returns the slots that are resident and used by nothing now, in the order of the rows.
        """
        np.subtract.at(self.operations, slots, 1)
        left = self.operations.take(slots)
        require(not len(left) or left.min() >= 0, "an operation on a slot was ended twice")
        idle = slots[left == 0]
        state = self.state.take(idle)
        ready = distinct(idle[state == RESIDENT])
        if len(ready) < len(idle):
            for was in (RETIRED, QUARANTINED):
                self.set_free(np.unique(idle[state == was]), was)
        self.evictable += len(ready)
        return ready

    def end_abandoned(self, slots: Slots) -> None:
        """The stores of abandoned slots have ended: they are free."""
        self.operations[slots] = 0
        self.set_free(slots, ABANDONED)

    def quarantine(self, slots: Slots) -> None:
        """Abandoned or retired → quarantined, for distinct slots; others stay what they are."""
        state = self.state.take(slots)
        for was in (ABANDONED, RETIRED):
            part = slots[state == was]
            self.state[part] = QUARANTINED
            self._move(len(part), was, QUARANTINED)

    def set_free(self, slots: Slots, was: int) -> None:
        self.state[slots] = FREE
        self._move(len(slots), was, FREE)
        self.free.add(slots)

    def rebuild_free(self) -> None:
        """Put all free slots in order again. O(slots)."""
        self.free.reset(self.total, _numbers(self.state[: self.total] == FREE))

    def resize(self, slots: int) -> None:
        """Slots beyond must be free. O(slots)."""
        self.state = resized(self.state[: self.total], slots + 1)
        self.state[slots] = FREE
        self.operations = resized(self.operations, slots)
        self.ticket = resized(self.ticket, slots)
        self.count[FREE] += slots - self.total
        self.total = slots
        self.rebuild_free()

    def assert_sums(self, keys: int) -> None:
        """O(1): counters, free slots and the number of keys agree."""
        count = self.count
        if not (
            sum(count) == self.total
            and min(count) >= 0
            and count[FREE] == len(self.free)
            and count[STORING] + count[RESIDENT] == keys
            and 0 <= self.evictable <= count[RESIDENT]
        ):
            raise AssertionError(
                f"slots do not add up: {count} of {self.total}, {self.evictable} evictable, "
                f"{len(self.free)} free, {keys} keys"
            )

    def check(self) -> None:
        """Recount everything. O(slots)."""
        state = self.state[: self.total]
        recount = np.bincount(state, minlength=len(SlotState)).tolist()
        require(recount == self.count, f"states recounted {recount}, counted {self.count}")
        require(self.state[ABSENT] == FREE, "the state that stands for absent changed")
        idle = self.operations == 0
        require(
            np.array_equal(idle, (state == FREE) | ((state == RESIDENT) & idle)),
            "a free slot is used, or one that is neither free nor resident is used by nothing",
        )
        evictable = int(np.count_nonzero(idle & (state == RESIDENT)))
        require(evictable == self.evictable, f"{evictable} evictable, counted {self.evictable}")
        free = np.sort(self.free.view())
        require(np.array_equal(free, (state == FREE).nonzero()[0]), "the free slots differ")
        require(not self.ticket.size or self.ticket.max() < self.next_ticket, "a ticket to come")

    def _new_tickets(self, count: int) -> Tickets:
        first = self.next_ticket
        self.next_ticket += count
        return np.arange(first, first + count)

    def _move(self, slots: int, source: int, target: int) -> None:
        self.count[source] -= slots
        self.count[target] += slots


def distinct(slots: Slots) -> Slots:
    """``slots`` in their order, each once."""
    firsts = dict.fromkeys(slots.tolist())
    return slots if len(firsts) == len(slots) else np.array(list(firsts), dtype=np.int32)


def _numbers(mask: Mask) -> Slots:
    slots: Slots = mask.nonzero()[0].astype(np.int32)
    return slots
