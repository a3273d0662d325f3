"""The free slots, handed out as neighbours where there are any.

Small blocks in neighbouring slots merge into one larger I/O, so a call that stores a run of blocks
should get a run of slots. Slots that were stored together are evicted together, so runs come back
as runs if nothing scatters them: freed slots are sorted before they are handed out again.

What always holds: a slot is in here at most once, and a call's work is bounded by its own size (a
window near the top of a stack is searched, never all of it).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvdisk.key_index import Mask, Slots, require

_WINDOW: Final = 512


class FreeSlots:
    """A stack of free slots whose top is kept in descending order. 4 bytes a slot."""

    def __init__(self, slots: int) -> None:
        self._stack = np.arange(slots - 1, -1, -1, dtype=np.int32)
        self._count = slots
        self._sorted = slots  # how many at the top are in descending order

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> Slots:
        """Remove and return ``count`` slots in ascending order, as close together as can be."""
        require(0 < count <= self._count, "more slots wanted than are free")
        stack, top = self._stack, self._count
        self._count -= count
        numbers = stack.data  # the same memory as Python numbers
        if self._sorted >= count and numbers[top - count] - numbers[top - 1] == count - 1:
            self._sorted -= count
            run: Slots = stack[top - count : top][::-1].copy()
            return run
        window = min(top, max(4 * count, _WINDOW))
        base = top - window
        if self._sorted < window:
            stack[base:top] = np.sort(stack[base:top])[::-1]
            self._sorted = window
        self._sorted -= count
        near = stack[base:top]
        spans = near[: window - count + 1] - near[count - 1 :]
        start = base + int(spans.argmin())
        taken: Slots = stack[start : start + count][::-1].copy()
        stack[start : top - count] = stack[start + count : top].copy()
        return taken

    def add(self, slots: Slots) -> None:
        """Take back slots that are not in here."""
        count = len(slots)
        top = self._count
        require(top + count <= len(self._stack), "more slots freed than there are")
        self._stack[top : top + count] = np.sort(slots)[::-1]
        self._count += count
        joined = not top or not count or self._stack[top] < self._stack[top - 1]
        self._sorted = self._sorted + count if joined else count

    def remove(self, out: Mask) -> Slots:
        """Remove and return those that ``out`` marks in ``view``. O(free slots)."""
        free = self.view()
        gone: Slots = free[out]
        in_order = int(np.count_nonzero(~out[self._count - self._sorted :]))
        self._stack[: self._count - len(gone)] = free[~out]
        self._count -= len(gone)
        self._sorted = in_order
        return gone

    def reset(self, slots: int, free: Slots) -> None:
        """Start again with ``slots`` slots in all, of which ``free`` are free."""
        require(len(free) <= slots, "more slots free than there are")
        self._stack = np.empty(slots, dtype=np.int32)
        self._stack[: len(free)] = np.sort(free)[::-1]
        self._count = self._sorted = len(free)

    def view(self) -> Slots:
        """The free slots in no order; only for looking."""
        return self._stack[: self._count]


def run_count(slots: Slots) -> int:
    """How many runs of neighbours ascending ``slots`` consist of."""
    return 1 + int(np.count_nonzero(np.diff(slots) != 1)) if len(slots) else 0
