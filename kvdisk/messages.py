"""What the scheduler's half of the tier and its workers tell one another.

Plain data that pickles: numbers, bytes and arrays, so that a serving engine can carry it between
its processes in whatever way it has. Nothing here does anything.

Scheduler to every worker: ``Transfer`` and ``Clear``. Each worker to the scheduler: once
``RankOpened``, then ``RankReport``. Messages in one direction arrive in the order they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvdisk.transfer import Direction


@dataclass(frozen=True)
class Transfer:
    """A batch of blocks to move: ``keys[i]`` between ``slots[i]`` and block ``block_ids[i]``.

    ``slots`` (int32) are the tier's numbers, the same in every rank; ``block_ids`` int64.
    ``positions`` says which of the caller's keys these are. With no rows there is nothing to do.
    ``within_s``: when to end as timed out what has not moved; None: as configured.
    """

    id: int
    direction: Direction
    keys: list[bytes]
    slots: npt.NDArray[np.int32]
    block_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.intp]
    within_s: float | None = None

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class Clear:
    """Make everything stored so far unreadable, durably.

    ``number`` grows from clear to clear, over restarts too, and is no lower than the time in
    nanoseconds since 1970: every rank keeps the last one.
    """

    id: int
    number: int


@dataclass(frozen=True)
class PathState:
    """Whether a path takes part, as its rank sees it, and since when or why not in ``reason``."""

    loads: bool = True
    stores: bool = True
    reason: str = ""


def worst_of(states: Iterable[PathState]) -> PathState:
    """What a path can do where all of its ranks must."""
    every = list(states)
    return PathState(
        loads=all(state.loads for state in every),
        stores=all(state.stores for state in every),
        reason=next((state.reason for state in every if state.reason), ""),
    )


@dataclass(frozen=True)
class RankOpened:
    """A worker has opened its files. ``restored_*`` is what proved itself there, row by row.

    ``restored_slots`` (int64) are the tier's numbers; ``restored_sequences`` (uint64) are higher
    for what was stored later, on any path, as well as the machine's clock was set;
    ``restored_keys`` are zero-padded ``(n, 64)`` bytes, of which
    ``restored_key_lengths`` (uint8) count. ``clears`` is the number of the last clear that they
    have seen, ``paths`` the state of every path. ``facts`` is for people: a log line and
    ``health``.
    """

    rank: int
    world_size: int
    slot_bytes: int
    slot_count: int
    restored_slots: npt.NDArray[np.int64]
    restored_sequences: npt.NDArray[np.uint64]
    restored_keys: npt.NDArray[np.uint8]
    restored_key_lengths: npt.NDArray[np.uint8]
    clears: int
    paths: tuple[PathState, ...]
    facts: dict[str, object]

    def without_restored(self) -> RankOpened:
        """The same, without the memory of what was restored."""
        return replace(
            self,
            restored_slots=self.restored_slots[:0].copy(),
            restored_sequences=self.restored_sequences[:0].copy(),
            restored_keys=self.restored_keys[:0].copy(),
            restored_key_lengths=self.restored_key_lengths[:0].copy(),
        )


@dataclass(frozen=True)
class RankResult:
    """How one rank's share of a transfer ended; arrays as in ``TransferResult``."""

    transfer_id: int
    statuses: npt.NDArray[np.uint8]
    errors: npt.NDArray[np.int32]
    quarantined: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class RankReport:
    """What has happened in one rank since its last report.

    ``source_free``: stores whose blocks this rank no longer reads. ``released_slots`` have left
    quarantine. ``paths`` is the state of every path, or None when unchanged. ``cleared``: the ids
    of the ``Clear`` messages that are durable now. ``moved``: bytes for loads and for stores,
    and the seconds that the disk was at it, both since they were last told.
    """

    rank: int
    source_free: list[int] = field(default_factory=list)
    results: list[RankResult] = field(default_factory=list)
    released_slots: list[int] = field(default_factory=list)
    paths: tuple[PathState, ...] | None = None
    cleared: list[int] = field(default_factory=list)
    moved: dict[Direction, tuple[int, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.source_free
            or self.results
            or self.released_slots
            or self.paths is not None
            or self.cleared
            or self.moved
        )


class Worker(Protocol):
    """What ``DiskTier`` needs of a rank's half: ``TierWorker``, or a simulated one."""

    def submit(self, transfer: Transfer, *, event: int = 0) -> None: ...

    def clear(self, message: Clear) -> None: ...

    def poll(self) -> RankReport: ...

    def wait(self, timeout_s: float | None = None) -> bool: ...

    def fileno(self) -> int: ...

    def stats(self) -> Mapping[int, Mapping[str, Any]]: ...

    def close(self, timeout_s: float = 5.0) -> int: ...
