"""One rank's share of one directory: a file, an engine on it, and the state of the disk below.

A disk in trouble is answered for at once, instead of letting requests run into their deadlines,
until a probe says that it is well (``path_health``). What opens, syncs or probes files while the
tier is in service does so in the background.

What always holds: every transfer that ``submit`` took ends exactly once in ``poll``, with its
sources free no later, also when a clear replaces the engine or a hanging disk never answers.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvdisk.background import Background
from kvdisk.config import TierConfig
from kvdisk.errors import DeviceError, KVDiskError
from kvdisk.identity import Identity, open_namespace
from kvdisk.layout import Layout
from kvdisk.messages import Clear, PathState
from kvdisk.path_health import PathHealth
from kvdisk.placement import Placement
from kvdisk.rank_file import RankFile
from kvdisk.self_test import self_test
from kvdisk.transfer import Direction, Events, RowStatus, TransferEngine, TransferResult

_NS_PER_S: Final = 1_000_000_000
_OPEN_ATTEMPTS: Final = 5
_CLEAR_RETRY_S: Final = 1.0
_CLEAR_CLOSE_S: Final = 2.0
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


@dataclass(eq=False)
class _Sent:
    """A transfer in the engine: what to say of it should the engine not."""

    direction: Direction
    rows: int
    reads_source: bool


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
        self.engine = self._open_engine()
        self._background: Background[_Probed | _Cleared] = Background(wake_fd)
        self._health = PathHealth()
        self._sent: dict[int, _Sent] = {}
        self._id_base = 0  # ids of the present engine count from here
        self._untold = Events([], [], [])
        self._clears: list[Clear] = []  # asked for, not yet durable
        self._clearing = False
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
        )
        for left in range(_OPEN_ATTEMPTS, 0, -1):
            try:
                directory = open_namespace(config.paths[index], identity)
                file = open_file(directory)
                break
            except DeviceError as error:  # "kvdisk gc" may remove the directory as we open it
                if error.errno != errno.ENOENT or left == 1:
                    raise
        try:
            note = self_test(directory, file.mode, placement.slot_bytes, config)
            if note is not None:
                _log.warning("%s", note)
            return cls(index, file, layout, config, wake_fd, direct_stores=direct_stores)
        except BaseException:
            file.close()
            raise

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
    ) -> int | None:
        """Begin a transfer between this file's ``slots`` and ``blocks``; its id, or None: refused.

        Refused means that nothing was begun: the path sits out, or its queue is full.
        """
        if self._clears or not self._health.allows(direction):
            return None
        if direction is Direction.LOAD:
            engine_id: int | None = self.engine.submit_load(
                keys, slots, blocks, timeout_s=self._config.load_deadline_ns / _NS_PER_S
            )
        else:
            engine_id = self.engine.submit_store(
                keys,
                slots,
                blocks,
                timeout_s=self._config.store_deadline_ns / _NS_PER_S,
                start_within_s=self._config.store_wait_ns / _NS_PER_S,
                event=event,
            )
        if engine_id is None:
            return None
        sent_id = self._id_base + engine_id
        self._sent[sent_id] = _Sent(direction, len(keys), direction is Direction.STORE)
        return sent_id

    def cancel_waiting(self, sent_id: int) -> None:
        """End as refused what has not begun of a store; what has begun goes on."""
        if not self._clearing and sent_id > self._id_base:
            self.engine.cancel_waiting(sent_id - self._id_base)

    def poll(self, now_s: float) -> Events:
        """What has happened since the last call; never blocks."""
        events, self._untold = self._untold, Events([], [], [])
        if not self._closing:
            events = _joined(events, self._note(self.engine.poll()))
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
            self.engine = self._open_engine()

    def clear(self, message: Clear) -> None:
        """Make everything stored so far unreadable; ``tend`` tells when that is durable.

        Until then nothing is taken. What is under way ends, one way or another.
        """
        self._clears.append(message)

    def tend(self, now_s: float) -> list[int]:
        """Begin the probes and clears that are due, take those that have ended.

        Returns the ids of the clears that are durable now.
        """
        durable: list[int] = []
        outcome = self._background.take()
        if isinstance(outcome, _Probed):
            self._health.probed(outcome.direction, outcome.error, now_s)
        elif isinstance(outcome, _Cleared):
            number = self.file.header.clears
            durable = [each.id for each in self._clears if each.number <= number]
            self._clears = [each for each in self._clears if each.number > number]
            self._replace_engine(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome  # the disk's own errors were dealt with where they came up
        if self._background.busy:
            return durable
        due = self._health.probe_due(now_s)
        if self._clears:
            self._begin_clear()
        elif due is not None:
            self._begin_probe(due, now_s)
        return durable

    def next_tend_s(self) -> float | None:
        """When ``tend`` has something to begin, if nothing else happens."""
        return None if self._background.busy else self._health.next_probe_s()

    # --- ending it

    def close(self, timeout_s: float) -> int:
        """End everything within the limit; ``poll`` still gives the last results.

        Returns how many I/Os a hanging disk forced to abandon.
        """
        self._closing = True
        ended = self._background.abandon()
        if isinstance(ended, _Cleared):  # it ended just now: the new engine is ours to close
            self._replace_engine(ended)
        elif ended is not None:  # it failed: engine and file are ours again
            self._clearing = False
        abandoned = 1
        if not self._clearing:  # else engine and file are in use by what hangs: left to it
            abandoned = self.engine.close(timeout_s)
            self._untold = _joined(self._untold, self._note(self.engine.poll()))
            self.file.close()
        self._untold = _joined(self._untold, self._give_up_sent())
        return abandoned

    # --- steps of the above

    def _note(self, events: Events) -> Events:
        """The engine's events under our ids; afterwards ``_sent`` is up to date."""
        base = self._id_base
        free = [base + engine_id for engine_id in events.source_free]
        for sent_id in free:
            self._sent[sent_id].reads_source = False
        finished = [replace(each, transfer_id=base + each.transfer_id) for each in events.finished]
        for result in finished:
            del self._sent[result.transfer_id]
        return Events(free, finished, events.released_slots)

    def _give_up_sent(self) -> Events:
        """The end of transfers that no engine will tell."""
        free = [sent_id for sent_id, sent in self._sent.items() if sent.reads_source]
        finished = [
            TransferResult(
                sent_id,
                sent.direction,
                np.full(sent.rows, RowStatus.TIMED_OUT, dtype=np.uint8),
                np.zeros(sent.rows, dtype=np.int32),
                np.zeros(sent.rows, dtype=np.bool_),
            )
            for sent_id, sent in self._sent.items()
        ]
        self._sent.clear()
        return Events(free, finished, [])

    def _begin_probe(self, direction: Direction, now_s: float) -> None:
        try:
            probe = _probe(self.file, direction)
        except OSError as error:  # no descriptor to be had: that is no sign of a well disk
            self._health.probed(direction, error.errno or errno.EMFILE, now_s)
            return
        self._background.start(probe, f"kvdisk-probe-{self.index}")

    def _begin_clear(self) -> None:
        self._clearing = True
        number = max(each.number for each in self._clears)
        file, engine, open_engine = self.file, self.engine, self._open_engine

        def until_done(step: Callable[[], Result]) -> Result:
            while True:
                try:
                    return step()
                except KVDiskError as error:
                    if self._closing:
                        raise
                    _log.error("cannot clear yet: %s", error)
                    time.sleep(_CLEAR_RETRY_S)

        def clear() -> _Cleared:
            until_done(partial(file.bump_epoch, number))
            engine.close(_CLEAR_CLOSE_S)
            return _Cleared(engine if self._closing else until_done(open_engine))

        def end_all(outcome: object) -> None:  # close() could not wait, and left all of it here
            engine.close(0)
            if isinstance(outcome, _Cleared):
                outcome.engine.close(0)
            file.close()

        self._background.start(clear, f"kvdisk-clear-{self.index}", end_all)

    def _replace_engine(self, outcome: _Cleared) -> None:
        last = self._note(self.engine.poll())
        self._untold = _joined(self._untold, last, self._give_up_sent())
        self.engine = outcome.engine
        self._id_base += _IDS_PER_ENGINE
        self._clearing = False


def _probe(file: RankFile, direction: Direction) -> Callable[[], _Probed]:
    probe = file.begin_probe(write=direction is Direction.STORE)
    return lambda: _Probed(direction, probe())


def _joined(*parts: Events) -> Events:
    return Events(
        [each for part in parts for each in part.source_free],
        [each for part in parts for each in part.finished],
        [each for part in parts for each in part.released_slots],
    )
