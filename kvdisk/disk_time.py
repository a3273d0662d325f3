"""What the disks of a rank have made of its loads and of its stores, since that was last told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from kvdisk.transfer import Direction, Progress, TransferEngine

_NS_PER_S: Final = 1_000_000_000
_TOLD_AFTER_NS: Final = 250_000_000  # of being busy

_ByShard: TypeAlias = dict[tuple[int, int], Progress]  # by the path's index and the shard's


class DiskTime:
    """Bytes, and the seconds that they took, for a ``RateMeter``."""

    def __init__(self) -> None:
        self._told: dict[Direction, _ByShard] = {each: {} for each in Direction}

    def since_told(
        self, engines: Mapping[int, TransferEngine]
    ) -> dict[Direction, tuple[int, float]]:
        """The bytes of all paths, by whose index they come, and the seconds of the shard that was
        busy longest.

        A direction is told when nothing is being moved, or has been for a while: before, what is on
        its way has taken time and brought no bytes, so that the disk would look slow. A path whose
        engine was replaced begins anew.
        """
        told = {}
        for direction, before in self._told.items():
            now = {
                (index, shard): progress
                for index, engine in engines.items()
                for shard, progress in enumerate(engine.progress(direction))
            }
            moved, busy_ns = _between(before, now)
            busy = any(progress.busy for progress in now.values())
            if busy_ns > 0 and (not busy or busy_ns >= _TOLD_AFTER_NS):
                self._told[direction] = now
                told[direction] = moved, busy_ns / _NS_PER_S
        return told


def _between(before: _ByShard, now: _ByShard) -> tuple[int, int]:
    moved, busy_ns = 0, 0
    for shard, progress in now.items():
        began = before.get(shard, Progress())
        if progress.busy_ns < began.busy_ns or progress.bytes < began.bytes:
            began = Progress()
        if progress.busy_ns > began.busy_ns:
            moved += progress.bytes - began.bytes
            busy_ns = max(busy_ns, progress.busy_ns - began.busy_ns)
    return moved, busy_ns
