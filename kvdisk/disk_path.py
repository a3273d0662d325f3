"""One rank's share of one directory: a file, an engine on it, and the state of the disk below.

A disk in trouble is answered for at once, instead of letting requests run into their deadlines,
until a probe says that it is well (``path_health``). What opens, syncs or probes files while the
tier is in service does so in the background.

What always holds:
    * Every transfer that ``submit`` took ends exactly once in ``poll``, with its sources free no
      later, also when a clear replaces the engine or a hanging disk never answers.
    * An engine that a clear has replaced is asked on until it owes nothing: a slot that its disk
      still holds is released when the disk lets go.
    * Nothing but ``close`` ends an engine or the file on the caller's thread, and what is opened in
      the background while ``close`` runs is closed there.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from kvdisk.background import Background
from kvdisk.config import TierConfig
from kvdisk.errors import DeviceError
from kvdisk.identity import Identity, label_namespace
from kvdisk.layout import Layout
from kvdisk.messages import Clear, PathState
from kvdisk.path_health import PathHealth
from kvdisk.placement import Placement
from kvdisk.rank_file import RankFile
from kvdisk.rank_pages import disk_trouble
from kvdisk.self_test import self_test
from kvdisk.transfer import Direction, Events, RowStatus, TransferEngine, TransferResult

_NS_PER_S: Final = 1_000_000_000
_OPEN_ATTEMPTS: Final = 5
_RETRY_S: Final = 1.0
_CLEAR_CLOSE_S: Final = 2.0
_QUIET_SLACK_S: Final = 0.5
_QUIET_LOOK_S: Final = 0.01
_IDS_PER_ENGINE: Final = 1 << 40

_log = logging.getLogger("kvdisk")

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Probed:
    direction: Direction
    error: int


@dataclass(frozen=True)
class _Cleared:
    """The file's records are void, and a new engine works on it."""

    engine: TransferEngine


@dataclass(frozen=True)
class _Ended:
    """An engine that was replaced is closed."""


@dataclass(eq=False)
class _Sent:
    """A transfer in an engine: what to say of it should the engine not."""

    direction: Direction
    slots: npt.NDArray[np.int64]
    reads_source: bool


@dataclass(eq=False)
class _Generation:
    """An engine and what it still owes. Its ids count from ``id_base`` in ours."""

    engine: TransferEngine
    id_base: int
    sent: dict[int, _Sent] = field(default_factory=dict)  # by our id
    held: set[int] = field(default_factory=set)  # slots told as quarantined

    @property
    def owes(self) -> bool:
        return bool(self.sent or self.held)

    def poll(self) -> Events:
        """The engine's events under our ids."""
        events = self.engine.poll()
        free = [self.id_base + engine_id for engine_id in events.source_free]
        for sent_id in free:
            self.sent[sent_id].reads_source = False
        finished = [
            replace(each, transfer_id=self.id_base + each.transfer_id) for each in events.finished
        ]
        for result in finished:
            slots = self.sent.pop(result.transfer_id).slots
            self.held.update(slots[result.quarantined].tolist())
        self.held.difference_update(events.released_slots)
        return Events(free, finished, events.released_slots)

    def give_up(self) -> Events:
        """The end of transfers that the engine will not tell."""
        free = [sent_id for sent_id, sent in self.sent.items() if sent.reads_source]
        finished = [
            TransferResult(
                sent_id,
                sent.direction,
                np.full(len(sent.slots), RowStatus.TIMED_OUT, dtype=np.uint8),
                np.zeros(len(sent.slots), dtype=np.int32),
                np.zeros(len(sent.slots), dtype=np.bool_),
            )
            for sent_id, sent in self.sent.items()
        ]
        self.sent.clear()
        return Events(free, finished, [])


