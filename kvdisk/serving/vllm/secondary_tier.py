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
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Final

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
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
from kvdisk.metrics import TierCounters
from kvdisk.serving.vllm.events import ChunkEvents
from kvdisk.serving.vllm.failsafe import Failsafe, failsafe
from kvdisk.serving.vllm.identity import (
    UNKNOWN_WEIGHTS,
    identity_of,
    resolve_weights,
    weights_of_path,
)
from kvdisk.serving.vllm.metrics import counters_since, metric_definitions
from kvdisk.serving.vllm.partial_loads import PartialLoads
from kvdisk.serving.vllm.spec import (
    keep_nothing_if,
    require_flush_before_zeroing,
    share_of_replica,
)
from kvdisk.tier import opening_line

_UNKNOWN_CONTENT: Final = (
    "what changes the blocks' bytes is not known here: use kv_connector=KVDiskTieringConnector of "
    'kvdisk.serving.vllm, or name the content with the option "identity"'
)
# As constants: to look a member of an enumeration up takes as long as to look a key up.
_HIT: Final = LookupResult.HIT
_MISS: Final = LookupResult.MISS
_SLACK_S: Final = 30.0  # beyond the longest deadline

logger = init_logger("vllm.kvdisk")

# The engine's configuration, from the connector to the tier that is made a moment later.
_engine_config: list[Any] = []


