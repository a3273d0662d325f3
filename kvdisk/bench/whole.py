"""The whole layer: blocks of a KV cache through the engine to a rank file and back.

This is the path a serving engine uses, driven from one Python thread as a scheduler would: batches
of rows, polled, with enough rows queued that the engine never waits for Python. Checksums are on,
slot records are written. In the timed part one load in ``_SAMPLE`` is compared with what was
stored; ``verify`` loads and compares every slot.

``numjobs`` becomes shards, each with a ring and ``iodepth`` I/Os of its own; in mixed jobs that
depth counts for each direction. What a job does not name is as in a tier by default: the share of
the ring kept for loads, how far stores are held back beside loads, what the file system needs.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvdisk.bench.caches import make_cache
from kvdisk.bench.job import Job
from kvdisk.bench.raw import require_registered
from kvdisk.bench.result import DirectionName, Latency, Round, Verdict, cpu_times_ns
from kvdisk.bench.runner import PROGRESS_GAP_S, Facts, Progress
from kvdisk.bench.scratch import drop_from_page_cache, require_space, scratch_directory
from kvdisk.config import TierConfig
from kvdisk.direct_mode import DirectMode
from kvdisk.errors import DeviceError
from kvdisk.memory import require_memory
from kvdisk.rank_file import RankFile, record_file_bytes
from kvdisk.transfer import (
    Direction,
    RowStatus,
    TransferEngine,
    TransferResult,
    reserved_buffers,
)
from kvdisk.units import display_size, format_size

_BATCH_BYTES: Final = 16 << 20  # of a transfer: a prefix of a request
_BATCH_ROWS_MAX: Final = 32
_SAMPLE: Final = 64
_SOURCES_BYTES_MIN: Final = 8 << 20
_HANG_S: Final = 30.0
_ENGINE_THREAD: Final = "kvdisk-engine"
_WORDS: Final[dict[DirectionName, str]] = {"read": "load", "write": "store"}


@dataclass
class _Flight:
    """A transfer in flight: its slots and blocks, row by row."""

    slots: list[int]
    blocks: list[int]


class WholeRunner:
    """One engine on one rank file whose names are removed as soon as it is open."""

    def __init__(self, job: Job) -> None:
        """Raises ConfigError or DeviceError for what this machine cannot do."""
        self._job = job
        self._slot_count = job.file_bytes // job.io_bytes
        self._batch = min(_BATCH_ROWS_MAX, max(1, _BATCH_BYTES // job.io_bytes), job.iodepth)
        self._buffers = job.ring_bytes // job.io_bytes or _buffers_for(job.iodepth)
        # Enough that a batch is ready whenever the engine has room for it.
        rows = self._buffers if job.writes else min(self._buffers, 2 * job.iodepth)
        self._rows_max = min(rows * job.numjobs + 2 * self._batch, self._slot_count)
        # Enough different blocks that their random bytes do not repeat within a compressor's reach.
        sources = max(self._rows_max, _SOURCES_BYTES_MIN // job.io_bytes)
        targets = self._rows_max
        in_host = self._buffers * job.numjobs + (sources + targets if job.device == "cpu" else 0)
        require_memory(in_host * job.io_bytes, _what_asks(job))
        require_space(job.path, job.file_bytes + record_file_bytes(self._slot_count))
        self._cache = make_cache(job.device, job.geometry, sources, targets, job.seed)
        self._file = _nameless_rank_file(job, self._slot_count)
        try:
            self.mode: DirectMode = self._file.mode
            self.data_fd = self._file.data_fd
            self._engine = TransferEngine(
                self._cache.layout,
                data_fd=self._file.data_fd,
                record_fd=self._file.record_fd,
                record_offset=self._file.record_offset,
                epoch=self._file.epoch,
                slot_bytes=job.io_bytes,
                slot_count=self._slot_count,
                alignment=self._file.alignment,
                file_system=self._file.file_system,
                backend=job.backend,
                shards=job.numjobs,
                iodepth=job.iodepth,
                buffers=self._buffers,
                load_reserve=reserved_buffers(self._buffers, TierConfig.load_reserve),
                store_depth_beside_loads=_store_depth_beside_loads(job.io_bytes),
                store_queue_bytes=2**62,
            )
        except BaseException:
            self._file.close()
            raise
        try:
            stats = self._engine.stats()
            if stats["backend"] == "uring" and not stats["areas_registered"]:
                require_registered(job, stats["backend_note"])
        except BaseException:
            self.close()
            raise
        # What each slot holds: the mark of its last store (0: unknown) and the block it came from.
        self._marks = np.zeros(self._slot_count, dtype=np.uint64)
        self._sources = np.zeros(self._slot_count, dtype=np.int64)
        self._busy = bytearray(self._slot_count)
        self._generation = 0
        self._next_slot = 0
        self._random = np.random.Generator(np.random.SFC64(job.seed + 1))
        self._free_sources = deque(range(sources))
        self._free_targets = deque(range(sources, sources + targets))
        self._flights: dict[int, _Flight] = {}
        self._sources_held: dict[int, list[int]] = {}
        self._rows_open = 0
        self._loads_seen = self._checked = self._wrong = 0
        self._read_credit = 0
        self._elapsed_ns = self._engine_cpu_ns = 0
        self._stats: list[dict[str, Any]] = []  # by round

    def fill(self, progress: Progress) -> None:
        """Store every slot once, in order."""
        left = self._slot_count
        self._next_slot = 0

        def submit() -> bool:
            nonlocal left
            count = min(left, self._batch)
            left -= count
            return count > 0 and self._store(self._in_order(count))

        self._drive(submit, progress)
        self._sync()

    def run(self, progress: Progress) -> Round:
        if not self.mode.direct:
            drop_from_page_cache(self.data_fd)
        self._engine.reset_stats()
        cpu_before, engine_before = cpu_times_ns(), engine_cpu_ns()
        started = time.monotonic_ns()
        end = started + self._job.runtime_ns

        def submit() -> bool:
            return time.monotonic_ns() < end and self._submit_one()

        self._drive(submit, progress)
        if self._job.writes:
            self._sync()
        elapsed_ns = time.monotonic_ns() - started
        cpu_after, engine_after = cpu_times_ns(), engine_cpu_ns()
        stats = self._engine.stats()
        self._stats.append(stats)
        self._elapsed_ns += elapsed_ns
        self._engine_cpu_ns += engine_after - engine_before
        return Round(
            bytes={"read": stats["bytes_loaded"], "write": stats["bytes_stored"]},
            ios={"read": stats["rows_loaded"], "write": stats["rows_stored"]},
            elapsed_ns=elapsed_ns,
            cpu_user_ns=cpu_after[0] - cpu_before[0],
            cpu_system_ns=cpu_after[1] - cpu_before[1],
            latency=_latency([stats], "io"),
        )

    def verify(self, progress: Progress) -> Verdict:
        """Load every slot whose content is known and compare it. Samples of ``run`` count too."""
        if not self.mode.direct:
            drop_from_page_cache(self.data_fd)
        known = [int(slot) for slot in np.flatnonzero(self._marks)]
        for target in self._free_targets:
            self._cache.wipe(target)
        position = 0
        sampled = self._checked

        def submit() -> bool:
            nonlocal position
            slots = known[position : position + self._batch]
            position += len(slots)
            return bool(slots) and self._load(slots)

        self._drive(submit, progress, compare_all=True)
        return Verdict(self._checked - sampled, self._wrong, self._slot_count)

    def forget(self) -> None:
        self._marks[:] = 0

    def facts(self) -> Facts:
        stats = self._stats[-1] if self._stats else self._engine.stats()
        buffers = self._buffers * self._job.numjobs
        ring_ns = sum(each["ring_used_ns"] for each in self._stats)
        io_ns = sum(
            each[f"{word}_io_ns"]["sum"] for each in self._stats for word in _WORDS.values()
        )
        return Facts(
            backend=stats["backend"],
            backend_reason=stats["backend_reason"],
            notes=(*self._file.notes, *((stats["backend_note"],) if stats["backend_note"] else ())),
            buffers_registered=stats["areas_registered"],
            files_registered=stats["files_registered"],
            ring_bytes=buffers * self._job.io_bytes,
            copier=": ".join(filter(None, (stats["copier"], stats["copier_note"]))),
            ring_occupancy=ring_ns / (self._elapsed_ns * buffers) if self._elapsed_ns else 0.0,
            in_flight=io_ns / self._elapsed_ns if self._elapsed_ns else 0.0,
            short_ios={
                name: sum(each[f"{word}_ios_short"] for each in self._stats)
                for name, word in _WORDS.items()
            },
            engine_cpu_ns=self._engine_cpu_ns,
            latency=_latency(self._stats, "io"),
            row_latency=_latency(self._stats, "row"),
        )

    def close(self) -> None:
        self._engine.close()
        self._file.close()

    # --- driving the engine

    def _drive(
        self, submit: Callable[[], bool], progress: Progress, *, compare_all: bool = False
    ) -> None:
        """Keep rows queued as long as ``submit`` finds more, then wait for all of them."""
        more, told, done_bytes = True, time.monotonic(), 0
        heard = told
        while True:
            while more and self._rows_open + self._batch <= self._rows_max:
                more = submit()
            if self._rows_open == 0:
                return
            happened = self._engine.wait(PROGRESS_GAP_S)
            events = self._engine.poll()
            for transfer_id in events.source_free:
                self._free_sources.extend(self._sources_held.pop(transfer_id))
            for result in events.finished:
                self._finish(result, compare_all)
                done_bytes += len(result.statuses) * self._job.geometry.block_bytes
            now = time.monotonic()
            if happened:
                heard = now
            elif now - heard > _HANG_S:
                raise DeviceError(
                    f"no I/O has ended for {_HANG_S:.0f} s: the disk hangs (dmesg).", op="wait"
                )
            if now - told >= PROGRESS_GAP_S:
                told = now
                progress(done_bytes)

    def _submit_one(self) -> bool:
        """The next batch of the timed part; directions alternate by the job's share."""
        self._read_credit += self._job.read_percent
        if self._read_credit >= 100:
            self._read_credit -= 100
            return self._load(self._choose(self._batch))
        return self._store(self._choose(self._batch))

    def _choose(self, count: int) -> list[int]:
        """Slots with nothing in flight; there are always some, for ``_rows_max`` bounds that."""
        if not self._job.random:
            return self._in_order(count)
        slots: list[int] = []
        for slot in self._random.integers(0, self._slot_count, count).tolist():
            while self._busy[slot]:
                slot = (slot + 1) % self._slot_count
            self._busy[slot] = 1
            slots.append(slot)
        return slots

    def _in_order(self, count: int) -> list[int]:
        slots: list[int] = []
        while len(slots) < count:
            if not self._busy[self._next_slot]:
                self._busy[self._next_slot] = 1
                slots.append(self._next_slot)
            self._next_slot = (self._next_slot + 1) % self._slot_count
        return slots

    def _store(self, slots: list[int]) -> bool:
        blocks = [self._free_sources.popleft() for _ in slots]
        first = self._generation + 1
        self._generation += len(slots)
        marks = np.arange(first, first + len(slots), dtype=np.uint64)
        event = self._cache.stamp(blocks, marks)
        self._marks[slots] = marks
        self._sources[slots] = blocks
        transfer_id = self._engine.submit_store(self._keys(slots), slots, blocks, event=event)
        assert transfer_id is not None, "the store queue of the bench has no bound"
        self._sources_held[transfer_id] = blocks
        self._flights[transfer_id] = _Flight(slots, blocks)
        self._rows_open += len(slots)
        return True

    def _load(self, slots: list[int]) -> bool:
        blocks = [self._free_targets.popleft() for _ in slots]
        transfer_id = self._engine.submit_load(self._keys(slots), slots, blocks)
        self._flights[transfer_id] = _Flight(slots, blocks)
        self._rows_open += len(slots)
        return True

    def _keys(self, slots: list[int]) -> list[bytes]:
        seed = self._job.seed
        return [
            struct.pack("<QQQ", seed, slot, mark)
            for slot, mark in zip(slots, self._marks[slots].tolist(), strict=True)
        ]

    def _finish(self, result: TransferResult, compare_all: bool) -> None:
        flight = self._flights.pop(result.transfer_id)
        self._rows_open -= len(flight.slots)
        for slot in flight.slots:
            self._busy[slot] = 0
        self._require_success(result, flight)
        if result.direction == Direction.STORE:
            return
        for slot, block, status in zip(
            flight.slots, flight.blocks, result.statuses.tolist(), strict=True
        ):
            self._loads_seen += 1
            if status == RowStatus.OK and (compare_all or self._loads_seen % _SAMPLE == 0):
                self._checked += 1
                source = int(self._sources[slot])
                if not self._cache.holds(block, source, self._marks[slot]):
                    self._wrong += 1
                self._cache.wipe(block)
        self._free_targets.extend(flight.blocks)

    def _require_success(self, result: TransferResult, flight: _Flight) -> None:
        """Count loads that found other bytes as wrong; raise for what else did not succeed."""
        if result.ok:
            return
        for row, status in enumerate(result.statuses.tolist()):
            if status in (RowStatus.CORRUPT, RowStatus.MISS):
                self._wrong += 1
            elif status != RowStatus.OK:
                what = "store" if result.direction == Direction.STORE else "load"
                number = int(result.errors[row])
                cause = os.strerror(number) if number else RowStatus(status).name.lower()
                raise DeviceError(
                    f"a {what} of slot {flight.slots[row]} failed: {cause}. "
                    "Check the disk (dmesg).",
                    errno=number,
                    op=what,
                )

    def _sync(self) -> None:
        """Through the page cache, a write counts when it is on the disk."""
        if self.mode.direct:
            return
        os.fdatasync(self._file.data_fd)
        os.fdatasync(self._file.record_fd)


