"""``KVDiskTier``: the disk below vLLM's own RAM tier (``TieringOffloadingSpec``).

vLLM moves chunks between the GPU and its RAM tier; this moves whole rows of that memory, all ranks
of a chunk in one, to slots and back. It lives in the scheduler's process, on vLLM's thread, and
never waits there: stores go straight from the RAM tier's memory, loads through a buffer of ours,
so that a disk that hangs cannot write into memory that vLLM has given to somebody else.

Whose blocks these are follows from the engine's configuration, which vLLM does not hand to a
secondary tier. ``KVDiskTieringConnector`` passes it on. Without it nothing is kept for the next
start, unless the operator names the content with the option ``identity``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvdisk import DiskTier, Identity, Layout, RowStatus, TierConfig
from kvdisk.load_plan import longest_transfer_s
from kvdisk.metrics import TierCounters
from kvdisk.serving.vllm.allowances import Allowances
from kvdisk.serving.vllm.events import ChunkEvents
from kvdisk.serving.vllm.failsafe import Failsafe, failsafe
from kvdisk.serving.vllm.identity import (
    UNKNOWN_WEIGHTS,
    expected_backend,
    identity_of,
    resolve_weights,
    weights_of_path,
)
from kvdisk.serving.vllm.metrics import counters_since, metric_definitions
from kvdisk.serving.vllm.partial_loads import PartialLoads
from kvdisk.serving.vllm.ram_tier import RamTier
from kvdisk.serving.vllm.spec import keep_nothing_if, share_of_replica
from kvdisk.tier import opening_line
from kvdisk.transfer import Direction

Answer = TypeVar("Answer")

_UNKNOWN_CONTENT: Final = (
    "what changes the blocks' bytes is not known here: use kv_connector=KVDiskTieringConnector of "
    'kvdisk.serving.vllm, or name the content with the option "identity"'
)
_UNKNOWN_BACKEND: Final = (
    "which attention backend vLLM chooses cannot be told, and each has its own order of the bytes "
    'in a block: name one, or name the content with the option "identity"'
)
# As constants: to look a member of an enumeration up takes as long as to look a key up.
_HIT: Final = LookupResult.HIT
_MISS: Final = LookupResult.MISS
_LATER: Final = LookupResult.RETRY
# Of the RAM tier's rows: two shares may be held until they are stored, one for what was brought up.
# The fourth is left for what vLLM moves between GPU and RAM tier.
_SHARES: Final = 4
_STORED_SHARES: Final = 2
_STORE_WAIT: Final = "2s"  # well below the deadline: what begins late has the time to end

logger = init_logger("vllm.kvdisk")

# The engine's configuration, from our connector to the tier that it makes a moment later.
engine_config: list[Any] = []


@dataclass(frozen=True)
class _Job:
    """``keys`` in the order of our transfer."""

    of_vllm: TransferJob
    keys: list[OffloadKey]
    is_load: bool


class KVDiskTier(Failsafe, SecondaryTierManager):  # type: ignore[misc]
    """``options`` are ``TierConfig``'s, ``weights`` and ``identity``; see docs/vllm.md."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        enable_kv_events: bool = False,
        locality: str | None = "LOCAL",
        weights: str = "",
        identity: str = "",
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        layout = _layout_of(primary_kv_view)
        share_rows = max(1, layout.block_count // _SHARES)
        # What waits for the disk holds rows of the RAM tier and nothing of a GPU.
        waiting_bytes = _STORED_SHARES * share_rows * layout.block_bytes
        options = {"store_wait": _STORE_WAIT, "store_queue": f"{waiting_bytes}B", **options}
        config, content = _settings(offloading_spec, layout, weights, identity, options)
        self._held_rows_max = max(1, config.store_queue_bytes // layout.block_bytes)
        self._held_rows = 0  # of the RAM tier, until a store ends
        self._drain_limit_s = longest_transfer_s(config)
        wanted = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events = ChunkEvents(wanted=wanted, locality=self.locality)
        self._tier = DiskTier.open(layout, content, config, direct_stores=True, tell_removed=wanted)
        health = self._tier.health()
        logger.info("%s", opening_line(health.facts, self._tier.stats().counters.restored))
        self._jobs: dict[int, _Job] = {}  # by our transfer
        self._finished: list[JobResult] = []
        self._told = TierCounters(block_bytes=layout.block_bytes)
        self.config = config
        self.rows = layout.block_count  # of the RAM tier
        self.above: RamTier | None = None  # what is told of rows that change, if anything
        self.load_listener: PartialLoads | None = None
        groups = offloading_spec.config.groups
        cache = offloading_spec.config.cache
        block_tokens = [group.tokens_per_block for group in groups] or [cache.tokens_per_hash]
        chunk_tokens = [int(tokens * cache.blocks_per_chunk) for tokens in block_tokens]
        self.allowances = Allowances(
            min(chunk_tokens),  # as far apart as chunks end, whichever group's they are
            len(chunk_tokens),
            share_rows,
            whole=config.partial_loads == "off",
        )
        self.token_bytes = sum(self.block_size_bytes / tokens for tokens in chunk_tokens)

    def disk_rate(self, direction: Direction) -> float | None:
        """Bytes a second that the disk gives to loads or stores; None: not yet known."""
        return self._tier.disk_rate(direction)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()

    @failsafe(lambda self, key, req_context: _MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        end_token = req_context.get_offload_key_position(key) or 0
        may_have = self.allowances.may_have(req_context.req_id, end_token)
        look = self.allowances.look
        if look is None:
            return _HIT if may_have and self._tier.contains([key]) else _MISS
        found = may_have and self._tier.contains([key], counted=False)
        look.told(end_token, found)
        return _LATER if found else _MISS

    @failsafe(lambda self, job_metadata: self._fail(job_metadata))
    def submit_store(self, job_metadata: TransferJob) -> None:
        """All of it or nothing, unless it is alone: vLLM holds all of its rows until it ends."""
        keys, rows = _head_first(job_metadata)
        self._rows_changed(len(keys))
        self._poll()  # what has ended since vLLM last asked holds nothing any more
        if self._held_rows and self._held_rows + len(keys) > self._held_rows_max:
            self._tier.refused("queue", len(keys))
            self._fail(job_metadata)
            return
        self._held_rows += len(keys)
        transfer_id = self._tier.store(keys, rows)
        self._jobs[transfer_id] = _Job(job_metadata, keys, is_load=False)

    @failsafe(lambda self, job_metadata: self._fail(job_metadata))
    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        self._rows_changed(len(keys))
        self.allowances.load_began(job_metadata.req_context.req_id)
        within_s = None
        if self.load_listener is not None:
            within_s = self.load_listener.load_within_s()
            tokens = round(len(keys) * self.block_size_bytes / self.token_bytes)
            self.load_listener.load_began(job_metadata.req_context.req_id, tokens)
        rows = np.asarray(job_metadata.chunk_ids)
        transfer_id = self._tier.load(keys, rows, within_s=within_s)
        self._jobs[transfer_id] = _Job(job_metadata, keys, is_load=True)

    @failsafe(lambda self: self._take_finished())
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._poll()
        return self._take_finished()

    @failsafe(lambda self: self._events.take())
    def take_events(self) -> Iterable[OffloadingEvent]:
        self._tell_removed()
        return self._events.take()

    @failsafe(lambda self, keys, req_context: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._tier.touch(list(keys))

    @failsafe(lambda self, req_context: RequestOffloadingContext())
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.allowances.arrived(req_context.req_id)
        return RequestOffloadingContext()

    @failsafe(lambda self, req_context: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self.allowances.gone(req_context.req_id)

    def drain_jobs(self) -> None:
        """Called when vLLM resets its cache, as after an update of the weights: so forget all.

        Every transfer ends by its deadline, so this does too.
        """
        self.allowances.reset()
        if self.broken:
            logger.error(
                "kvdisk: it has broken down before, so the reset does not reach the disk. Remove "
                "the files before the next start: it would find what was there."
            )
        elif not self._tier.clear():
            logger.error("kvdisk: the disk does not take the reset; it is tried on until it does.")
        self._wait_for_jobs()

    @failsafe(lambda self, ask, otherwise: otherwise)
    def ask(self, ask: Callable[[Allowances], Answer], otherwise: Answer) -> Answer:
        """For who settles what a request may have. Once broken, there is nothing to be had."""
        return ask(self.allowances)

    @failsafe(lambda self, request_id, cut_token, chunks: None)
    def left_out(self, request_id: str, cut_token: int, chunks: int) -> None:
        """So many of a request's chunks, of which the first ends there, were not stored, since
        others wait for what is there.
        """
        self.allowances.cut(request_id, cut_token)
        self._tier.refused("waiting", chunks)

    @failsafe(lambda self: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = self._tier.stats()
        changed = counters_since(self._told, stats.counters, stats.slots)
        self._told = stats.counters
        return changed

    def shutdown(self) -> None:
        self._tier.close()

    # --- steps of the above

    @failsafe(lambda self: None)
    def _wait_for_jobs(self) -> None:
        until = time.monotonic() + self._drain_limit_s
        while self._jobs and time.monotonic() < until:
            self._tier.wait(1.0)
            self._poll()

    def _take_finished(self) -> list[JobResult]:
        finished, self._finished = self._finished, []
        return finished

    def _fail(self, job: TransferJob) -> None:
        self._finished.append(JobResult(job_id=job.job_id, success=False))

    def _break_down(self) -> None:
        """Nothing is copied any more when the jobs end, since vLLM then reuses their rows."""
        self._tier.close()
        self._held_rows = 0
        jobs = [*self._jobs.values()]
        self._jobs.clear()
        for job in jobs:
            self._fail(job.of_vllm)
            if job.is_load and self.load_listener is not None:
                self.load_listener.load_ended(job.of_vllm.req_context.req_id)

    def _poll(self) -> None:
        finished = self._tier.poll().finished
        self._tell_removed()
        for result in finished:
            job = self._jobs[result.transfer_id]  # until its end is told, whatever happens
            good = result.statuses == RowStatus.OK
            if not job.is_load:
                self._held_rows -= len(job.keys)
                stored = zip(job.keys, good.tolist(), strict=True)
                self._events.stored(key for key, ok in stored if ok)
                good |= result.statuses == RowStatus.BUSY  # another store of it is under way
            moved = [key for key, ok in zip(job.keys, good.tolist(), strict=True) if ok]
            if job.is_load:
                self._load_ended(job, whole=len(moved) == len(job.keys))
            del self._jobs[result.transfer_id]
            self._finished.append(
                JobResult(
                    job_id=job.of_vllm.job_id,
                    success=len(moved) == len(job.keys),
                    successful_keys=moved if job.is_load else None,
                    transfer_time=time.monotonic() - job.of_vllm.submit_time,
                    transfer_bytes=len(moved) * self.block_size_bytes,
                )
            )

    def _load_ended(self, ended: _Job, *, whole: bool) -> None:
        request_id = ended.of_vllm.req_context.req_id
        loads = (job for job in self._jobs.values() if job.is_load and job is not ended)
        others = any(job.of_vllm.req_context.req_id == request_id for job in loads)
        self.allowances.load_ended(request_id, whole=whole, still_loading=others)
        if self.load_listener is not None and not others:
            self.load_listener.load_ended(request_id)

    def _rows_changed(self, rows: int) -> None:
        if self.above is not None:
            self.above.changes(rows)

    def _tell_removed(self) -> None:
        self._events.removed(OffloadKey(key) for key in self._tier.take_removed())


def _head_first(job: TransferJob) -> tuple[list[OffloadKey], npt.NDArray[np.int64]]:
    """The keys of a store and their rows, in the order of their tokens: vLLM keeps them as a set.

    The disk gives up a prefix's tail before its head, and what does not fit is the last.
    """
    position = job.req_context.get_offload_key_position
    pairs = zip(job.keys, np.asarray(job.chunk_ids).tolist(), strict=True)
    ordered = sorted(pairs, key=lambda pair: position(pair[0]) or 0)
    return [key for key, _ in ordered], np.array([row for _, row in ordered], dtype=np.int64)


def _layout_of(primary_kv_view: memoryview) -> Layout:
    """The rows of the RAM tier. vLLM owns the memory and outlives us, so nothing is kept alive."""
    rows = np.asarray(primary_kv_view)
    assert rows.ndim == 2, "the RAM tier has one row for each chunk"
    # A plain description: a tensor kept by us would stop vLLM from releasing its memory.
    described = Layout.from_tensors(rows)
    return Layout(described.regions, described.block_count, described.block_bytes)


def _settings(
    spec: Any, layout: Layout, weights: str, identity: str, options: dict[str, Any]
) -> tuple[TierConfig, Identity]:
    config = spec.config
    fields: dict[str, object] = {
        "rows": layout.fingerprint_fields(),
        "order": config.kv_cache_layout or "",
        "groups": [
            {"tokens": group.tokens_per_block, "layers": list(group.layer_names)}
            for group in config.groups
        ],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "world_size": config.parallel.world_size,
        "operator": identity,
    }
    if engine_config:
        engine = engine_config[0]
        weights, reason = resolve_weights(engine, weights)
        fields["backend"] = backend = expected_backend(engine)
        if backend is None and not identity:
            reason = reason or _UNKNOWN_BACKEND
        keep_nothing_if(reason, options)
        settings = share_of_replica(TierConfig.from_mapping(options), config)
        replica = config.parallel.data_parallel_index
        return settings, identity_of(engine, fields, replica=replica, weights=weights)
    if not identity and options.get("persist") is not False:
        keep_nothing_if(_UNKNOWN_CONTENT, options)
    content = Identity(
        model=config.model.name,
        weights=weights or weights_of_path(config.model.name) or UNKNOWN_WEIGHTS,
        dtype=config.model.dtype,
        block_tokens=config.cache.tokens_per_hash,
        layout=fields,
        key_hash="vLLM's",
        parallel={
            "replica": config.parallel.data_parallel_index,
            "tensor": config.parallel.tp_size,
            "pipeline": config.parallel.pp_size,
        },
    )
    return share_of_replica(TierConfig.from_mapping(options), config), content