class KVDiskTieringConnector(PartialLoads, OffloadingConnector):  # type: ignore[misc]
    """vLLM's offloading connector, which lets ``KVDiskTier`` know whose blocks it keeps.

    It also says how much of a prefix is worth bringing back from the disk.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        require_flush_before_zeroing(vllm_config, kv_cache_config)
        _engine_config[:] = [vllm_config]
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            _engine_config.clear()
        self._tier: KVDiskTier | None = None
        if self.connector_scheduler is not None:
            tiers = self.connector_scheduler.manager.secondary_tiers
            self._tier = next((each for each in tiers if isinstance(each, KVDiskTier)), None)
        if self._tier is not None:
            self.plan_loads(self._tier.config, self._tier.token_bytes, self._tier.load_rate)
            self._tier.partial_loads = self

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How much the disk gives is settled when a request is first asked for."""
        tier, request_id, now_s = self._tier, request.request_id, time.monotonic()
        if tier is not None and not tier.has_allowance(request_id):
            if self.ask_planner(lambda it: it.busy(request_id, now_s), False):
                return None, False
            missing = request.num_tokens - num_computed_tokens
            wanted = self.ask_planner(
                lambda it: it.tokens_to_load(request_id, missing, 0, now_s), missing
            )
            if wanted is None:
                return None, False
            tier.allow(request_id, num_computed_tokens, wanted)
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._tier is not None:
            self._tier.forget_allowance(request.request_id)  # preempted, it is asked for anew
        self.settled(request, num_external_tokens)


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
        config, content = _settings(offloading_spec, layout, weights, identity, options)
        longest_ns = max(config.load_deadline_ns, config.store_deadline_ns)
        self._drain_limit_s = longest_ns / 1e9 + _SLACK_S
        wanted = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events = ChunkEvents(wanted=wanted, locality=self.locality)
        self._tier = DiskTier.open(layout, content, config, direct_stores=True, tell_removed=wanted)
        health = self._tier.health()
        logger.info("%s", opening_line(health.facts, self._tier.stats().counters.restored))
        self._jobs: dict[int, tuple[TransferJob, bool]] = {}  # by our transfer; whether a load
        self._finished: list[JobResult] = []
        self._waited: dict[str, bool] = {}  # by request: whether it has waited in vain
        self._told = TierCounters(block_bytes=layout.block_bytes)
        self.config = config
        self.partial_loads: PartialLoads | None = None  # who is told of loads, if anyone
        groups = offloading_spec.config.groups
        cache = offloading_spec.config.cache
        block_tokens = groups[0].tokens_per_block if groups else cache.tokens_per_hash
        self._chunk_tokens = block_tokens * cache.blocks_per_chunk
        self._keys_per_chunk = max(1, len(groups))
        self._allowed: dict[str, int] = {}  # up to which token a request may have what is here

    # --- how much of a prefix comes from the disk

    @property
    def token_bytes(self) -> float:
        """Of the disk, for a token of all ranks."""
        return float(self._keys_per_chunk * self.block_size_bytes / self._chunk_tokens)

    def load_rate(self) -> float | None:
        """Bytes a second that the disk gives; None: not yet known."""
        return self._tier.load_rate()

    def has_allowance(self, request_id: str) -> bool:
        return request_id in self._allowed

    def allow(self, request_id: str, begin_token: int, tokens: int) -> None:
        """A request may have so many tokens from the disk, a chunk at least unless it is none."""
        chunks = -(-tokens // self._chunk_tokens)
        self._allowed[request_id] = begin_token + chunks * self._chunk_tokens

    def forget_allowance(self, request_id: str) -> None:
        self._allowed.pop(request_id, None)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()

    @failsafe(lambda self, key, req_context: _MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._waited.get(req_context.req_id):
            return _MISS  # what it still lacks is computed
        allowed = self._allowed.get(req_context.req_id)
        end_token = req_context.get_offload_key_position(key)
        if allowed is not None and end_token is not None and end_token > allowed:
            return _MISS
        return _HIT if self._tier.contains([key]) else _MISS

    @failsafe(lambda self, job_metadata: self._fail(job_metadata))
    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        transfer_id = self._tier.store(keys, np.asarray(job_metadata.chunk_ids))
        self._jobs[transfer_id] = (job_metadata, False)

    @failsafe(lambda self, job_metadata: self._fail(job_metadata))
    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        transfer_id = self._tier.load(keys, np.asarray(job_metadata.chunk_ids))
        if self.partial_loads is not None:
            tokens = len(keys) * self._chunk_tokens // self._keys_per_chunk
            self.partial_loads.load_began(job_metadata.req_context.req_id, tokens)
        self._jobs[transfer_id] = (job_metadata, True)

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

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._waited[req_context.req_id] = False
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._waited.pop(req_context.req_id, None)
        self.forget_allowance(req_context.req_id)

    def drain_jobs(self) -> None:
        """Called when vLLM resets its cache, as after an update of the weights: so forget all.

        Every transfer ends by its deadline, so this does too.
        """
        if not self._tier.clear():
            logger.error("kvdisk: the disk does not take the reset; it is tried on until it does.")
        self._wait_for_jobs()

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
        for job, _ in self._jobs.values():
            self._fail(job)
        self._jobs.clear()

    def _poll(self) -> None:
        finished = self._tier.poll().finished
        self._tell_removed()
        for result in finished:
            job, is_load = self._jobs.pop(result.transfer_id)
            keys = list(job.keys)
            good = result.statuses == RowStatus.OK
            if is_load and self.partial_loads is not None:
                self._tell_load_ended(job.req_context.req_id, self.partial_loads)
            if not is_load:
                self._events.stored(key for key, ok in zip(keys, good.tolist(), strict=True) if ok)
                good |= result.statuses == RowStatus.BUSY  # another store of it is under way
            moved = [key for key, ok in zip(keys, good.tolist(), strict=True) if ok]
            if is_load and len(moved) < len(keys) and job.req_context.req_id in self._waited:
                self._waited[job.req_context.req_id] = True
            self._finished.append(
                JobResult(
                    job_id=job.job_id,
                    success=len(moved) == len(keys),
                    successful_keys=moved if is_load else None,
                    transfer_time=time.monotonic() - job.submit_time,
                    transfer_bytes=len(moved) * self.block_size_bytes,
                )
            )

    def _tell_load_ended(self, request_id: str, told: PartialLoads) -> None:
        """Once all loads of the request have."""
        loads = (job for job, is_load in self._jobs.values() if is_load)
        if all(job.req_context.req_id != request_id for job in loads):
            told.load_ended(request_id)

    def _tell_removed(self) -> None:
        self._events.removed(OffloadKey(key) for key in self._tier.take_removed())


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
    if _engine_config:
        engine = _engine_config[0]
        weights, reason = resolve_weights(engine, weights)
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
