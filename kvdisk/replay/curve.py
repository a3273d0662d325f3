"""Hit rate against capacity, for every capacity at once: what LRU would have.

Mattson et al., "Evaluation techniques for storage hierarchies" (IBM Systems Journal, 1970): under
LRU a block is there exactly when fewer different blocks than there are slots were used since its
last use. That number, the stack distance, does not depend on the capacity.

A request uses its prefix at once, the head youngest, as the tier's own policy orders it. So the
distance of a block is taken before the request, and a hit needs every block before it as well: what
counts is the largest distance up to there. Exact for a tier that evicts one block at a time; ours
makes room for up to a 512th of its slots at once.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvdisk.replay.trace import Numbers, Trace

NEVER: Final = 2**63 - 1


class LruCurve:
    """Blocks and tokens of a trace that LRU finds, by number of slots."""

    def __init__(self, trace: Trace) -> None:
        distances = stack_distances(trace)
        order = np.argsort(distances, kind="stable")
        self._distances = distances[order]
        self._tokens = np.concatenate([[0], np.cumsum(trace.reference_tokens[order])])

    def hit_blocks(self, slots: int) -> int:
        return int(np.searchsorted(self._distances, slots, side="right"))

    def hit_tokens(self, slots: int) -> int:
        return int(self._tokens[self.hit_blocks(slots)])


def stack_distances(trace: Trace) -> Numbers:
    """For each reference the fewest slots with which LRU finds it and all before it.

    ``NEVER`` for blocks that were not used before, and for all behind them.
    """
    _, dense = np.unique(trace.ids, return_inverse=True)
    total = trace.references
    last = np.full(total, -1, dtype=np.int64)  # of a block: its place in the order of use
    ages = _Ages(total)
    distances = np.full(total, NEVER, dtype=np.int64)
    for start, end in zip(trace.starts[:-1].tolist(), trace.starts[1:].tolist(), strict=True):
        blocks = dense[start:end]
        places = last[blocks]
        known = places >= 0
        here = distances[start:end]
        here[known] = ages.not_older(places[known])
        np.maximum.accumulate(here, out=here)
        ages.remove(places[known])
        places = np.arange(end - 1, start - 1, -1)  # the head is the youngest
        last[blocks] = places
        ages.add(places)
    return distances


class _Ages:
    """Which places in the order of use are taken, counted in buckets of about a square root."""

    def __init__(self, places: int) -> None:
        self._shift = max(6, (places.bit_length() + 1) // 2)
        buckets = (places >> self._shift) + 1
        self._taken = np.zeros((buckets, 1 << self._shift), dtype=np.int8)
        self._flat = self._taken.reshape(-1)
        self._counts = np.zeros(buckets, dtype=np.int64)
        self._columns = np.arange(1 << self._shift)

    def add(self, places: Numbers) -> None:
        self._flat[places] = 1
        np.add.at(self._counts, places >> self._shift, 1)

    def remove(self, places: Numbers) -> None:
        self._flat[places] = 0
        np.subtract.at(self._counts, places >> self._shift, 1)

    def not_older(self, places: Numbers) -> Numbers:
        """How many places are taken from each of ``places`` on, itself included."""
        buckets = places >> self._shift
        first = int(buckets.min()) if len(buckets) else 0
        younger = self._counts[first:][::-1].cumsum()[::-1]
        offsets = places - (buckets << self._shift)
        rows = self._taken[buckets]
        rows[self._columns < offsets[:, None]] = 0
        within = rows.sum(axis=1, dtype=np.int64)
        taken: Numbers = younger[buckets - first] - self._counts[buckets] + within
        return taken
