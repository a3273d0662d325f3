"""``KVDiskConnector``: GPU blocks to and from local NVMe, one line of vLLM's configuration.

vLLM's own offloading connector is the base: its chunks, its KV cache groups, the flush before
preempted blocks are reused, the fences. What is changed is what a disk needs: reports of every
rank reach the scheduler's half of the tier, and a load that failed is recomputed, where the base
asserts that no load ever fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger

from kvdisk import ConfigError
from kvdisk.messages import Clear, RankOpened, RankReport
from kvdisk.serving.vllm.manager import KVDiskManager
from kvdisk.serving.vllm.partial_loads import PartialLoads
from kvdisk.serving.vllm.sessions import SessionsLeftOut
from kvdisk.serving.vllm.spec import KVDiskSpec, require_flush_before_zeroing
from kvdisk.serving.vllm.worker import KVDiskWorker
from kvdisk.tier import opening_line

logger = init_logger("vllm.kvdisk")  # vLLM shows its own loggers only


@dataclass
class KVDiskHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A rank has opened its files: before the first request, so that it can hit already."""

    opened: RankOpened


@dataclass
class KVDiskMetadata(OffloadingConnectorMetadata):  # type: ignore[misc]
    clears: list[Clear] = field(default_factory=list)


@dataclass
class KVDiskWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """Reports of one rank; of all ranks once vLLM has aggregated them."""

    reports: list[RankReport] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVDiskWorkerMetadata)
        base = super().aggregate(other)
        return KVDiskWorkerMetadata(
            completed_jobs=base.completed_jobs,
            transfer_stats=base.transfer_stats,
            reports=[*self.reports, *other.reports],
        )


class KVDiskConnectorWorker(OffloadingConnectorWorker):  # type: ignore[misc]
    """The base, but that a failed load is told and recomputed."""

    worker: KVDiskWorker

    def __init__(self, spec: KVDiskSpec, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        # Each rank keeps its own copy of replicated caches: one rank's files alone then decide.
        self._is_store_writer = True
        self._one_group = len(kv_cache_config.kv_cache_groups) == 1
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()

    def begin_loads(self, metadata: KVDiskMetadata) -> None:
        """Before the GPU is given the step; none of them is for this step.

        A load's blocks may be in use until the steps before have ended; behind this one, where vLLM
        begins loads, a load would take a step longer.
        """
        self.start_kv_transfers(metadata)
        metadata.load_jobs = {}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        requests = dict(self._load_jobs)
        sending, receiving = super().get_finished(finished_req_ids)
        for job_id, blocks in self.worker.take_failed().items():
            request = requests.get(job_id)
            if request is None:
                continue
            if self._one_group:
                self._failed_blocks.update(blocks)
            else:
                self._failed_requests.add(request)
        return sending, receiving

    def take_failed_requests(self) -> set[str]:
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> KVDiskWorkerMetadata | None:
        base = super().build_connector_worker_meta()
        reports = self.worker.take_reports()
        if base is None and not reports:
            return None
        base = base or OffloadingWorkerMetadata()
        return KVDiskWorkerMetadata(base.completed_jobs, base.transfer_stats, reports)


class KVDiskConnector(PartialLoads, SessionsLeftOut, OffloadingConnector):  # type: ignore[misc]
    """See docs/vllm.md for its configuration."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        _require_recompute(vllm_config)
        require_flush_before_zeroing(vllm_config, kv_cache_config)
        _name_spec(vllm_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = False
        spec = KVDiskSpec(config, vllm_config)
        self.connector_scheduler = None
        self.connector_worker = None
        self._manager: KVDiskManager | None = None
        self._opened: RankOpened | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = OffloadingConnectorScheduler(
                spec, vllm_config, kv_cache_config
            )
            self._manager = spec.get_manager()
            self.plan_loads(spec.tier_config, spec.token_bytes, self.manager.scheduler.disk_rate)
            self.manager.load_within_s = self.load_within_s
        else:
            self.connector_worker = KVDiskConnectorWorker(spec, vllm_config, kv_cache_config)

    @property
    def manager(self) -> KVDiskManager:
        assert self._manager is not None
        return self._manager

    # --- opening

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert self.connector_worker is not None
        self._opened = self.connector_worker.worker.take_opened()
        recovered = len(self._opened.restored_slots)
        logger.info("rank %d: %s", self._opened.rank, opening_line(self._opened.facts, recovered))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._opened is None:
            return None
        opened, self._opened = self._opened, None  # it may be large, and is needed once
        return KVDiskHandshake(opened)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for handshake in metadata.values():
            assert isinstance(handshake, KVDiskHandshake)
            if self.manager.attach(handshake.opened):
                counters = self.manager.scheduler.counters
                logger.info("all ranks are open; %d blocks are there already", counters.restored)
        if len(metadata) < self.manager.scheduler.world_size:
            raise ConfigError(
                f"vLLM told of {len(metadata)} ranks, fewer than there are: this combination of "
                "parallel sizes is not supported."
            )

    # --- each step

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As much of what vLLM's own finds as is worth loading now."""
        assert self.connector_scheduler is not None
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found is None:
            return None, False
        rest = request.num_tokens - num_computed_tokens - found
        wanted = self.worth_loading(request, found, rest)
        if wanted >= found:
            return found, is_async
        config = self.connector_scheduler.config
        chunk = max(group.tokens_per_chunk for group in config.kv_group_configs)
        at_most = min(found, max(wanted, chunk)) if wanted else 0
        answer: tuple[int | None, bool] = self.connector_scheduler.get_num_new_matched_tokens(
            request, num_computed_tokens, max_num_new_tokens=at_most
        )
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.load_began(request.request_id, num_external_tokens)
        self.settled(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        return KVDiskMetadata(
            meta.load_jobs, meta.store_jobs, meta.jobs_to_flush, self.manager.take_clears()
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self.connector_worker is not None
        assert isinstance(connector_metadata, KVDiskMetadata)
        self.connector_worker.worker.clear(connector_metadata.clears)
        self.connector_worker.begin_loads(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.connector_worker is not None
        sending, receiving = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=sending,
            finished_recving=receiving,
            failed_recving=self.connector_worker.take_failed_requests(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.connector_worker is not None
        return self.connector_worker.take_failed_blocks()

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KVDiskWorkerMetadata):
            self.manager.apply(meta.reports)
        super().update_connector_output(connector_output)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any) -> Any:
        _name_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *arguments)


def _require_recompute(vllm_config: Any) -> None:
    """A miss must never fail a request. Read by vLLM's scheduler after it has made us."""
    config = vllm_config.kv_transfer_config
    if config.kv_load_failure_policy != "recompute":
        logger.info(
            'kv_load_failure_policy is "%s"; kvdisk sets it to "recompute", so that a block that '
            "cannot be loaded is computed again",
            config.kv_load_failure_policy,
        )
        config.kv_load_failure_policy = "recompute"


def _name_spec(vllm_config: Any) -> None:
    """Where vLLM finds the definitions of our metrics."""
    options = vllm_config.kv_transfer_config.kv_connector_extra_config
    options["spec_name"] = KVDiskSpec.__name__
    options["spec_module_path"] = KVDiskSpec.__module__
