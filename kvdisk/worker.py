"""One rank's half of the tier: its files and engines, on every path.

A worker does what the scheduler tells it and reports what came of it. One engine per path, so that
a disk that hangs or dies takes nothing else with it.

What always holds:
    * Every transfer that was submitted is reported exactly once, with one status per row, and
      ``source_free`` of a store no later.
    * No call waits for a disk, except ``wait`` and ``close``, both with a limit.
    * A released slot is reported after the result that called it quarantined.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvdisk.config import TierConfig
from kvdisk.disk_path import DiskPath
from kvdisk.disk_time import DiskTime
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.identity import Identity
from kvdisk.layout import Layout
from kvdisk.memory import SCHEDULER_BYTES_PER_SLOT, WORKER_BYTES_PER_SLOT, require_slot_memory
from kvdisk.messages import Clear, PathState, RankOpened, RankReport, RankResult, Transfer
from kvdisk.path_health import error_name
from kvdisk.placement import Placement, share_of_one_path
from kvdisk.quiet_log import QuietLog
from kvdisk.rank_pages import disk_trouble
from kvdisk.room import require_room
from kvdisk.transfer import (
    FAILURES,
    Direction,
    Events,
    RestoredRecords,
    RowStatus,
    TransferEngine,
    TransferResult,
)

_LOOK_EVERY_S: Final = 1.0  # while somebody waits for what is under way
_LEARNS_LATER: Final = "and learns of it when it is opened beside the others: never use it alone"

Number = TypeVar("Number", bound=np.generic)

_log = logging.getLogger("kvdisk")


@dataclass(eq=False)
class _Open:
    """A transfer under way: one part for each path that it touches."""

    transfer: Transfer
    statuses: npt.NDArray[np.uint8]
    errors: npt.NDArray[np.int32]
    quarantined: npt.NDArray[np.bool_]
    parts: int = 0
    sources: int = 0  # parts that may still read the blocks


@dataclass(frozen=True)
class _Part:
    """The rows of a transfer that lie on one path."""

    whole: _Open
    positions: npt.NDArray[np.intp]


class TierWorker:
    """The files and engines of ``rank``. Not thread-safe: one thread calls it. Use ``open``."""

    def __init__(
        self,
        paths: dict[int, DiskPath],
        lost: dict[int, str],
        placement: Placement,
        layout: Layout,
        rank: int,
        world_size: int,
        wake_fd: int,
        clock: Callable[[], float],
        slot_memory_bytes: int,
    ) -> None:
        """Takes over ``paths``, by index, and ``wake_fd``; ``lost`` says why others are not."""
        self._paths = paths
        self._lost = lost
        self._placement = placement
        self._layout = layout
        self._rank = rank
        self._world_size = world_size
        self._slot_memory_bytes = slot_memory_bytes  # of worker and scheduler, for people
        self._wake_fd = wake_fd
        self._clock = clock
        self._quiet = QuietLog(_log, clock)
        self._open: dict[int, _Open] = {}
        self._parts: dict[tuple[int, int], _Part] = {}  # by path and the path's id
        self._held: defaultdict[int, list[tuple[_Open, int]]] = defaultdict(list)
        self._clears: dict[int, int] = {}  # paths on which they are not yet durable
        self._report = RankReport(rank)
        self._states: tuple[PathState, ...] | None = None
        self._disk_time = DiskTime()
        self._abandoned = 0
        self._process = os.getpid()
        self._closed = False
        self._selector = select.epoll()
        self._selector.register(wake_fd, select.EPOLLIN)
        self._watched: dict[TransferEngine, int] = {}  # engines in the selector, their descriptors
        self._watch()

    @classmethod
    def open(
        cls,
        layout: Layout,
        identity: Identity,
        config: TierConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        block_bytes: int | None = None,
        direct_stores: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> TierWorker:
        """Open the files of ``rank`` (the engine's global rank) on every path of ``config``.

        ``block_bytes`` is the largest block of any rank, where ranks differ. ``direct_stores``:
        blocks in aligned host memory are written without a copy. One of several paths
        that fails is left out with a warning; its slots are misses.

        Raises ConfigError, BusyError or DeviceError when this cannot work.
        """
        placement = Placement.of(config, block_bytes or layout.block_bytes, world_size)
        require_room(config, identity, placement, rank, world_size)
        config.check_memory()
        require_slot_memory(placement.slot_count, WORKER_BYTES_PER_SLOT, config.ring_bytes)
        paths: dict[int, DiskPath] = {}
        lost: dict[int, str] = {}
        # For those two alone: what a path raises names that path, and leaves only it out.
        with disk_trouble("eventfd or epoll for", config.paths[0]), ExitStack() as undo:
            wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, wake_fd)
            undo.callback(_undo_open, paths)
            for index in range(len(config.paths)):
                try:
                    paths[index] = DiskPath.open(
                        index,
                        layout,
                        identity,
                        share_of_one_path(config),
                        placement,
                        rank,
                        world_size,
                        wake_fd,
                        direct_stores=direct_stores,
                    )
                except (DeviceError, ConfigError) as error:
                    if index == len(config.paths) - 1 and not paths:  # the last hope
                        raise
                    _log.warning("path left out, its slots are misses: %s", error)
                    lost[index] = str(error)
            clears = max(path.file.header.clears for path in paths.values())
            _each(paths, lost, lambda path: path.catch_up(clears))
            per_slot = WORKER_BYTES_PER_SLOT + SCHEDULER_BYTES_PER_SLOT[config.eviction]
            memory = placement.slot_count * per_slot
            opened = cls(paths, lost, placement, layout, rank, world_size, wake_fd, clock, memory)
            undo.callback(opened._selector.close)
            _each(paths, lost, lambda path: path.label(identity))  # last, for it cannot be undone
            undo.pop_all()
        return opened

    def take_opened(self) -> RankOpened:
        """The first message to the scheduler. Given once: it holds what was restored."""
        restored = {index: path.engine.take_restored() for index, path in self._paths.items()}
        slots = [self._placement.slot(index, each.slots) for index, each in restored.items()]
        return RankOpened(
            rank=self._rank,
            world_size=self._world_size,
            slot_bytes=self._placement.slot_bytes,
            slot_count=self._placement.slot_count,
            restored_slots=_joined(slots),
            restored_sequences=_joined([each.sequences for each in restored.values()]),
            restored_keys=_joined([each.key_rows for each in restored.values()]),
            restored_key_lengths=_joined([each.key_lengths for each in restored.values()]),
            clears=max(path.file.header.clears for path in self._paths.values()),
            paths=self._path_states(),
            facts=self._facts(restored),
        )

    # --- doing what the scheduler says

    def submit(self, transfer: Transfer, *, event: int = 0) -> None:
        """Begin a transfer. Never blocks and never fails: what cannot be done is reported so.

        ``event`` is what the blocks must wait for, as in ``submit_store`` and ``submit_load``. A
        row with a negative block id has no block in this rank: it ends as REFUSED.
        """
        assert transfer.id not in self._open, "a transfer is submitted once"
        rows = len(transfer)
        opened = _Open(
            transfer,
            statuses=np.full(rows, RowStatus.REFUSED, dtype=np.uint8),
            errors=np.zeros(rows, dtype=np.int32),
            quarantined=np.zeros(rows, dtype=np.bool_),
        )
        self._open[transfer.id] = opened
        if not self._closed:
            moved = np.flatnonzero(transfer.block_ids >= 0)
            for index, part in self._placement.split(transfer.slots[moved]):
                self._submit_part(index, opened, moved[part], event)
        if opened.sources == 0 and transfer.direction is Direction.STORE:
            self._report.source_free.append(transfer.id)
        self._finish_if_done(opened)
        if self._report and not self._closed:
            os.eventfd_write(self._wake_fd, 1)

    def clear(self, message: Clear) -> None:
        """Make everything stored so far unreadable; reported when that is durable.

        Until then loads miss and stores are refused.
        """
        for why in self._lost.values():
            _log.warning("a path that was left out misses this clear, %s (%s)", _LEARNS_LATER, why)
        self._clears[message.id] = len(self._paths)
        for path in self._paths.values():
            path.clear(message)
        self._tend()

    def cancel_waiting(self, transfer_id: int) -> None:
        """End as refused what has not begun of a store; what has begun goes on."""
        for (index, sent_id), part in self._parts.items():
            if part.whole.transfer.id == transfer_id:
                self._paths[index].cancel_waiting(sent_id)

    # --- telling what came of it

    def poll(self) -> RankReport:
        """What has happened since the last call; never blocks. Also after ``close``."""
        if not self._closed:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            self._tend()
        for path in self._paths.values():
            self._take(path, path.poll(self._clock()))
        states = self._path_states()
        changed = None if states == self._states else states
        self._states = states
        engines = {index: path.engine for index, path in self._paths.items()}
        report = replace(self._report, paths=changed, moved=self._disk_time.since_told(engines))
        self._report = RankReport(self._rank)
        return report

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block, without the GIL, until ``poll`` may have something; False when time is over."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed and not self._report:
            left = None if until is None else until - time.monotonic()
            within = self._tend_within(left)
            if self._parts:
                within = _LOOK_EVERY_S if within is None else min(within, _LOOK_EVERY_S)
            if self._selector.poll(within):
                return True
            self._tend()
            if self._parts:  # the engine's thread may hang that has them
                for path in self._paths.values():
                    self._take(path, path.poll(self._clock()))
            if left is not None and left <= 0:
                break
        return bool(self._report)

    def fileno(self) -> int:
        """A descriptor that is readable while ``poll`` may have something to give."""
        return self._selector.fileno()

    def stats(self) -> dict[int, dict[str, object]]:
        """Each path's engine counters, by path index; see ``TransferEngine.stats``."""
        return {index: path.engine.stats() for index, path in self._paths.items()}

    # --- ending it

    def close(self, timeout_s: float = 5.0) -> int:
        """End everything: drain until the limit, then time out what is left. Idempotent.

        Returns how many I/Os a hanging disk forced to abandon; ``poll`` still gives the last
        results. In a forked child it only lets go of the files: all else is the parent's.
        """
        if self._closed:
            return self._abandoned
        if os.getpid() != self._process:
            self._closed = True
            for path in self._paths.values():
                path.file.close()
            return 0
        until = time.monotonic() + timeout_s
        waker = select.poll()  # nobody takes what engines tell, which would stay readable
        waker.register(self._wake_fd, select.POLLIN)
        while time.monotonic() < until and any(each.clearing for each in self._paths.values()):
            waker.poll(1000 * (self._tend_within(until - time.monotonic()) or 0))
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            self._tend()
        for path in self._paths.values():
            self._abandoned += path.close(max(0.0, until - time.monotonic()))
        self._closed = True
        self._selector.close()
        os.close(self._wake_fd)
        return self._abandoned

    def __enter__(self) -> TierWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- steps of the above

    def _submit_part(
        self, index: int, opened: _Open, positions: npt.NDArray[np.intp], event: int
    ) -> None:
        transfer, path = opened.transfer, self._paths.get(index)
        if path is None:
            return
        keys = transfer.keys
        if len(positions) < len(keys):
            keys = [keys[position] for position in positions.tolist()]
        slots = self._placement.local(transfer.slots[positions])
        blocks = transfer.block_ids[positions]
        sent_id = path.submit(transfer.direction, keys, slots, blocks, event, transfer.within_s)
        if sent_id is None:
            return
        self._parts[index, sent_id] = _Part(opened, positions)
        opened.parts += 1
        opened.sources += transfer.direction is Direction.STORE

    def _take(self, path: DiskPath, events: Events) -> None:
        for sent_id in events.source_free:
            opened = self._parts[path.index, sent_id].whole
            opened.sources -= 1
            if opened.sources == 0:
                self._report.source_free.append(opened.transfer.id)
        for result in events.finished:
            part = self._parts.pop((path.index, result.transfer_id))
            self._log_failures(path, result, part)
            self._take_result(result, part)
        for slot in self._placement.slot(path.index, np.array(events.released_slots)).tolist():
            self._released(slot)

    def _take_result(self, result: TransferResult, part: _Part) -> None:
        opened, positions = part.whole, part.positions
        opened.statuses[positions] = result.statuses
        opened.errors[positions] = result.errors
        opened.quarantined[positions] = result.quarantined
        for position in positions[result.quarantined].tolist():
            self._held[int(opened.transfer.slots[position])].append((opened, position))
        opened.parts -= 1
        self._finish_if_done(opened)

    def _released(self, slot: int) -> None:
        """Those who were told learn it; for those not yet told it was never quarantined."""
        told = False
        for opened, position in self._held.pop(slot, []):
            if opened.transfer.id in self._open:
                opened.quarantined[position] = False
            else:
                told = True
        if told:
            self._report.released_slots.append(slot)

    def _finish_if_done(self, opened: _Open) -> None:
        if opened.parts > 0:
            return
        del self._open[opened.transfer.id]
        self._report.results.append(
            RankResult(opened.transfer.id, opened.statuses, opened.errors, opened.quarantined)
        )

    def _tend(self) -> None:
        now_s = self._clock()
        for path in self._paths.values():
            for clear_id in path.tend(now_s):
                self._clears[clear_id] -= 1
                if self._clears[clear_id] == 0:
                    del self._clears[clear_id]
                    self._report.cleared.append(clear_id)
        self._watch()

    def _watch(self) -> None:
        """Have the selector wake for the engines of all paths, and for no other."""
        engines = [engine for path in self._paths.values() for engine in path.engines]
        for engine in engines:
            if engine not in self._watched:
                self._selector.register(engine.fileno(), select.EPOLLIN)
                self._watched[engine] = engine.fileno()
        for engine in [each for each in self._watched if each not in engines]:
            self._selector.unregister(self._watched.pop(engine))

    def _tend_within(self, limit_s: float | None) -> float | None:
        """How long to wait: until something is to be tended, at most ``limit_s`` (None: no end)."""
        tend_at = [path.next_tend_s() for path in self._paths.values()]
        due_in = [at - self._clock() for at in tend_at if at is not None]
        limits = [*due_in, *([] if limit_s is None else [limit_s])]
        return max(0.0, min(limits)) if limits else None

    def _path_states(self) -> tuple[PathState, ...]:
        return tuple(
            self._paths[index].state
            if index in self._paths
            else PathState(loads=False, stores=False, reason=self._lost[index])
            for index in range(self._placement.path_count)
        )

    def _log_failures(self, path: DiskPath, result: TransferResult, part: _Part) -> None:
        """One line for the first row of each kind, not more often than people can read."""
        for status in (*FAILURES, RowStatus.CORRUPT, RowStatus.TIMED_OUT):
            rows = np.flatnonzero(result.statuses == status)
            if not rows.size:
                continue
            first = part.positions[rows[:1]]
            slot = part.whole.transfer.slots[first]
            offset = int(self._placement.local(slot)[0]) * self._placement.slot_bytes
            number = int(result.errors[rows[0]])
            what = error_name(number) if status in FAILURES else status.name.lower()
            where = f"offset {offset} of {path.file.data_path}"
            if status is RowStatus.COPY_FAILED:
                what = f"the copy failed, {what}"
                where = f"block {int(part.whole.transfer.block_ids[first][0])} in memory"
            self._quiet.warning(
                (path.index, result.direction, status, number),
                f"{result.direction.name.lower()} of {rows.size} blocks: {what}, first at {where}",
            )

    def _facts(self, restored: dict[int, RestoredRecords]) -> dict[str, object]:
        first = next(iter(self._paths.values()))
        stats = first.engine.stats()
        return {
            "paths": [str(path.directory) for path in self._paths.values()],
            "lost_paths": dict(self._lost),
            "namespace": first.directory.name,
            "slots": self._placement.slot_count,
            "slot_bytes": self._placement.slot_bytes,
            "slot_memory_bytes": self._slot_memory_bytes,
            "block_bytes": self._layout.block_bytes,
            "reserved_bytes": sum(path.file.reserved_bytes for path in self._paths.values()),
            "recovered": sum(len(each.slots) for each in restored.values()),
            "file_system": first.file.file_system,
            "direct": first.file.direct,
            "direct_reason": first.file.reason,
            "backend": stats["backend"],
            "backend_reason": stats["backend_reason"],
            "backend_note": stats["backend_note"],
            "notes": [note for path in self._paths.values() for note in path.file.notes],
        }


def _undo_open(paths: dict[int, DiskPath]) -> None:
    with ExitStack() as each:  # whatever becomes of the others
        for path in paths.values():
            each.callback(path.undo_open)


def _each(
    paths: dict[int, DiskPath], lost: dict[int, str], step: Callable[[DiskPath], None]
) -> None:
    """Take a step of opening on every path; one of several that fails is left out."""
    for index, path in list(paths.items()):
        try:
            step(path)
        except (DeviceError, ConfigError) as error:
            if len(paths) == 1:
                raise
            _log.warning("path left out, its slots are misses: %s", error)
            lost[index] = str(error)
            paths.pop(index).undo_open()


def _joined(parts: list[npt.NDArray[Number]]) -> npt.NDArray[Number]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
