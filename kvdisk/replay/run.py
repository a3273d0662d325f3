"""A replay on a real file: blocks stored and loaded by ``DiskTier``, every loaded byte compared.

One thread drives the tier, as a scheduler does. A request looks up its prefix, loads what is there
and then stores the rest, which a serving engine would have computed. With a speed, requests begin
at their times and many are under way at once; otherwise each begins when the loads of the one
before have ended, while its stores still go on.

What always holds: the calls are those of ``simulate``, in that order. A block of memory is used
again only when its transfer says so. At full speed a request waits for stores of its own blocks
that are under way, since a server would still have them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvdisk.bench.result import Latency
from kvdisk.bench.scratch import require_space, scratch_directory
from kvdisk.config import TierConfig
from kvdisk.errors import DeviceError
from kvdisk.identity import Identity
from kvdisk.memory import require_memory
from kvdisk.open_transfers import TierResult
from kvdisk.replay.content import Contents
from kvdisk.replay.job import ReplayJob, Setup
from kvdisk.replay.result import Outcome
from kvdisk.replay.simulate import device_cache
from kvdisk.tier import DiskTier
from kvdisk.transfer import RowStatus
from kvdisk.units import display_size

_NS_PER_S: Final = 10**9
# Memory for blocks on their way, each direction.
_POOL_BYTES: Final = 128 << 20
_POOL_BLOCKS_MIN: Final = 4
_POOL_BLOCKS_MAX: Final = 4096
# At full speed a store waits for its turn instead of being dropped.
_PATIENCE_NS: Final = 60 * _NS_PER_S
_WAIT_S: Final = 0.2
# At full speed no more than this share of the slots has a store under way, so that the order in
# which they are given up is that of a tier whose stores take no time.
_STORING_SHARE: Final = 16

Progress = Callable[[int], None]


def run(job: ReplayJob, setup: Setup, progress: Progress) -> Outcome:
    """``progress`` is told the blocks asked for so far, times a block's bytes.

    Raises KVDiskError for what the machine or the directory refuses. Leaves nothing behind.
    """
    assert job.path is not None, "a real run has a directory"
    require_space(job.path, setup.capacity_bytes, "capacity")
    pool = min(max(_POOL_BYTES // job.block_bytes, _POOL_BLOCKS_MIN), _POOL_BLOCKS_MAX)
    require_memory(2 * pool * job.block_bytes, f"blocks of {display_size(job.block_bytes)}")
    contents = Contents(job.geometry, 2 * pool, job.seed)
    with _open_tier(job, setup, contents) as tier:
        replay = _Replay(job, setup, tier, contents, pool)
        started = time.monotonic()
        replay.drive(progress)
        elapsed_s = time.monotonic() - started
        return replay.outcome(elapsed_s)


def _open_tier(job: ReplayJob, setup: Setup, contents: Contents) -> DiskTier:
    """A tier on files that have no name any more when this returns."""
    assert job.path is not None
    identity = Identity(
        model="kvdisk replay",
        weights=f"seed {job.seed}",
        dtype="uint64",
        block_tokens=job.trace.block_tokens,
        key_hash="ids of the trace",
        layout=contents.layout.fingerprint_fields(),
    )
    with scratch_directory(job.path, "replay") as directory:
        return DiskTier.open(contents.layout, identity, _config(job, setup, directory))


def _config(job: ReplayJob, setup: Setup, directory: Path) -> TierConfig:
    config = TierConfig(
        paths=(directory,),
        capacity_bytes=setup.capacity_bytes,
        direct=job.direct,
        backend=job.backend,
        eviction=setup.eviction,
        admission=setup.admission,
        persist=False,
    )
    if job.speed:
        return config
    return replace(
        config,
        load_deadline_ns=_PATIENCE_NS,
        store_deadline_ns=_PATIENCE_NS,
        store_wait_ns=_PATIENCE_NS,
    )


class _Replay:
    """The requests of one run, each a generator that yields whenever it has to wait."""

    def __init__(
        self, job: ReplayJob, setup: Setup, tier: DiskTier, contents: Contents, pool: int
    ) -> None:
        self._job = job
        self._setup = setup
        self._trace = job.trace
        self._keys = job.trace.keys.keys
        self._tier = tier
        self._contents = contents
        self._device = device_cache(job)
        self._sources = deque(range(pool))
        self._targets = deque(range(pool, 2 * pool))
        self._pool = pool
        self._stores: dict[int, list[int]] = {}  # blocks that a store still reads, by its id
        self._storing: Counter[int] = Counter()  # ids of the trace whose store is under way
        self._stored_ids: dict[int, list[int]] = {}  # by the store's id
        self._loaded: dict[int, TierResult] = {}
        self._open_loads: set[int] = set()
        self._now_ns = 0  # when the last poll came back
        self._lost: Counter[str] = Counter()
        self._verified = 0
        self._wrong = 0
        count = len(self._trace)
        self._served = np.zeros(count, dtype=np.int64)
        self._hits = np.zeros(count, dtype=np.int64)
        self._load_ns = np.zeros(count, dtype=np.int64)
        for block in self._targets:
            contents.wipe(block)

    def drive(self, progress: Progress) -> None:
        """All requests, and then until the last store has ended."""
        arrivals = self._trace.arrivals_ns - self._trace.arrivals_ns[0]
        due = (arrivals / self._job.speed).tolist() if self._job.speed else None
        started = told = time.monotonic_ns()
        waiting: list[Iterator[None]] = []
        following = 0
        while following < len(self._trace) or waiting or self._stored_ids:
            now = time.monotonic_ns()
            while following < len(self._trace) and (
                not waiting if due is None else due[following] <= now - started
            ):
                waiting.append(self._serve(following))
                following += 1
                waiting = [each for each in waiting if _goes_on(each)]
            if now - told >= _WAIT_S * _NS_PER_S:
                told = now
                progress(int(self._trace.starts[following]) * self._job.block_bytes)
            until_due_s = _WAIT_S
            if due is not None and following < len(due):
                until_due_s = max(0.0, (due[following] - (time.monotonic_ns() - started)) / 1e9)
            if waiting or self._stored_ids or due is not None:
                self._tier.wait(min(_WAIT_S, until_due_s))
            self._take_events()
            waiting = [each for each in waiting if _goes_on(each)]

    def outcome(self, elapsed_s: float) -> Outcome:
        stats = self._tier.stats()
        rows = [engine["load_row_ns"] for engine in stats.engines.values()]
        health = self._tier.health()
        if health.status != "ok":
            reasons = "; ".join(path.reason for path in health.paths)
            raise DeviceError(
                f"the disk took no part at the end of the run: {reasons}", op="replay"
            )
        return Outcome(
            setup=self._setup,
            simulated=False,
            device_blocks=self._served,
            hit_blocks=self._hits,
            load_ns=self._load_ns,
            blocks_written=stats.counters.blocks_stored,
            refused={k: n for k, n in stats.counters.refusals.items() if n},
            lost=dict(self._lost),
            evicted=stats.slots.evicted,
            elapsed_s=elapsed_s,
            verified=self._verified,
            wrong=self._wrong,
            block_load=Latency.from_histograms(rows),
            facts=health.facts,
        )

    # --- one request

    def _serve(self, request: int) -> Iterator[None]:
        part = self._trace.slice_of(request)
        path, ids = self._keys[part], self._trace.ids[part]
        if not path:
            return
        if not self._job.speed:
            wanted = ids.tolist()
            most = self._setup.slots // _STORING_SHARE
            while len(self._storing) > most or any(one in self._storing for one in wanted):
                yield
        served = self._device.serve(self._trace.keys[part]) if self._device is not None else 0
        found = self._tier.lookup(path[served:])
        hits = yield from self._load(request, served, served + found)
        self._served[request], self._hits[request] = served, hits
        first, end = served + hits, min(len(path), self._setup.slots)
        if first < end:
            yield from self._store(request, first, end)
        elif served:
            self._tier.touch(path)

    def _load(self, request: int, first: int, end: int) -> Generator[None, None, int]:
        """Load the request's blocks from ``first`` to ``end``; returns how many it got in a row."""
        start = int(self._trace.starts[request])
        began = self._now_ns = time.monotonic_ns()
        flights: deque[tuple[int, int, list[int]]] = deque()
        got, whole = 0, True
        while first < end or flights:
            count = min(end - first, len(self._targets))
            if count:
                blocks = [self._targets.popleft() for _ in range(count)]
                keys = self._keys[start + first : start + first + count]
                flights.append((self._tier.load(keys, blocks), start + first, blocks))
                self._open_loads.add(flights[-1][0])
                first += count
            while flights and flights[0][0] in self._loaded:
                transfer_id, position, blocks = flights.popleft()
                result = self._loaded.pop(transfer_id)
                self._load_ns[request] = self._now_ns - began
                good = self._check(result, position, blocks)
                got += good if whole else 0
                whole = whole and good == len(blocks)
            if flights or first < end:
                yield
        return got

    def _check(self, result: TierResult, position: int, blocks: list[int]) -> int:
        """Compare what was loaded, and give its blocks back. How many are good from the first."""
        good = [status == RowStatus.OK for status in result.statuses.tolist()]
        for status in result.statuses[result.statuses != RowStatus.OK].tolist():
            self._lost[RowStatus(status).name.lower()] += 1
        if self._job.verify:
            ids = self._trace.ids[position : position + len(blocks)]
            for row, mark in enumerate(self._contents.marks(ids)):
                if good[row]:
                    self._verified += 1
                    self._wrong += not self._contents.holds(blocks[row], mark)
        for block in blocks:
            self._contents.wipe(block)
        self._targets.extend(blocks)
        return len(blocks) if all(good) else good.index(False)

    def _store(self, request: int, first: int, end: int) -> Iterator[None]:
        """Store the blocks from ``first`` to ``end``, in parts when memory is short.

        The last part goes first, so that the head is the youngest in the end, as from one call.
        """
        start = int(self._trace.starts[request])
        while end > first:
            count = min(end - first, self._pool)
            while len(self._sources) < count:
                yield
            begin = start + end - count
            ids = self._trace.ids[begin : start + end]
            blocks = [self._sources.popleft() for _ in range(count)]
            for block, mark in zip(blocks, self._contents.marks(ids), strict=True):
                self._contents.write(block, mark)
            prefix = self._keys[start : start + first] if end - count == first else ()
            store = self._tier.store(self._keys[begin : start + end], blocks, prefix=prefix)
            self._stores[store] = blocks
            self._stored_ids[store] = ids.tolist()
            self._storing.update(self._stored_ids[store])
            end -= count

    def _take_events(self) -> None:
        events = self._tier.poll()
        self._now_ns = time.monotonic_ns()
        for store in events.source_free:
            self._sources.extend(self._stores.pop(store))
        for result in events.finished:
            if result.transfer_id in self._open_loads:
                self._open_loads.remove(result.transfer_id)
                self._loaded[result.transfer_id] = result
                continue
            for one in self._stored_ids.pop(result.transfer_id):
                self._storing[one] -= 1
                if not self._storing[one]:
                    del self._storing[one]


def _goes_on(request: Iterator[Any]) -> bool:
    """Let a request go on; False when it has ended."""
    return next(request, _ENDED) is not _ENDED


_ENDED: Final = object()
