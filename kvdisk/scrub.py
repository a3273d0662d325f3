"""Reads every stored block of a cache and proves it, beside a live server or without one.

The order in which a live engine works makes looking from outside ambiguous: it writes a slot's new
payload first and its record afterwards, so for a while the file shows an old record over new bytes.
So a mismatch is believed only when a second look agrees: the record is unchanged and a second read
fails too; and in a file that somebody holds, when a third look some seconds later finds the same
record over the same bytes. Everything else is counted as changed meanwhile.

What always holds: nothing is written and no lock is kept; reads go through descriptors of its own,
past the page cache where the file system allows that, and no faster than asked; a stop is heeded
within one block.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdisk.looking import Buffer, FileReader, lock_of, open_directory
from kvdisk.rank_header import (
    HEADER_BYTES,
    RECORD_BYTES,
    RECORD_PAGE_BYTES,
    RECORDS_PER_PAGE,
    RankHeader,
)
from kvdisk.slot_records import RecordState, as_records, payload_matches, record_states
from kvdisk.survey import read_header

_STRETCH_BYTES: Final = 64 << 20  # of payload, between two readings of records
_SETTLE_S: Final = 3.0  # after this a live engine has written a record that it owes
_TICK_S: Final = 0.1
_STOP_S: Final = 2.0  # a thread on a disk that hangs is left behind after this

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Damage:
    """A block that cannot be served: what, where, and why. ``offset`` is in ``file``, in bytes."""

    file: Path
    slot: int
    offset: int
    why: str


@dataclass
class FileReport:
    """What came of one rank's files. ``problem``: why they could not be read at all, or ""."""

    path: Path
    live: bool = False
    direct: bool = True
    blocks: int = 0
    bytes: int = 0
    changed: int = 0  # evicted, or stored anew, while being looked at
    unsteady: int = 0  # wrong at first, right when read again
    damaged: list[Damage] = field(default_factory=list)
    problem: str = ""

    @property
    def clean(self) -> bool:
        return not self.damaged and not self.problem


