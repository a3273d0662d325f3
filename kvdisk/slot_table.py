"""Every slot's state, who uses it and whose turn it is: the counters that must always add up.

Knows no keys and no order of eviction; ``slots.py`` joins it with those. All changes of state are
made here, so the counters cannot drift: a change and its counting are the same statement.

The slots lie on one or several paths. One that is closed takes no stores: its free slots are
withheld, and its resident ones keep their keys, but may not be given up for room.

What always holds:
    * free + withheld + used + quarantined = total.
    * ``operations[slot]`` is 0 exactly for free and withheld slots, and for resident ones that
      nothing uses.
    * On closed paths nothing is free, on open ones nothing withheld.
    * A slot is handed out under a new ticket each time; tickets grow and are never reused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdisk.free_slots import FreeSlots
from kvdisk.key_index import ABSENT, Mask, Slots, Where, require
from kvdisk.slot_queue import resized

Tickets = npt.NDArray[np.int64]
PathOf = Callable[[Slots], npt.NDArray[np.integer]]
States = npt.NDArray[np.uint8]


class SlotState(IntEnum):
    FREE = 0
    STORING = 1  # has a key, not readable; a store uses it
    ABANDONED = 2  # the same, but its key was dropped: the store's result will not be published
    RESIDENT = 3  # has a key, readable
    RETIRED = 4  # was resident, its key was dropped while loads used it
    QUARANTINED = 5  # an operation on it timed out and may still happen
    WITHHELD = 6  # as free, but on a path that is closed


# Plain numbers: numpy looks for array attributes on every operand, and enum members are slow there.
FREE, STORING, ABANDONED, RESIDENT, RETIRED, QUARANTINED, WITHHELD = map(int, SlotState)
_AFTER_DROP: Final = np.array(
    [FREE, ABANDONED, ABANDONED, RETIRED, RETIRED, QUARANTINED, WITHHELD], dtype=np.uint8
)


@dataclass(frozen=True)
class SlotCounts:
    """Slots by state. ``pinned`` is the part of ``resident`` that loads use; ``withheld`` hold
    nothing, on paths that take no stores now.

    ``refused``, ``evicted`` and ``stale`` count since construction: calls without room, keys given
    up for room, results that came with an outdated ticket.
    """

    total: int
    free: int
    storing: int
    abandoned: int
    resident: int
    pinned: int
    retired: int
    quarantined: int
    withheld: int
    refused: int
    evicted: int
    stale: int

    @property
    def used(self) -> int:
        """Slots that have a key or that an operation in time uses."""
        return self.storing + self.abandoned + self.resident + self.retired


class SlotTable:
    """States of ``slots`` slots. 17 bytes a slot, with the free ones."""

    def __init__(self, slots: int, path_count: int = 1, path_of: PathOf = np.zeros_like) -> None:
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
        self._path_count = path_count
        self._path_of = path_of
        self._open: Mask = np.ones(path_count, dtype=np.bool_)
        self._all_open = True
        self._idle = [0] * path_count  # of each path: resident, used by nothing

    @property
    def idle(self) -> int:
        """How many slots are resident and used by nothing."""
        return sum(self._idle)

    @property
    def evictable(self) -> int:
        """How many of those may be given up."""
        if self._all_open:
            return sum(self._idle)
        return sum(idle for idle, is_open in zip(self._idle, self._open, strict=True) if is_open)

    def resident(self, slots: Slots) -> Mask:
        """Which of ``slots`` are readable; ``ABSENT`` is not."""
        mask: Mask = self.state.take(slots) == RESIDENT
        return mask

    def vacant(self, slots: npt.NDArray[np.integer]) -> Mask:
        """Which of ``slots`` are free or withheld."""
        state = self.state.take(slots)
        mask: Mask = (state == FREE) | (state == WITHHELD)
        return mask

    def may_go(self, slots: Slots) -> Mask:
        """Which of ``slots``, resident ones, may be given up for room."""
        mask: Mask = self.operations.take(slots) == 0
        return mask if self._all_open else mask & self._open[self._path_of(slots)]

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
        self._count_idle(slots, 1)

    def restore(self, slots: Slots) -> None:
        """Vacant → resident, the last of ``slots`` under the oldest ticket. Then rebuild_free."""
        free = int(np.count_nonzero(self.state.take(slots) == FREE))
        self._move(free, FREE, RESIDENT)
        self._move(len(slots) - free, WITHHELD, RESIDENT)
        self.state[slots] = RESIDENT
        self.ticket[slots] = self._new_tickets(len(slots))[::-1]
        self._count_idle(slots, 1)

    def drop(self, slots: Slots) -> None:
        """Distinct storing or resident slots lose their key; free are those that nothing uses."""
        state = self.state.take(slots)
        idle = slots[self.operations.take(slots) == 0]
        self.state[slots] = _AFTER_DROP.take(state)
        storing = int(np.count_nonzero(state == STORING))
        self._move(storing, STORING, ABANDONED)
        self._move(len(slots) - storing, RESIDENT, RETIRED)
        self._count_idle(idle, -1)
        self.set_free(idle, RETIRED)

    def evict(self, slots: Slots) -> None:
        """Resident and used by nothing → free."""
        require(
            np.count_nonzero(self.resident(slots)) == len(slots)
            and np.count_nonzero(self.may_go(slots)) == len(slots),
            "the policy gave up a slot in use",
        )
        self._count_idle(slots, -1)
        self.set_free(slots, RESIDENT)

    def begin_operations(self, slots: Slots, *, distinct: bool) -> None:
        """One operation more for each row of resident ``slots``."""
        idle = slots[self.operations.take(slots) == 0]
        self._count_idle(idle if distinct else np.unique(idle), -1)
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
        self._count_idle(ready, 1)
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

    def set_open(self, paths: Mask) -> bool:
        """Which paths take stores from now on; whether one does that did not. O(slots)."""
        before, self._open = self._open, paths.copy()
        self._all_open = bool(paths.all())
        closing, opening = before & ~paths, paths & ~before
        if closing.any():
            gone = self.free.remove(closing[self._path_of(self.free.view())])
            self.state[gone] = WITHHELD
            self._move(len(gone), FREE, WITHHELD)
        if opening.any():
            back = _numbers(self.state[: self.total] == WITHHELD)
            self.set_free(back[opening[self._path_of(back)]], WITHHELD)
        return bool(opening.any())

    def set_free(self, slots: Slots, was: int) -> None:
        """Nothing uses ``slots`` any more; those on closed paths are withheld."""
        if not self._all_open:
            is_open = self._open[self._path_of(slots)]
            withheld, slots = slots[~is_open], slots[is_open]
            self.state[withheld] = WITHHELD
            self._move(len(withheld), was, WITHHELD)
        self.state[slots] = FREE
        self._move(len(slots), was, FREE)
        self.free.add(slots)

    def rebuild_free(self) -> None:
        """Put all free slots in order again. O(slots)."""
        self.free.reset(self.total, _numbers(self.state[: self.total] == FREE))

    def resize(self, slots: int) -> None:
        """Slots beyond must be vacant. O(slots)."""
        closed = ~self._open
        self.set_open(np.ones_like(closed))
        self.state = resized(self.state[: self.total], slots + 1)
        self.state[slots] = FREE
        self.operations = resized(self.operations, slots)
        self.ticket = resized(self.ticket, slots)
        self.count[FREE] += slots - self.total
        self.total = slots
        self.rebuild_free()
        self.set_open(~closed)

    def assert_sums(self, keys: int) -> None:
        """O(1): counters, free slots and the number of keys agree."""
        count = self.count
        if not (
            sum(count) == self.total
            and min(count) >= 0
            and count[FREE] == len(self.free)
            and count[STORING] + count[RESIDENT] == keys
            and min(self._idle) >= 0
            and sum(self._idle) <= count[RESIDENT]
        ):
            raise AssertionError(
                f"slots do not add up: {count} of {self.total}, {self._idle} idle, "
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
            np.array_equal(
                idle, (state == FREE) | (state == WITHHELD) | ((state == RESIDENT) & idle)
            ),
            "a free slot is used, or one that is neither vacant nor resident is used by nothing",
        )
        per_path = self._per_path(_numbers(idle & (state == RESIDENT)))
        require(per_path == self._idle, f"{per_path} idle, counted {self._idle}")
        for vacant, is_open in ((FREE, True), (WITHHELD, False)):
            paths = self._path_of(_numbers(state == vacant))
            require(bool((self._open[paths] == is_open).all()), "free on a closed path, or reverse")
        free = np.sort(self.free.view())
        require(np.array_equal(free, (state == FREE).nonzero()[0]), "the free slots differ")
        require(not self.ticket.size or self.ticket.max() < self.next_ticket, "a ticket to come")

    def _new_tickets(self, count: int) -> Tickets:
        first = self.next_ticket
        self.next_ticket += count
        return np.arange(first, first + count)

    def _count_idle(self, slots: Slots, each: int) -> None:
        if self._path_count == 1:
            self._idle[0] += each * len(slots)
        elif len(slots):
            for path, count in enumerate(self._per_path(slots)):
                self._idle[path] += each * count

    def _per_path(self, slots: Slots) -> list[int]:
        counts: list[int] = np.bincount(self._path_of(slots), minlength=self._path_count).tolist()
        return counts

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
