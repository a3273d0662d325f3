"""Clears under way over all ranks: which one each rank's files have seen, which are durable.

What always holds: a clear is durable only once every rank's files have seen it, or a later one; one
that some rank has missed, because its process was not there or ended first, says so until another
has been begun.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvdisk.messages import Clear


@dataclass(eq=False)
class _Pending:
    """``durable_with`` is the clear that every rank must have seen; None: it is yet to be begun."""

    number: int
    durable_with: int | None


class Clears:
    """Clears by id, until they are durable."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._ranks: dict[int, int] = {}  # the last one that each rank has made durable

    def attach(self, rank: int, number: int) -> None:
        """A process of ``rank`` is there, whose files have seen clear ``number``."""
        self._ranks[rank] = number
        self._forget_durable()
        for each in self._pending.values():
            if each.number > number:  # the process that was told of it is no more
                each.durable_with = None

    @property
    def another_needed(self) -> bool:
        """What ranks hold may be older than a clear, or differ under one key."""
        missed = any(each.durable_with is None for each in self._pending.values())
        return missed or len(set(self._ranks.values())) > 1

    def begin(self, clear_id: int, *, all_there: bool) -> Clear:
        """A new one, for every rank; ``all_there``: so it will reach them."""
        numbers = [each.number for each in self._pending.values()]
        # The time, so that clears of disks that were never in use together compare as well.
        number = max(1 + max([*self._ranks.values(), *numbers], default=0), time.time_ns())
        self._pending[clear_id] = _Pending(number, None)
        if all_there:
            for each in self._pending.values():
                if each.durable_with is None:
                    each.durable_with = number
        return Clear(clear_id, number)

    def durable(self, clear_id: int) -> bool:
        return clear_id not in self._pending

    def take(self, rank: int, clear_ids: Iterable[int]) -> None:
        """``rank`` has made these durable. Unknown ones change nothing."""
        for clear_id in clear_ids:
            if clear_id in self._pending:
                self._ranks[rank] = self._pending[clear_id].number
        self._forget_durable()

    def _forget_durable(self) -> None:
        seen = min(self._ranks.values(), default=0)
        self._pending = {
            clear_id: each
            for clear_id, each in self._pending.items()
            if each.durable_with is None or each.durable_with > seen
        }