def _what_asks(job: Job) -> str:
    """The option that decides how much memory the job takes, as the user gave it."""
    if job.ring_bytes:
        each = f" of each of {job.numjobs} jobs" if job.numjobs > 1 else ""
        return f"ring={format_size(job.ring_bytes)}{each}"
    return f"iodepth={job.iodepth * job.numjobs} of {display_size(job.io_bytes)}"


def _buffers_for(iodepth: int) -> int:
    """A store holds its buffer while it is gathered, hashed, written and recorded.

    Recording takes about as long as writing, since pages shared by neighbours wait for one another:
    so four times what is at the disk, as in the default configuration (256 MiB for 32 of 2 MiB).
    """
    return max(4 * iodepth, 8)


def _store_depth_beside_loads(io_bytes: int) -> int:
    """In buffers, as many bytes as in the default configuration, where a buffer holds ``merge``."""
    return TierConfig.store_depth_beside_loads * max(1, TierConfig.merge_bytes // io_bytes)


def _latency(stats: list[dict[str, Any]], of: str) -> dict[DirectionName, Latency]:
    """``of``: "io" (one I/O, push to completion) or "row" (submit to end)."""
    return {
        name: Latency.from_histograms([each[f"{word}_{of}_ns"] for each in stats])
        for name, word in _WORDS.items()
    }


def _nameless_rank_file(job: Job, slot_count: int) -> RankFile:
    """A rank file in a directory of its own that is gone again when this returns."""
    with scratch_directory(job.path, "bench") as directory:
        return RankFile.create_or_open(
            directory,
            rank=0,
            world_size=1,
            slot_count=slot_count,
            slot_bytes=job.io_bytes,
            fingerprint=bytes(32),
            direct=job.direct,
            persist=False,
        )


def engine_cpu_ns() -> int:
    """CPU time so far of the engine's threads (proc(5), /proc/pid/task/tid/schedstat or stat)."""
    total = 0
    ticks_ns = 10**9 // os.sysconf("SC_CLK_TCK")
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError, ValueError, IndexError):
            text = (task / "stat").read_text()
            name = text[text.index("(") + 1 : text.rindex(")")]
            if name.startswith(_ENGINE_THREAD):
                fields = text[text.rindex(")") + 2 :].split()
                total += (int(fields[11]) + int(fields[12])) * ticks_ns
    return total