class Pace:
    """No more than ``bytes_per_s`` over all threads; 0 is no limit."""

    def __init__(
        self,
        bytes_per_s: int,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._stop = stop
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def take(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` may be read, or for the stop."""
        if self._bytes_per_s == 0:
            return
        with self._lock:
            begin_s = max(self._free_at_s, self._clock())
            self._free_at_s = begin_s + size_bytes / self._bytes_per_s
        self._stop.wait(max(0.0, begin_s - self._clock()))


@dataclass(frozen=True)
class _Suspect:
    """A mismatch that a live engine may yet explain."""

    slot: int
    record: bytes
    digest: bytes
    seen_s: float


class RankScrub:
    """One rank's files under examination. ``run`` it once; ``report`` is good at any time."""

    def __init__(
        self, directory: Path, stem: str, *, jobs: int, pace: Pace, stop: threading.Event
    ) -> None:
        self.report = FileReport(directory / f"{stem}.kv")
        self._record_path = directory / f"{stem}.idx"
        self._jobs = jobs
        self._pace = pace
        self._stop = stop
        self._lock = threading.Lock()  # of the report and the suspects
        self._suspects: list[_Suspect] = []
        self._failure: BaseException | None = None  # of a thread

    def run(self, progress: Callable[[], None]) -> None:
        """Look at every record and its payload; ``progress`` is called now and then.

        Ends early when the stop is set. A KeyboardInterrupt passes through, with all threads ended.
        """
        with ExitStack() as stack:
            try:
                folder = open_directory(self.report.path.parent)
                stack.callback(os.close, folder)
                data = stack.enter_context(FileReader(folder, self.report.path.name))
                records = stack.enter_context(FileReader(folder, self._record_path.name))
            except OSError as error:
                self.report.problem = f"cannot be opened ({error.strerror})"
                return
            header = read_header(records)
            if isinstance(header, str):
                self.report.problem = header
                return
            look = _Look(data, records, header, self._pace)
            self.report.live = look.held
            self._run_threads(look, progress)
            self._judge_suspects(look, progress)
            self.report.damaged.sort(key=lambda each: each.slot)
            self.report.direct = data.direct

    # --- the threads

    def _run_threads(self, look: _Look, progress: Callable[[], None]) -> None:
        """All stretches through ``jobs`` threads. After Ctrl-C one that hangs is left behind."""
        stretches: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        for stretch in _stretches(look.header):
            stretches.put(stretch)
        threads = [
            threading.Thread(target=self._work, args=(look, stretches), daemon=True)
            for _ in range(self._jobs)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_TICK_S)
                    progress()
        except BaseException:
            self._stop.set()
            raise
        finally:
            until_s = time.monotonic() + _STOP_S
            for thread in threads:
                thread.join(max(0.0, until_s - time.monotonic()))
        if self._failure is not None:
            raise self._failure

    def _work(self, look: _Look, stretches: queue.SimpleQueue[tuple[int, int]]) -> None:
        try:
            payload = Buffer(look.header.slot_bytes)
            table = Buffer(_stretch_slots(look.header) * RECORD_BYTES)
            while not self._stop.is_set():
                self._examine_stretch(look, *stretches.get_nowait(), table, payload)
        except queue.Empty:
            return
        except BaseException as error:  # what was not looked at must not count as clean
            self._failure = error
            self._stop.set()

    # --- one stretch of slots, one slot

    def _examine_stretch(
        self, look: _Look, first: int, count: int, table: Buffer, payload: Buffer
    ) -> None:
        header = look.present_header()
        try:
            raw = look.records.read(table, count * RECORD_BYTES, _record_offset(first))
        except OSError as error:
            self._damage_record(first, f"records from here on cannot be read ({error.strerror})")
            return
        states = record_states(raw, first, header.epoch)
        for index in np.flatnonzero(
            (states == RecordState.VALID) | (states == RecordState.DAMAGED)
        ).tolist():
            if self._stop.is_set():
                return
            record = raw[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
            if states[index] == RecordState.VALID:
                self._examine(look, first + index, record, payload)
            elif look.record_of(first + index) == record.tobytes():  # not caught half-written
                self._damage_record(first + index, "the record does not prove itself")

    def _examine(self, look: _Look, slot: int, record: Bytes, payload: Buffer) -> None:
        why = look.fault_of(slot, record, payload)
        if why:
            first_record = record.tobytes()
            if not look.stands(slot, first_record):
                self._count(changed=1)
                return
            why = look.fault_of(slot, record, payload)
            if not why:
                self._count(blocks=1, unsteady=1, size_bytes=look.valid_bytes(record))
                return
            if look.held:
                digest = look.digest(record, payload)
                with self._lock:
                    self._suspects.append(_Suspect(slot, first_record, digest, time.monotonic()))
                return
            self._damage(look, slot, why)
        self._count(blocks=1, size_bytes=look.valid_bytes(record))

    def _judge_suspects(self, look: _Look, progress: Callable[[], None]) -> None:
        """What is still the same after some seconds is damage; all else was a store under way."""
        payload = Buffer(look.header.slot_bytes)
        for suspect in self._suspects:
            while time.monotonic() < suspect.seen_s + _SETTLE_S and not self._stop.is_set():
                self._stop.wait(_TICK_S)
                progress()
            if self._stop.is_set():
                return
            record = np.frombuffer(suspect.record, dtype=np.uint8)
            why = look.fault_of(suspect.slot, record, payload)
            same_bytes = look.digest(record, payload) == suspect.digest
            if why and same_bytes and look.stands(suspect.slot, suspect.record):
                self._damage(look, suspect.slot, why)
                self._count(blocks=1, size_bytes=look.valid_bytes(record))
            else:
                self._count(changed=1)

    # --- what was found

    def _count(
        self, *, blocks: int = 0, size_bytes: int = 0, changed: int = 0, unsteady: int = 0
    ) -> None:
        with self._lock:
            self.report.blocks += blocks
            self.report.bytes += size_bytes
            self.report.changed += changed
            self.report.unsteady += unsteady

    def _damage(self, look: _Look, slot: int, why: str) -> None:
        with self._lock:
            self.report.damaged.append(
                Damage(self.report.path, slot, slot * look.header.slot_bytes, why)
            )

    def _damage_record(self, slot: int, why: str) -> None:
        with self._lock:
            self.report.damaged.append(Damage(self._record_path, slot, _record_offset(slot), why))


class _Look:
    """Readings of one rank's files. Threads share it; each has buffers of its own."""

    def __init__(
        self, data: FileReader, records: FileReader, header: RankHeader, pace: Pace
    ) -> None:
        self.data = data
        self.records = records
        self.header = header
        self._pace = pace

    @property
    def held(self) -> bool:
        """Somebody has the files open and may be writing to them."""
        return lock_of(self.data.file).held

    def present_header(self) -> RankHeader:
        """With the epoch of now: a live server may have cleared everything meanwhile."""
        now = read_header(self.records)
        return self.header if isinstance(now, str) else now

    def record_of(self, slot: int) -> bytes | None:
        """The slot's record as it is on the disk now; None when that cannot be read."""
        page, index = divmod(slot, RECORDS_PER_PAGE)
        try:
            read = self.records.read(
                Buffer(RECORD_PAGE_BYTES),
                RECORD_PAGE_BYTES,
                HEADER_BYTES + page * RECORD_PAGE_BYTES,
            )
        except OSError:
            return None
        return read[index * RECORD_BYTES : (index + 1) * RECORD_BYTES].tobytes()

    def stands(self, slot: int, record: bytes) -> bool:
        """Whether a valid record is still what the file says, and still of the file's epoch."""
        epoch = as_records(np.frombuffer(record, dtype=np.uint8))["epoch"][0]
        return self.record_of(slot) == record and self.present_header().epoch == epoch

    def valid_bytes(self, record: Bytes) -> int:
        return int(as_records(record)["valid_bytes"][0])

    def fault_of(self, slot: int, record: Bytes, payload: Buffer) -> str:
        """In a few words what is wrong with a slot's payload; "" when it is what was stored."""
        size_bytes = self.valid_bytes(record)
        if not 0 < size_bytes <= self.header.slot_bytes:
            return f"the record claims {size_bytes} bytes"
        self._pace.take(size_bytes)
        try:
            read = self.data.read(payload, size_bytes, slot * self.header.slot_bytes)
        except OSError as error:
            payload.bytes[:] = 0
            return f"the disk does not give it back ({error.strerror})"
        if len(read) < size_bytes:
            payload.bytes[len(read) :] = 0
            return f"the file ends after {len(read)} of {size_bytes} bytes"
        return "" if payload_matches(record, read) else "the bytes are not those that were stored"

    def digest(self, record: Bytes, payload: Buffer) -> bytes:
        """Of what ``fault_of`` has just read, to tell whether it changes."""
        read = payload.bytes[: self.valid_bytes(record)]
        return hashlib.blake2b(read.data, digest_size=16).digest()


def _record_offset(slot: int) -> int:
    return HEADER_BYTES + slot * RECORD_BYTES


def _stretch_slots(header: RankHeader) -> int:
    """Whole pages of records, whose payloads are about ``_STRETCH_BYTES``."""
    pages = _STRETCH_BYTES // (header.slot_bytes * RECORDS_PER_PAGE)
    return max(1, pages) * RECORDS_PER_PAGE


def _stretches(header: RankHeader) -> Iterator[tuple[int, int]]:
    step = _stretch_slots(header)
    for first in range(0, header.slot_count, step):
        yield first, min(step, header.slot_count - first)
