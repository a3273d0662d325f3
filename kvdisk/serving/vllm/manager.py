"""The scheduler's side under vLLM's offloading connector: its questions, answered by our tier.

vLLM names *chunks*, one or several blocks under one key; a slot holds a block. So a chunk of
several blocks is as many keys here, the chunk's with a number behind it, and is there when all
are. Small blocks need no chunks for the disk's sake: the engine reads neighbours together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdisk import RowStatus, TierConfig, TierScheduler
from kvdisk.messages import Clear, RankOpened, RankReport, Transfer
from kvdisk.metrics import TierCounters
from kvdisk.serving.vllm.events import ChunkEvents
from kvdisk.serving.vllm.failsafe import Failsafe, failsafe
from kvdisk.serving.vllm.metrics import counters_since
from kvdisk.transfer import Direction

# As constants: to look a member of an enumeration up takes as long as to look a key up.
_HIT: Final = LookupResult.HIT
_MISS: Final = LookupResult.MISS
_NOTHING: Final = Transfer(
    0, Direction.LOAD, [], np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.intp)
)


@dataclass
class KVDiskLoadStoreSpec(LoadStoreSpec):  # type: ignore[misc]
    """What a rank needs beside vLLM's block ids.

    ``transfer`` is of ``row_count`` rows in all, a block each, in the order of the chunks;
    ``transfer.positions`` says which of them it moves. Its block ids are the worker's to fill in.
    ``group_ids`` has each chunk's KV cache group.
    """

    transfer: Transfer
    row_count: int
    group_ids: list[int]


class KVDiskManager(Failsafe, OffloadingManager):  # type: ignore[misc]
    """``scheduler`` owns the slots; what the ranks report comes in through ``apply``."""

    def __init__(
        self,
        config: TierConfig,
        block_bytes: int,
        *,
        world_size: int,
        blocks_per_chunk: int,
        events: bool = False,
    ) -> None:
        self.scheduler = TierScheduler(
            config, block_bytes, world_size=world_size, tell_removed=events
        )
        self._blocks_per_chunk = blocks_per_chunk
        self._events = ChunkEvents(wanted=events)
        self._stores: dict[int, list[OffloadKey]] = {}
        self._loads: dict[int, str] = {}  # the request that each load is for
        self._recompute: set[str] = set()  # requests that have had a load fail
        self.load_within_s: Callable[[], float | None] = lambda: None  # None: as configured
        self._told = TierCounters(block_bytes=self.scheduler.counters.block_bytes)
        self._clears: list[Clear] = []  # not yet sent

    # --- the ranks

    def attach(self, opened: RankOpened) -> bool:
        complete = self.scheduler.attach(opened)
        if complete and self.scheduler.needs_clear:
            self.reset_cache()
        return complete

    @failsafe(lambda self, reports: None)
    def apply(self, reports: Iterable[RankReport]) -> None:
        for report in reports:
            self.scheduler.apply(report)
        self.scheduler.take_source_free()  # vLLM waits for the ranks itself before it reuses blocks
        self._tell_removed()
        for result in self.scheduler.take_finished():
            request = self._loads.pop(result.transfer_id, None)
            if request is not None and not result.ok:
                self._recompute.add(request)
            chunks = self._stores.pop(result.transfer_id, None)
            if chunks is None:
                continue
            stored = (result.statuses == RowStatus.OK).reshape(-1, self._blocks_per_chunk)
            self._events.stored(
                chunk for chunk, ok in zip(chunks, stored.all(axis=1), strict=True) if ok
            )

    def take_clears(self) -> list[Clear]:
        """For every rank: make what is stored so far unreadable."""
        clears, self._clears = self._clears, []
        return clears

    # --- vLLM's questions

    @failsafe(lambda self, key, req_context: _MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if req_context.req_id in self._recompute:
            return _MISS  # it has waited once: what it still lacks is computed
        found = self.scheduler.contains(self._rows([key]))
        return _HIT if found else _MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.DISK

    @failsafe(lambda self, keys, req_context: self._spec(_NOTHING, list(keys)))
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        rows = self._rows(keys)
        transfer = self.scheduler.load(rows, [0] * len(rows))
        transfer = replace(transfer, within_s=self.load_within_s())
        self._loads[transfer.id] = req_context.req_id
        return self._spec(transfer, list(keys))

    @failsafe(lambda self, keys, req_context: self._store_nothing())
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        wanted = list(keys)
        rows = self._rows(wanted)
        transfer = self.scheduler.store(rows, [0] * len(rows))
        if not len(transfer):
            # All there already, no room, or the disk sits out: vLLM shall go on, and not come back.
            self.apply(())
            return self._store_nothing()
        per_chunk = self._blocks_per_chunk
        chunk_of_row, row_of_chunk = np.divmod(transfer.positions, per_chunk)
        kept = np.unique(chunk_of_row)
        positions = np.searchsorted(kept, chunk_of_row) * per_chunk + row_of_chunk
        chunks = [wanted[chunk] for chunk in kept.tolist()]
        self._stores[transfer.id] = wanted
        return PrepareStoreOutput(
            chunks, self._spec(replace(transfer, positions=positions), chunks), []
        )

    @failsafe(lambda self, keys, req_context: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.scheduler.touch(self._rows(keys))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._recompute.discard(req_context.req_id)
        # What still loads for it tells nothing any more.
        self._loads = {k: v for k, v in self._loads.items() if v != req_context.req_id}

    @failsafe(lambda self: self._events.take())
    def take_events(self) -> Iterable[OffloadingEvent]:
        self._tell_removed()
        return self._events.take()

    def reset_cache(self) -> None:
        self._clears.append(self.scheduler.clear())

    def has_pending_work(self) -> bool:
        """Whether the engine must step without requests: to send a clear, not to wait for it."""
        return bool(self._clears)

    @failsafe(lambda self: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        now = self.scheduler.counters.copy()
        stats = counters_since(self._told, now, self.scheduler.counts())
        self._told = now
        return stats

    # --- steps of the above

    def _tell_removed(self) -> None:
        rows = self.scheduler.take_removed()
        if self._blocks_per_chunk > 1:
            rows = [row.rpartition(b"/")[0] for row in rows]  # its chunk, which lacks it now
        self._events.removed(OffloadKey(row) for row in rows)

    def _rows(self, keys: Collection[OffloadKey]) -> list[bytes]:
        if self._blocks_per_chunk == 1:
            return list(keys)
        numbers = [b"/%d" % number for number in range(self._blocks_per_chunk)]
        return [bytes(key) + number for key in keys for number in numbers]

    def _store_nothing(self) -> PrepareStoreOutput:
        return PrepareStoreOutput([], KVDiskLoadStoreSpec(_NOTHING, 0, []), [])

    def _spec(self, transfer: Transfer, keys: list[OffloadKey]) -> KVDiskLoadStoreSpec:
        groups = [int.from_bytes(key[-4:], "big") for key in keys]
        return KVDiskLoadStoreSpec(transfer, len(keys) * self._blocks_per_chunk, groups)
