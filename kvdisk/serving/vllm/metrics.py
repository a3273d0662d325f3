"""kvdisk's counters in vLLM's metrics: names, and what has been counted since the last time."""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvdisk.metrics import MISS_REASONS, REFUSAL_REASONS, TierCounters
from kvdisk.slots import SlotCounts

_COUNTERS: Final = {
    "keys_looked_up": "Keys that were looked up",
    "hits_found": "Keys that a lookup found",
    "blocks_loaded": "Blocks loaded on every rank",
    "blocks_stored": "Blocks stored on every rank",
}
_GAUGES: Final = {
    "resident": "Slots that hold a readable block",
    "quarantined": "Slots that the disk may still touch",
}


def metric_definitions() -> dict[str, Any]:
    """As ``OffloadingSpec.build_metric_definitions`` gives them."""
    counters = {
        f"vllm:kvdisk_{name}": OffloadingCounterMetadata(documentation=text)
        for name, text in _COUNTERS.items()
    }
    counters["vllm:kvdisk_misses"] = OffloadingCounterMetadata(
        documentation="Blocks not loaded, by reason", labelnames=("reason",)
    )
    counters["vllm:kvdisk_refusals"] = OffloadingCounterMetadata(
        documentation="Blocks not stored, by reason", labelnames=("reason",)
    )
    gauges = {
        f"vllm:kvdisk_slots_{name}": OffloadingGaugeMetadata(documentation=text)
        for name, text in _GAUGES.items()
    }
    return {**counters, **gauges}


def counters_since(
    before: TierCounters, now: TierCounters, slots: SlotCounts
) -> OffloadingConnectorStats | None:
    """What was counted between two copies, or None when that is nothing."""
    stats = OffloadingConnectorStats()
    changed = False
    for name in _COUNTERS:
        grown = getattr(now, name) - getattr(before, name)
        if grown:
            changed = True
            stats.increase_counter(f"vllm:kvdisk_{name}", grown)
    for what, reasons, old, new in (
        ("misses", MISS_REASONS, before.misses, now.misses),
        ("refusals", REFUSAL_REASONS, before.refusals, now.refusals),
    ):
        for reason in reasons:
            grown = new[reason] - old[reason]
            if grown:
                changed = True
                stats.increase_counter(f"vllm:kvdisk_{what}", grown, (reason,))
    if not changed:
        return None
    for name in _GAUGES:
        stats.set_gauge(f"vllm:kvdisk_slots_{name}", getattr(slots, name))
    return stats
