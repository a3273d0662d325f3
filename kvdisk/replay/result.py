"""What a run found, request by request, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvdisk.bench.result import Latency
from kvdisk.replay.job import Setup
from kvdisk.replay.trace import Numbers, Trace


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One setup's run. The arrays have an entry for each request.

    ``device_blocks`` were served by the cache in front of the tier, ``hit_blocks`` behind them by
    the tier: together the request's prefix that needs no computing. ``load_ns`` is from the
    lookup until the last block was there, or what a disk that is idle would take; 0 where nothing
    was loaded. ``refused`` counts blocks that were offered and not stored, ``lost`` blocks that
    were found and could not be loaded, each by reason; ``wrong`` those among the loaded whose bytes
    were not the stored ones.
    """

    setup: Setup
    simulated: bool
    device_blocks: Numbers
    hit_blocks: Numbers
    load_ns: Numbers
    blocks_written: int
    refused: Mapping[str, int]
    lost: Mapping[str, int]
    evicted: int
    elapsed_s: float
    verified: int = 0
    wrong: int = 0
    block_load: Latency = field(default_factory=Latency)  # of single blocks, by the engine
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def blocks_read(self) -> int:
        return int(self.hit_blocks.sum())

    def device_tokens(self, trace: Trace) -> Numbers:
        """Of each request, served by the device's cache."""
        return _tokens(trace, self.device_blocks)

    def hit_tokens(self, trace: Trace) -> Numbers:
        """Of each request, loaded from the tier."""
        return _tokens(trace, self.device_blocks + self.hit_blocks) - self.device_tokens(trace)

    def load_percentile_ns(self, percent: float) -> float:
        """Of the requests that loaded something."""
        loads = self.load_ns[self.load_ns > 0]
        return float(np.percentile(loads, percent)) if len(loads) else 0.0


def _tokens(trace: Trace, blocks: Numbers) -> Numbers:
    """In each request's first ``blocks`` blocks; the last one may be partly filled."""
    return np.minimum(blocks * trace.block_tokens, trace.input_tokens)
