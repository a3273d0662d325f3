"""A queue of slots, oldest first, in flat arrays: the one structure under every eviction policy.

A linked list would move one slot at a time, each step a Python statement. Here a slot's place is a
position in a ring: pushing it again writes a new entry and makes the old one void, because an entry
counts only while the slot's position says so. Moving 64 slots is two array assignments.

Void entries must go, or the ring would fill. A sweep does that in small steps, paid by the pushes:
it walks from the young end to the old one and slides what is still valid together, keeping order.

What always holds:
    * A slot is in the queue at most once, and only under its last position.
    * Order is that of the last push; a sweep never changes it.
    * Work per call is proportional to the slots it moves (amortised; a sweep step is bounded).
"""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvdisk.key_index import Mask, Slots, require

Number = TypeVar("Number", bound=np.generic)

_OUT: Final = -1
# Entries that one step of the sweep looks at, and how many each push pays for. With a ring of three
# entries a slot, a sweep begun at three quarters ends before 9/32 of a slot's count more is pushed.
_SWEEP_STEP: Final = 1024
_SWEEP_PACE: Final = 8


class SlotQueue:
    """Slots from oldest to youngest. 20 bytes a slot."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._capacity = 3 * slots + 64
        self._ring = np.full(self._capacity, 0, dtype=np.int32)  # written: no page faults later
        self._position = np.full(slots, _OUT, dtype=np.int64)
        self._head = 0  # positions in [head, tail) are in use; the ring index is modulo capacity
        self._tail = 0
        # While sweeping, [swept, kept) is a gap, [head, swept) is yet to be looked at.
        self._sweeping = False
        self._swept = 0
        self._kept = 0
        self._debt = 0

    def push(self, slots: Slots) -> None:
        """Make ``slots`` the youngest, the last of them youngest of all; wherever they were."""
        count = len(slots)
        if count > self._slots:
            for start in range(0, count, self._slots):
                self.push(slots[start : start + self._slots])
            return
        if self._tail - self._head + count > self._capacity:
            self._sweep_all()
        start, end = self._tail, self._tail + count
        self._write(start, slots)
        self._position[slots] = np.arange(start, end)
        self._tail = end
        if not self._sweeping and end - self._head > self._capacity * 3 // 4:
            self._sweep_begin()
        if self._sweeping:
            self._debt += _SWEEP_PACE * count
            while self._sweeping and self._debt >= _SWEEP_STEP:
                self._debt -= _SWEEP_STEP
                self._sweep_step(_SWEEP_STEP)

    def remove(self, slots: Slots) -> None:
        """Take slots out; those that are not in stay out."""
        self._position[slots] = _OUT

    def has(self, slots: Slots) -> Mask:
        inside: Mask = self._position.take(slots) != _OUT
        return inside

    def pop(self, count: int) -> Slots:
        """Remove and return the ``count`` oldest, oldest first; fewer when there are fewer."""
        pieces: list[Slots] = []
        missing = count
        while missing > 0 and self._head < self._tail:
            limit = self._swept if self._sweeping else self._tail
            end = min(limit, self._head + 2 * missing + 32)
            slots = self._read(self._head, end)
            valid = (self._position.take(slots) == np.arange(self._head, end)).nonzero()[0]
            if len(valid) > missing:
                valid = valid[:missing]
                end = self._head + int(valid[-1]) + 1
            slots = slots.take(valid)
            self._position[slots] = _OUT
            missing -= len(slots)
            pieces.append(slots)
            self._advance_head(end)
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)

    def ordered(self) -> Slots:
        """Everything in the queue, oldest first. O(all slots): for inspection and tests."""
        inside = (self._position != _OUT).nonzero()[0]
        order: npt.NDArray[np.intp] = self._position.take(inside).argsort()
        slots: Slots = inside.take(order).astype(np.int32)
        return slots

    def clear(self) -> None:
        self._position.fill(_OUT)
        self._head = self._tail
        self._sweeping = False

    def resized(self, slots: int) -> SlotQueue:
        """A new queue for ``slots`` slots in the same order. Those beyond must have left."""
        queue = SlotQueue(slots)
        content = self.ordered()
        require(not len(content) or content.max() < slots, "a slot beyond the new size is queued")
        queue.push(content)
        return queue

    def _sweep_begin(self) -> None:
        self._sweeping = True
        self._swept = self._kept = self._tail
        self._debt = 0

    def _sweep_step(self, entries: int) -> None:
        low = max(self._head, self._swept - entries)
        slots = self._read(low, self._swept)
        valid = slots[self._position.take(slots) == np.arange(low, self._swept)]
        self._swept = low
        if len(valid):
            kept = self._kept - len(valid)
            self._write(kept, valid)
            self._position[valid] = np.arange(kept, self._kept)
            self._kept = kept
        self._advance_head(self._head)

    def _sweep_all(self) -> None:
        """Only small queues come here: in others the steps keep ahead of the pushes."""
        if self._sweeping:
            self._sweep_step(self._capacity)
        self._sweep_begin()
        self._sweep_step(self._capacity)

    def _advance_head(self, head: int) -> None:
        self._head = head
        if self._sweeping and head >= self._swept:
            self._head = self._kept
            self._sweeping = False

    def _write(self, position: int, slots: Slots) -> None:
        start = position % self._capacity
        fits = self._capacity - start
        if len(slots) <= fits:
            self._ring[start : start + len(slots)] = slots
        else:
            self._ring[start:] = slots[:fits]
            self._ring[: len(slots) - fits] = slots[fits:]

    def _read(self, position: int, end: int) -> Slots:
        start = position % self._capacity
        stop = start + end - position
        if stop <= self._capacity:
            return self._ring[start:stop]
        return np.concatenate([self._ring[start:], self._ring[: stop - self._capacity]])


def resized(array: npt.NDArray[Number], size: int) -> npt.NDArray[Number]:
    """A copy of one-dimensional ``array`` with ``size`` elements, zeros where there were none."""
    copy: npt.NDArray[Number] = np.zeros(size, dtype=array.dtype)
    keep = min(size, len(array))
    copy[:keep] = array[:keep]
    return copy
