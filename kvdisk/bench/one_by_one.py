"""What today's disk tiers of serving engines do: one block after the other, on one thread.

A block is gathered into a staging buffer and written with one pwrite, or read with one pread and
scattered; nothing overlaps, nothing is verified, no checksum is taken. ``kvdisk bench --compare
threads`` runs it beside the whole layer, with blocks, file size and O_DIRECT as there.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from typing import Final

import numpy as np

from kvdisk.bench.job import Job
from kvdisk.bench.kv_cache import KvCache
from kvdisk.bench.result import DirectionName, Round, cpu_times_ns
from kvdisk.bench.runner import PROGRESS_GAP_S, Progress
from kvdisk.bench.scratch import ScratchFile, drop_from_page_cache
from kvdisk.errors import DeviceError

_SOURCES_BYTES_MIN: Final = 8 << 20


class OneByOne:
    """One file, one staging buffer, one I/O in flight."""

    def __init__(self, job: Job) -> None:
        """Raises ConfigError or DeviceError for what this machine cannot do."""
        self._job = job
        self._sources = max(1, _SOURCES_BYTES_MIN // job.io_bytes)
        self._cache = KvCache(job.geometry, self._sources, 1, job.seed)
        self._memory = mmap.mmap(-1, job.io_bytes)
        self._staging = np.frombuffer(self._memory, dtype=np.uint64)
        self._staging[:] = 0
        self._slot_count = job.file_bytes // job.io_bytes
        self._next_slot = 0
        self._random = random.Random(job.seed)
        self._stores = 0
        self._file = ScratchFile(job.path, job.file_bytes, job.direct)

    def fill(self, progress: Progress) -> None:
        for slot in range(self._slot_count):
            self._store(slot)
            progress((slot + 1) * self._job.io_bytes)

    def run(self, progress: Progress) -> Round:
        if not self._file.mode.direct:
            drop_from_page_cache(self._file.fd)
        ios: dict[DirectionName, int] = {"read": 0, "write": 0}
        read_credit, told = 0, time.monotonic()
        user_before, system_before = cpu_times_ns()
        started = now = time.monotonic_ns()
        while now - started < self._job.runtime_ns:
            read_credit += self._job.read_percent
            if read_credit >= 100:
                read_credit -= 100
                self._load(self._choose())
                ios["read"] += 1
            else:
                self._store(self._choose())
                ios["write"] += 1
            now = time.monotonic_ns()
            if now / 1e9 - told >= PROGRESS_GAP_S:
                told = now / 1e9
                progress((ios["read"] + ios["write"]) * self._job.io_bytes)
        if self._job.writes and not self._file.mode.direct:
            os.fdatasync(self._file.fd)
        elapsed_ns = time.monotonic_ns() - started
        user_after, system_after = cpu_times_ns()
        block_bytes = self._job.geometry.block_bytes
        return Round(
            bytes={"read": ios["read"] * block_bytes, "write": ios["write"] * block_bytes},
            ios=ios,
            elapsed_ns=elapsed_ns,
            cpu_user_ns=user_after - user_before,
            cpu_system_ns=system_after - system_before,
        )

    def close(self) -> None:
        self._file.close()

    def _choose(self) -> int:
        if self._job.random:
            return self._random.randrange(self._slot_count)
        self._next_slot = (self._next_slot + 1) % self._slot_count
        return self._next_slot

    def _store(self, slot: int) -> None:
        self._stores += 1
        source = self._stores % self._sources
        self._cache.stamp([source], np.array([self._stores], dtype=np.uint64))
        self._cache.gather(source, self._staging)
        self._require_whole(os.pwrite(self._file.fd, self._memory, slot * self._job.io_bytes))

    def _load(self, slot: int) -> None:
        offset = slot * self._job.io_bytes
        self._require_whole(os.preadv(self._file.fd, [self._memory], offset))
        self._cache.scatter(self._sources, self._staging)

    def _require_whole(self, moved_bytes: int) -> None:
        if moved_bytes != self._job.io_bytes:
            raise DeviceError("an I/O moved only a part. Check the disk (dmesg).", op="threads")
