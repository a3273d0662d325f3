"""What the tier counts, as plain numbers and for Prometheus.

Counters only grow; gauges say how it is now. Slots that are *resident* are what the tier holds;
transfers *open* are what moves: the two are never added up. Hits are counted when a block has been
loaded on every rank, not when a lookup found it.

Prometheus comes as the optional extra ``kvdisk[metrics]``; nothing here imports it before
``prometheus_collector`` is called.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdisk.errors import ConfigError
from kvdisk.slots import SlotCounts
from kvdisk.transfer import FAILURES, Direction, RowStatus

_SUSPICIOUS_KEYS: Final = 1000

MISS_REASONS: Final = (
    "absent",  # the tier does not have the key
    "unavailable",  # its path sits out
    "lost",  # a rank's slot did not hold it any more
    "corrupt",  # not the bytes that were stored
    "failed",  # the disk failed
    "copy_failed",  # the copy into the block failed
    "timed_out",
    "busy",
    "refused",  # a rank did not try
)
REFUSAL_REASONS: Final = (
    "admission",
    "no_room",  # everything is in use
    "paused",  # no path takes stores
    "queue",  # a rank's queue or ring was full, or its path sits out
    "waiting",  # others wait for what it would have pushed out of the memory above
    "failed",
    "copy_failed",
    "timed_out",
    "busy",
)

_MISS_OF: Final = {
    RowStatus.MISS: "lost",
    RowStatus.CORRUPT: "corrupt",
    RowStatus.FAILED: "failed",
    RowStatus.COPY_FAILED: "copy_failed",
    RowStatus.TIMED_OUT: "timed_out",
    RowStatus.BUSY: "busy",
    RowStatus.REFUSED: "refused",
}
_REFUSAL_OF: Final = {
    RowStatus.REFUSED: "queue",
    RowStatus.FAILED: "failed",
    RowStatus.COPY_FAILED: "copy_failed",
    RowStatus.TIMED_OUT: "timed_out",
    RowStatus.BUSY: "busy",
}


@dataclass
class TierCounters:
    """Running counts of one scheduler, in blocks. ``block_bytes`` is over all ranks."""

    block_bytes: int
    keys_looked_up: int = 0
    hits_found: int = 0  # by lookups; what was loaded is ``blocks_loaded``
    blocks_loaded: int = 0
    blocks_stored: int = 0
    blocks_already_there: int = 0
    restored: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)  # direction, errno's name
    unknown_results: int = 0

    def copy(self) -> TierCounters:
        """As it is now."""
        return replace(
            self,
            misses=self.misses.copy(),
            refusals=self.refusals.copy(),
            errors=self.errors.copy(),
        )

    def looked_up(self, keys: int, found: int) -> None:
        self.keys_looked_up += keys
        self.hits_found += found

    def suspicion(self) -> str | None:
        """What to think of much that was stored and asked for without one hit; else None."""
        stored, asked = self.blocks_stored, self.keys_looked_up
        if self.hits_found or self.restored or min(stored, asked) < _SUSPICIOUS_KEYS:
            return None
        return (
            f"{stored} blocks were stored and {asked} keys looked up, and not one was found: are "
            "keys made the same way in every process (hash seed, tokens of a block)?"
        )

    def missed(self, reason: str, blocks: int) -> None:
        assert reason in MISS_REASONS, reason  # no other is told
        if blocks:
            self.misses[reason] += blocks

    def refused(self, reason: str, blocks: int) -> None:
        assert reason in REFUSAL_REASONS, reason
        if blocks:
            self.refusals[reason] += blocks

    def ended(
        self,
        direction: Direction,
        statuses: npt.NDArray[np.uint8],
        errors: npt.NDArray[np.int32],
    ) -> None:
        """A transfer's rows over all ranks."""
        rows: list[int] = np.bincount(statuses, minlength=max(RowStatus) + 1).tolist()
        if direction is Direction.LOAD:
            self.blocks_loaded += rows[RowStatus.OK]
            for status, reason in _MISS_OF.items():
                self.missed(reason, rows[status])
        else:
            self.blocks_stored += rows[RowStatus.OK]
            for status, reason in _REFUSAL_OF.items():
                self.refused(reason, rows[status])
        for number in errors[np.isin(statuses, FAILURES)].tolist():
            name = errno.errorcode.get(number, str(number))
            self.errors[direction.name.lower(), name] += 1


@dataclass(frozen=True)
class TierStats:
    """A snapshot. ``engines`` has each path's engine counters of this process, by path index."""

    counters: TierCounters
    slots: SlotCounts
    open_transfers: int
    engines: Mapping[int, Mapping[str, Any]]

    @property
    def bytes_loaded(self) -> int:
        """Payload bytes of loaded blocks over all ranks."""
        return self.counters.blocks_loaded * self.counters.block_bytes

    @property
    def bytes_stored(self) -> int:
        """Payload bytes of stored blocks over all ranks."""
        return self.counters.blocks_stored * self.counters.block_bytes

    def engine_sum(self, name: str) -> int:
        """An engine counter over all paths of this process."""
        return sum(int(stats[name]) for stats in self.engines.values())