class DiskPath:
    """Path ``index`` of a worker. Use ``open``; one thread calls it."""

    def __init__(
        self,
        index: int,
        file: RankFile,
        layout: Layout,
        config: TierConfig,
        wake_fd: int,
        *,
        direct_stores: bool = False,
    ) -> None:
        """Takes ``file`` over, unless it raises. ``wake_fd``, an eventfd, tells of background."""
        self.index = index
        self.file = file
        self._config = config
        self._open_engine = partial(
            TransferEngine.open, layout, file, config, direct_stores=direct_stores
        )
        self._generations = [_Generation(self._open_engine(), 0)]  # the last is in use
        self._background: Background[_Probed | _Cleared | _Ended] = Background(wake_fd)
        self._in_background: Literal["", "probe", "clear", "end"] = ""
        self._ending: _Generation | None = None  # that "end" is about
        self._retry_s = -math.inf  # before it nothing but a probe is begun again
        self._health = PathHealth()
        self._untold = Events([], [], [])
        self._clears: list[Clear] = []  # asked for, not yet durable
        self._closing = False

    @classmethod
    def open(
        cls,
        index: int,
        layout: Layout,
        identity: Identity,
        config: TierConfig,
        placement: Placement,
        rank: int,
        world_size: int,
        wake_fd: int,
        *,
        direct_stores: bool = False,
    ) -> DiskPath:
        """Open or make the rank's file below ``config.paths[index]``, and prove that it works.

        Raises ConfigError, BusyError or DeviceError.
        """
        open_file = partial(
            RankFile.create_or_open,
            rank=rank,
            world_size=world_size,
            slot_count=placement.slots_per_path,
            slot_bytes=placement.slot_bytes,
            fingerprint=identity.rank_fingerprint(layout.fingerprint_fields()),
            direct=config.direct,
            persist=config.persist,
            finish=False,  # by ``label``
        )
        directory = config.paths[index] / identity.namespace
        for left in range(_OPEN_ATTEMPTS, 0, -1):
            try:
                file = open_file(directory)
                break
            except DeviceError as error:  # "kvdisk gc" may remove the directory as we open it
                if error.errno != errno.ENOENT or left == 1:
                    raise
        with disk_trouble("open", directory), ExitStack() as undo:
            undo.callback(file.close)
            undo.callback(file.undo)
            note = self_test(directory, file.mode, placement.slot_bytes, config)
            if note is not None:
                _log.warning("%s", note)
            path = cls(index, file, layout, config, wake_fd, direct_stores=direct_stores)
            undo.pop_all()
            undo.callback(path.undo_open)
            note = path.engine.stats()["backend_note"]
            if note:  # it works, and costs more than it need
                _log.warning("%s: %s", directory, note)
            undo.pop_all()
        return path

    def label(self, identity: Identity) -> None:
        """Have the directory say whose it is, and let go of what earlier runs had in excess.

        Once the open can no longer fail elsewhere. Raises DeviceError or ConfigError.
        """
        with disk_trouble("label", self.directory):
            label_namespace(self.directory, identity)
            self.file.finish()

    def undo_open(self) -> None:
        """Close, and remove what opening made: the open fails after all."""
        try:
            self.file.undo()
        finally:
            self.close(0)

    @property
    def engine(self) -> TransferEngine:
        """The engine in use."""
        return self._generations[-1].engine

    @property
    def engines(self) -> list[TransferEngine]:
        """All that ``poll`` asks: the one in use, and those replaced that still owe something."""
        return [each.engine for each in self._generations]

    @property
    def directory(self) -> Path:
        return self.file.data_path.parent

    @property
    def state(self) -> PathState:
        if self._clears:
            return PathState(loads=False, stores=False, reason="being cleared")
        return self._health.state

    @property
    def clearing(self) -> bool:
        """A clear has begun and not ended."""
        return bool(self._clears)

    # --- transfers

    def submit(
        self,
        direction: Direction,
        keys: Sequence[bytes],
        slots: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
        event: int,
        within_s: float | None = None,
    ) -> int | None:
        """Begin a transfer between this file's ``slots`` and ``blocks``; its id, or None: refused.

        Refused means that nothing was begun: the path sits out, or its queue is full.
        ``within_s``: instead of the configured deadline.
        """
        if self._clears or not self._health.allows(direction):
            return None
        config, load = self._config, direction is Direction.LOAD
        deadline_ns = config.load_deadline_ns if load else config.store_deadline_ns
        timeout_s = deadline_ns / _NS_PER_S if within_s is None else within_s
        if load:
            engine_id: int | None = self.engine.submit_load(
                keys, slots, blocks, timeout_s=timeout_s, event=event
            )
        else:
            engine_id = self.engine.submit_store(
                keys,
                slots,
                blocks,
                timeout_s=timeout_s,
                start_within_s=config.store_wait_ns / _NS_PER_S,
                event=event,
            )
        if engine_id is None:
            return None
        generation = self._generations[-1]
        sent_id = generation.id_base + engine_id
        generation.sent[sent_id] = _Sent(direction, slots, direction is Direction.STORE)
        return sent_id

    def cancel_waiting(self, sent_id: int) -> None:
        """End as refused what has not begun of a store; what has begun goes on."""
        generation = self._generations[-1]
        if self._in_background != "clear" and sent_id > generation.id_base:
            generation.engine.cancel_waiting(sent_id - generation.id_base)

    def poll(self, now_s: float) -> Events:
        """What has happened since the last call; never blocks."""
        events, self._untold = self._untold, Events([], [], [])
        if not self._closing:
            events = _joined(events, *(each.poll() for each in self._generations))
        for result in events.finished:
            self._health.record(result, now_s)
        if events.released_slots:
            self._health.answered(now_s)
        return events

    # --- trouble, and clearing

    def catch_up(self, clears: int) -> None:
        """Void what was stored before a clear that this path missed, being away. Before first use.

        ``clears`` is how many the path that has seen most has seen. Raises DeviceError.
        """
        if self.file.header.clears < clears:
            _log.info("%s was away during a clear: what it had is void", self.file.data_path)
            self.engine.close(0)
            self.file.bump_epoch(clears)
            self._generations = [_Generation(self._open_engine(), 0)]

    def clear(self, message: Clear) -> None:
        """Make everything stored so far unreadable; ``tend`` tells when that is durable.

        Until then nothing is taken. What is under way ends, one way or another.
        """
        self._clears.append(message)

    def tend(self, now_s: float) -> list[int]:
        """Begin the probes and clears that are due, take those that have ended.

        Returns the ids of the clears that are durable now.
        """
        durable = self._take_outcome(now_s)
        self._generations = [
            each
            for each in self._generations
            if each.owes or not each.engine.closed or each is self._generations[-1]
        ]
        if self._in_background:
            return durable
        due = self._health.probe_due(now_s)
        if self._work_waits and now_s >= self._retry_s:
            begun = self._begin_clear() if self._clears else self._begin_end()
            if not begun:
                self._retry_s = now_s + _RETRY_S
        elif due is not None:
            self._begin_probe(due, now_s)
        return durable

    def next_tend_s(self) -> float | None:
        """When ``tend`` has something to begin, if nothing else happens."""
        if self._in_background:
            return None
        times = [self._health.next_probe_s(), self._retry_s if self._work_waits else None]
        return min((each for each in times if each is not None), default=None)

    # --- ending it

    def close(self, timeout_s: float) -> int:
        """End everything within the limit; ``poll`` still gives the last results.

        Returns how many I/Os a hanging disk forced to abandon.
        """
        until = time.monotonic() + timeout_s
        self._closing = True  # a clear that is tried again and again ends
        outcome = self._background.abandon()
        if outcome is not None:
            self._settle(outcome)
        ours = self._generations
        if self._in_background == "clear":  # engine and file are in use there, and end there
            ours = ours[:-1]
        elif self._in_background == "end":
            ours = [each for each in ours if each is not self._ending]
        abandoned = int(len(ours) < len(self._generations))
        for each in ours:
            abandoned += each.engine.close(max(0.0, until - time.monotonic()))
            self._untold = _joined(self._untold, each.poll())
        if self._in_background != "clear":
            self.file.close()
        self._untold = _joined(self._untold, *(each.give_up() for each in self._generations))
        return abandoned

    # --- steps of the above

    @property
    def _work_waits(self) -> bool:
        """There is something other than a probe to do in the background."""
        return bool(self._clears) or any(not each.owes for each in self._generations[:-1])

    def _take_outcome(self, now_s: float) -> list[int]:
        """The ids of clears that are durable now, if a clear has ended in the background."""
        outcome = self._background.take()
        if outcome is None:
            return []
        if isinstance(outcome, _Probed):
            self._health.probed(outcome.direction, outcome.error, now_s)
        elif isinstance(outcome, BaseException):
            # The disk's own errors were dealt with where they came up; here the machine is in need.
            _log.error("%s in the background failed: %r", self._in_background, outcome)
            self._retry_s = now_s + _RETRY_S
        self._settle(outcome)
        if not isinstance(outcome, _Cleared):
            return []
        number = self.file.header.clears
        durable = [each.id for each in self._clears if each.number <= number]
        self._clears = [each for each in self._clears if each.number > number]
        return durable

    def _settle(self, outcome: object) -> None:
        """What was begun in the background has ended."""
        self._in_background = ""
        if isinstance(outcome, _Cleared):
            id_base = self._generations[-1].id_base + _IDS_PER_ENGINE
            self._generations.append(_Generation(outcome.engine, id_base))

    def _begin_probe(self, direction: Direction, now_s: float) -> None:
        try:
            probe = self.file.begin_probe(write=direction is Direction.STORE)
        except OSError as error:  # no descriptor to be had: that is no sign of a well disk
            self._health.probed(direction, error.errno or errno.EMFILE, now_s)
            return
        if self._background.start(lambda: _Probed(direction, probe()), self._name("probe")):
            self._in_background = "probe"
        else:
            probe.close()
            self._health.probed(direction, errno.EAGAIN, now_s)

    def _begin_clear(self) -> bool:
        number = max(each.number for each in self._clears)
        file, engine, open_engine = self.file, self.engine, self._open_engine

        def until_done(step: Callable[[], Result]) -> Result:
            while True:
                try:
                    return step()
                except Exception as error:
                    if self._closing:
                        raise
                    _log.error("cannot clear yet: %s", error)
                    time.sleep(_RETRY_S)

        def clear() -> _Cleared:
            until_done(partial(file.bump_epoch, number))
            _end_if_it_can(engine)
            return _Cleared(until_done(open_engine))

        def unclaimed(outcome: _Probed | _Cleared | _Ended | BaseException) -> None:
            if isinstance(outcome, _Cleared):
                outcome.engine.close(0)
            engine.close(0)
            file.close()

        begun = self._background.start(clear, self._name("clear"), unclaimed)
        self._in_background = "clear" if begun else ""
        return begun

    def _begin_end(self) -> bool:
        """Close an engine that was replaced and owes nothing any more."""
        ending = next(each for each in self._generations[:-1] if not each.owes)

        def end() -> _Ended:
            ending.engine.close(_CLEAR_CLOSE_S)
            return _Ended()

        self._ending = ending
        begun = self._background.start(end, self._name("end"))
        self._in_background = "end" if begun else ""
        return begun

    def _name(self, what: str) -> str:
        return f"kvdisk-{what}-{self.index}"


def _end_if_it_can(engine: TransferEngine) -> None:
    """End all transfers soon, and the engine if the disk has let go of everything by then.

    One whose disk still holds slots lives on, so that it can tell when they are released.
    """
    engine.end_within(_CLEAR_CLOSE_S)
    until = time.monotonic() + _CLEAR_CLOSE_S + _QUIET_SLACK_S
    while time.monotonic() < until:
        stats = engine.stats()
        busy = stats["transfers_open"] + stats["ring_used"] + stats["ring_quarantined"]
        if stats["fresh"] and not busy:
            engine.close(_CLEAR_CLOSE_S)
            return
        time.sleep(_QUIET_LOOK_S)


def _joined(*parts: Events) -> Events:
    return Events(
        [each for part in parts for each in part.source_free],
        [each for part in parts for each in part.finished],
        [each for part in parts for each in part.released_slots],
    )
