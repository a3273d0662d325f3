"""Which slot lies where: how many there are, in which path's file, at which place in it.

A tier has one number for each slot, over all its paths and the same in every rank. Stripes of
neighbouring slots take turns on the paths, so that a prefix is read from all disks at once while
small blocks can still be read together.

What always holds: placement follows from the configuration and the block's size alone, so that
scheduler and workers, in whatever process, agree without asking. Every path has equally many slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdisk.config import TierConfig
from kvdisk.errors import ConfigError
from kvdisk.rank_file import record_file_bytes, slots_within
from kvdisk.units import display_size, format_size

_SLOT_ALIGNMENT: Final = 4096
_STRIPE_BYTES: Final = 1 << 20
_STRIPE_SLOTS_MAX: Final = 32
_SLOTS_MAX: Final = 2**31 - 1

Numbers = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Placement:
    """``path_count`` files of ``slots_per_path`` slots of ``slot_bytes``, for each rank.

    ``stripe_slots`` neighbouring slots of a file are neighbours in the tier as well.
    """

    slot_bytes: int
    path_count: int
    slots_per_path: int
    stripe_slots: int

    @classmethod
    def of(cls, config: TierConfig, block_bytes: int, world_size: int) -> Placement:
        """For blocks of ``block_bytes`` (the largest of any rank) on ``world_size`` ranks.

        Raises ConfigError when the capacity holds not even one block of every rank on every path.
        """
        slot_bytes = -(-block_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        path_count = len(config.paths)
        stripe_slots = min(max(1, _STRIPE_BYTES // slot_bytes), _STRIPE_SLOTS_MAX)
        files = path_count * world_size
        slots = slots_within(config.capacity_bytes // files, slot_bytes)
        if path_count > 1:
            slots -= slots % stripe_slots
        if slots < 1:
            least = files * (stripe_slots * slot_bytes + record_file_bytes(stripe_slots))
            raise ConfigError(
                f"capacity={format_size(config.capacity_bytes)} is too small for blocks of "
                f"{display_size(slot_bytes)} on {world_size} ranks and {path_count} paths: it "
                f"takes at least {display_size(least)}, and is of use from many times that."
            )
        slots = min(slots, _SLOTS_MAX // path_count)
        return cls(slot_bytes, path_count, slots, stripe_slots)

    @property
    def slot_count(self) -> int:
        """Slots of one rank over all paths."""
        return self.path_count * self.slots_per_path

    def path_of(self, slots: Numbers) -> npt.NDArray[np.int64]:
        """The index of each slot's path."""
        numbers = np.asarray(slots, dtype=np.int64)
        return numbers // self.stripe_slots % self.path_count

    def local(self, slots: Numbers) -> npt.NDArray[np.int64]:
        """Each slot's number within its path's file."""
        numbers = np.asarray(slots, dtype=np.int64)
        stripes, within = np.divmod(numbers, self.stripe_slots)
        return stripes // self.path_count * self.stripe_slots + within

    def slot(self, path: int, local: Numbers) -> npt.NDArray[np.int64]:
        """The tier's numbers of slots of one path's file: what ``path_of`` and ``local`` undo."""
        numbers = np.asarray(local, dtype=np.int64)
        stripes, within = np.divmod(numbers, self.stripe_slots)
        return (stripes * self.path_count + path) * self.stripe_slots + within

    def split(self, slots: Numbers) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
        """Each path that has any of ``slots``, with the positions of those."""
        if self.path_count == 1:
            if len(slots):
                yield 0, np.arange(len(slots))
            return
        paths = self.path_of(slots)
        for path in np.unique(paths).tolist():
            yield path, np.flatnonzero(paths == path)


def share_of_one_path(config: TierConfig) -> TierConfig:
    """The configuration of each path's engine: an equal part of the ring and of the queue."""
    count = len(config.paths)
    if count == 1:
        return config
    ring_bytes = config.ring_bytes // count // _SLOT_ALIGNMENT * _SLOT_ALIGNMENT
    try:
        return replace(
            config,
            ring_bytes=ring_bytes,
            store_queue_bytes=max(_SLOT_ALIGNMENT, config.store_queue_bytes // count),
        )
    except ConfigError as error:
        raise ConfigError(f"shared by {count} paths: {error}") from error
