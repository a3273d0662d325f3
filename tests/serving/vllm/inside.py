"""Looks into the live objects of an engine that runs in this process (``in_process`` engines).

What a serving engine does not tell from outside: whether anything is left of requests that ended,
and whether a router that follows the events would know what the disk holds.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sized
from typing import Any

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.kv_cache_utils import get_group_id

from kvdisk.scheduler import TierScheduler
from kvdisk.serving.vllm.manager import KVDiskManager
from kvdisk.slots import SlotState
from kvdisk.worker import TierWorker

SETTLE_S = 60.0
# Ranks, paths and tensors: tables that do not grow with requests.
KEPT = {"_opened", "_rank_paths", "_up", "_ranks", "_paths", "_lost", "_tensors"}
KEPT |= {"_disk_meters", "_watched"}
STORAGE = "STORAGE"


def core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def settle(llm: Any) -> bool:
    """Step on until there is nothing to do; False when that does not come."""
    until = time.monotonic() + SETTLE_S
    while core(llm).scheduler.has_requests() and time.monotonic() < until:
        llm.llm_engine.step()
    return not core(llm).scheduler.has_requests()


class Leftovers:
    """How much there still is of what should be nothing, by name. ``scheduler`` and ``worker`` are
    the tier's two halves."""

    def __init__(self, llm: Any) -> None:
        self.found: dict[str, int] = {"work for the engine": int(not settle(llm))}
        connector = core(llm).scheduler.connector
        half = connector.connector_scheduler
        self.count(connector.planner, "_requests")
        self.found["planner's books"] = int(not connector.planner.idle)
        self.count(
            half, "_jobs", "_req_status", "_block_id_to_pending_jobs", "_chunks_being_loaded"
        )
        self.scheduler: TierScheduler
        self.worker: TierWorker
        if isinstance(half.manager, KVDiskManager):
            self.direct(half.manager)
        else:
            self.below_ram(half.manager)
        slots = self.scheduler.counts()
        for name in ("pinned", "storing", "abandoned", "retired", "quarantined"):
            self.found[f"slots {name}"] = getattr(slots, name)
        self.count_all(self.scheduler, self.scheduler._open, self.scheduler._clears)
        self.count_all(self.worker, *self.worker._paths.values())
        self.found["DiskPath._generations"] -= 1  # the engine in use
        for stats in self.worker.stats().values():
            for name in ("ring_used", "ring_quarantined", "store_queue_bytes"):
                self.found[name] = self.found.get(name, 0) + int(str(stats[name]))
        self.scheduler.check()

    def direct(self, manager: KVDiskManager) -> None:
        rank = get_kv_transfer_group().connector_worker
        self.found["broken"] = int(manager.broken) + int(rank.worker.broken)
        self.count(rank, "_load_jobs", "_unsubmitted_store_jobs")
        self.count(rank, "_failed_requests", "_failed_blocks")
        self.count_all(manager, rank.worker)
        self.scheduler, self.worker = manager.scheduler, rank.worker.tier_worker

    def below_ram(self, manager: Any) -> None:
        self.count(manager, "_jobs", "_req_state", "_pending_load_submissions")
        self.count(manager, "_request_load_sources")
        (tier,) = manager.secondary_tiers
        self.found["broken"] = int(tier.broken)
        self.count_all(tier)
        self.count(tier, "allowances")
        self.scheduler, self.worker = tier._tier._scheduler, tier._tier._worker

    def count(self, owner: Any, *names: str) -> None:
        for name in names:
            held: Sized | None = getattr(owner, name)
            self.found[f"{type(owner).__name__}.{name}"] = 0 if held is None else len(held)

    def count_all(self, *owners: Any) -> None:
        """Every table of ``owners``, but those that are there for good."""
        for owner in owners:
            tables = [
                name for name, value in vars(owner).items() if isinstance(value, dict | list | set)
            ]
            assert tables, f"{owner} has no tables: look for them elsewhere"
            self.count(owner, *(name for name in tables if name not in KEPT))


def leftovers(llm: Any) -> dict[str, int]:
    return Leftovers(llm).found


class Router:
    """Follows the engine's events for the disk."""

    def __init__(self, llm: Any) -> None:
        self.held: set[tuple[bytes, int]] = set()
        self.stored = self.removed = 0
        core(llm).scheduler.kv_event_publisher.publish = self.publish

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if getattr(event, "medium", None) != STORAGE:
                continue
            keys = {(bytes(block), event.group_idx) for block in event.block_hashes}
            if isinstance(event, BlockStored):
                assert not keys & self.held, "stored twice"
                self.held |= keys
                self.stored += len(keys)
            elif isinstance(event, BlockRemoved):
                assert keys <= self.held, "removed, but not there"
                self.held -= keys
                self.removed += len(keys)

    def report(self, llm: Any) -> dict[str, int]:
        """``wrong``: keys of which the router believes what is not so."""
        entries = Leftovers(llm).scheduler._allocator.entries()
        keys = [entry.key for entry in entries if entry.state is SlotState.RESIDENT]
        resident = {(key[:-4], int.from_bytes(key[-4:], "big")) for key in keys}
        wrong = len(resident ^ self.held)
        return {
            "stored": self.stored,
            "removed": self.removed,
            "resident": len(resident),
            "wrong": wrong,
        }


def groups(llm: Any) -> int:
    return len(core(llm).scheduler.kv_cache_config.kv_cache_groups)


def blocks(llm: Any) -> dict[str, str]:
    """Of every block that the engine's cache holds: its hash, and a digest of its bytes."""
    torch.accelerator.synchronize()
    caches = core(llm).model_executor.driver_worker.worker.model_runner.kv_caches
    count = len(core(llm).scheduler.kv_cache_manager.block_pool.blocks)
    of_blocks = [cache.movedim(cache.shape.index(count), 0) for cache in caches]
    return {block.block_hash.hex(): _digest(of_blocks, block.block_id) for block in _cached(llm)}


def spoil(llm: Any, group: int) -> int:
    """Change the bytes of every block that the engine's cache holds of ``group``; their number."""
    cached = [each.block_id for each in _cached(llm) if get_group_id(each.block_hash) == group]
    for tensor in _tensors():
        tensor[cached] = 0
    return len(cached)


def _cached(llm: Any) -> list[Any]:
    pool = core(llm).scheduler.kv_cache_manager.block_pool
    return [block for block in pool.blocks if block.block_hash is not None]


def _tensors() -> list[Any]:
    """The cache, a row for each block."""
    worker = get_kv_transfer_group().connector_worker.worker
    tensors: list[Any] = worker.device if hasattr(worker, "device") else worker._tensors
    return tensors


def _digest(tensors: list[Any], block: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor[block].contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()