# name, help text, how to read it from a snapshot
_COUNTERS: Final[tuple[tuple[str, str, Callable[[TierStats], int]], ...]] = (
    ("lookup_keys", "Keys looked up", lambda s: s.counters.keys_looked_up),
    ("lookup_hits", "Keys that a lookup found", lambda s: s.counters.hits_found),
    ("loaded_blocks", "Blocks loaded on every rank", lambda s: s.counters.blocks_loaded),
    ("loaded_bytes", "Payload bytes of loaded blocks", lambda s: s.bytes_loaded),
    ("stored_blocks", "Blocks stored on every rank", lambda s: s.counters.blocks_stored),
    ("stored_bytes", "Payload bytes of stored blocks", lambda s: s.bytes_stored),
    ("restored_blocks", "Blocks found at open", lambda s: s.counters.restored),
    ("evicted_blocks", "Blocks given up for room", lambda s: s.slots.evicted),
    ("late_results", "Results of slots given away since", lambda s: s.slots.stale),
)
_GAUGES: Final[tuple[tuple[str, str, Callable[[TierStats], int]], ...]] = (
    ("slots", "Slots in all", lambda s: s.slots.total),
    ("slots_resident", "Slots that hold a readable block", lambda s: s.slots.resident),
    ("slots_pinned", "Resident slots that loads use", lambda s: s.slots.pinned),
    ("slots_quarantined", "Slots that the disk may still touch", lambda s: s.slots.quarantined),
    ("slots_withheld", "Slots without a block, on paths that sit out", lambda s: s.slots.withheld),
    ("transfers_open", "Transfers under way", lambda s: s.open_transfers),
)
_ENGINE_GAUGES: Final = (
    ("ring_free", "Bounce buffers free"),
    ("ring_used", "Bounce buffers in use"),
    ("ring_quarantined", "Bounce buffers that the disk may still touch"),
    ("store_queue_bytes", "Bytes of stores that wait for a buffer"),
    ("pinned_bytes", "Memory of bounce buffers"),
)
_LATENCIES: Final = (
    ("load_row_ns", "load_seconds", "Submit to end of a block's load"),
    ("store_row_ns", "store_seconds", "Submit to end of a block's store"),
)
_BOUNDS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def prometheus_collector(snapshot: Callable[[], TierStats], health: Callable[[], str]) -> Any:
    """A collector to register with a ``prometheus_client`` registry.

    ``snapshot`` and ``health`` ("ok", "degraded" or "down") are called at every scrape, on the
    thread that scrapes: pass ``tier.stats`` and ``lambda: tier.health().status`` only where that
    thread is the tier's own, else something that hands over a recent value.

    Raises ConfigError when prometheus-client is not installed.
    """
    try:
        from prometheus_client import core
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise ConfigError(
            'metrics need prometheus-client: pip install "kvdisk[metrics]"'
        ) from error

    class KVDiskCollector(Collector):
        def collect(self) -> Iterator[Any]:
            stats = snapshot()
            for name, text, read in _COUNTERS:
                yield core.CounterMetricFamily(f"kvdisk_{name}", text, value=read(stats))
            for name, text, read in _GAUGES:
                yield core.GaugeMetricFamily(f"kvdisk_{name}", text, value=read(stats))
            for name, text in _ENGINE_GAUGES:
                value = stats.engine_sum(name)
                yield core.GaugeMetricFamily(f"kvdisk_{name}", text, value=value)
            yield _labelled(core, "misses", "Blocks not loaded", stats.counters.misses)
            yield _labelled(core, "refusals", "Blocks not stored", stats.counters.refusals)
            yield _errors(core, stats)
            yield from _latencies(core, stats)
            state = health()
            family = core.GaugeMetricFamily("kvdisk_health", "1 for the state", labels=["state"])
            for name in ("ok", "degraded", "down"):
                family.add_metric([name], float(name == state))
            yield family

    return KVDiskCollector()


def _labelled(core: Any, name: str, text: str, counts: Mapping[str, int]) -> Any:
    family = core.CounterMetricFamily(f"kvdisk_{name}", text, labels=["reason"])
    reasons = MISS_REASONS if name == "misses" else REFUSAL_REASONS
    for reason in reasons:  # all of them, so that a rate exists before the first event
        family.add_metric([reason], counts.get(reason, 0))
    return family


def _errors(core: Any, stats: TierStats) -> Any:
    family = core.CounterMetricFamily(
        "kvdisk_errors", "Blocks that failed, by errno", labels=["direction", "errno"]
    )
    for (direction, name), count in sorted(stats.counters.errors.items()):
        family.add_metric([direction, name], count)
    return family


def _latencies(core: Any, stats: TierStats) -> Iterator[Any]:
    """Histograms over all paths, from the engines' own much finer ones."""
    for source, name, text in _LATENCIES:
        histograms = [engine[source] for engine in stats.engines.values()]
        family = core.HistogramMetricFamily(f"kvdisk_{name}", text)
        buckets = [
            (str(bound), sum(_up_to(each["bins"], bound * 1e9) for each in histograms))
            for bound in _BOUNDS_S
        ]
        buckets.append(("+Inf", sum(each["count"] for each in histograms)))
        family.add_metric([], buckets, sum(each["sum"] for each in histograms) / 1e9)
        yield family


def _up_to(bins: Sequence[tuple[int, int]], bound_ns: float) -> int:
    return sum(count for value_ns, count in bins if value_ns <= bound_ns)
