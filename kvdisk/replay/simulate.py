"""A replay without I/O: the tier's own allocator and policies, asked as the tier asks them.

What always holds: a request makes the calls that a real run makes, in that order (``run`` has the
other side): look up the prefix, load it, store the rest behind it. Loads take as long as a disk
that has nothing else to do would take; who waits for whom is the model's business (``ttft``).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

from kvdisk.key_index import ABSENT, KeyBatch
from kvdisk.policy import AdmitAll, make_admission_policy, make_eviction_policy
from kvdisk.replay.job import ReplayJob, Setup
from kvdisk.replay.result import Outcome
from kvdisk.slots import SlotAllocator

_NS_PER_S: Final = 10**9
_PROGRESS_REQUESTS: Final = 256
# By then the table of what was seen is never crowded, so a larger one would say the same.
_REMEMBERED_MAX: Final = 16


class PrefixCache:
    """Keys in ``slots`` slots, used by whole prefixes: a tier without bytes, or a device."""

    def __init__(
        self,
        slots: int,
        eviction: str = "lru",
        admission: str = "all",
        *,
        remembered: int | None = None,
    ) -> None:
        """``remembered``: how many keys admission knows of, as many as slots unless given."""
        self._slots = slots
        self._counts_uses = eviction != "lru"
        self._allocator = SlotAllocator(slots, make_eviction_policy(eviction, slots))
        self._admission = make_admission_policy(admission, remembered or slots)
        self.refused: Counter[str] = Counter()
        self.stored = 0

    @property
    def evicted(self) -> int:
        return self._allocator.counts().evicted

    def serve(self, path: KeyBatch, served: int = 0) -> int:
        """How many blocks of ``path`` are here, from the ``served``-th on; the rest is stored.

        Those before are used again as far as they are here. A request longer than the cache keeps
        its head.
        """
        wanted = path[served:] if served else path
        hits = self._allocator.lookup(wanted)
        first, end = served + hits, min(len(path), self._slots)
        # The load is a use, and storing what is behind uses the whole prefix: LRU cannot tell that
        # from one use of it.
        if hits and (self._counts_uses or first >= end):
            self._allocator.touch(wanted if hits == len(wanted) else wanted[:hits])
        if first < end:
            self._store(path if end == len(path) else path[:end], first)
        elif served:
            self._allocator.touch(path)
        return hits

    def _store(self, path: KeyBatch, first: int) -> None:
        """``path`` from ``first`` on. Asking for all of it finds the rest where lookup did."""
        prefix = path[:0]
        if not isinstance(self._admission, AdmitAll):
            keys, prefix = path[first:], path[:first]
            absent = np.flatnonzero(self._allocator.find(keys) == ABSENT)
            turned_away = absent[~self._admission.admit(keys.pick(absent))]
            self.refused["admission"] += len(turned_away)
            path = keys.pick(np.delete(np.arange(len(keys)), turned_away))
        allocation = self._allocator.allocate(path, prefix)
        if allocation is None:
            self.refused["no_room"] += len(path)
            return
        rows, slots, tickets = allocation
        if len(rows):
            self._allocator.commit(slots, tickets, np.ones(len(rows), dtype=np.bool_))
            self.stored += len(rows)


def device_cache(job: ReplayJob) -> PrefixCache | None:
    """The cache in front of the tier, if there is one."""
    if not job.device_blocks:
        return None
    return PrefixCache(min(job.device_blocks, job.trace.distinct_blocks))


def simulate(job: ReplayJob, setup: Setup, progress: Callable[[int], None]) -> Outcome:
    """``progress`` is told the blocks asked for so far, times a block's bytes."""
    trace = job.trace
    device = device_cache(job)
    # More slots than there are blocks would take memory and change nothing.
    tier = PrefixCache(
        min(setup.slots, trace.distinct_blocks),
        setup.eviction,
        setup.admission,
        remembered=min(setup.slots, _REMEMBERED_MAX * trace.references),
    )
    keys, starts = trace.keys, trace.starts.tolist()
    served = np.zeros(len(trace), dtype=np.int64)
    hits = np.zeros(len(trace), dtype=np.int64)
    started = time.monotonic()
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        if start == end:
            continue
        path = keys[start:end]
        before = device.serve(path) if device is not None else 0
        served[request] = before
        hits[request] = tier.serve(path, before)
        if request % _PROGRESS_REQUESTS == 0:
            progress(end * job.block_bytes)
    elapsed_s = time.monotonic() - started
    return Outcome(
        setup=setup,
        simulated=True,
        device_blocks=served,
        hit_blocks=hits,
        load_ns=np.rint(hits * (job.block_bytes * _NS_PER_S / job.load_rate)).astype(np.int64),
        blocks_written=tier.stored,
        refused=dict(tier.refused),
        lost={},
        evicted=tier.evicted,
        elapsed_s=elapsed_s,
    )
