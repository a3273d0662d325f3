"""What vLLM's offloading connector asks of a medium: who manages it, who moves the blocks.

The scheduler's process and every worker make the same ``KVDiskSpec`` from the same configuration.
Options of ``kv_connector_extra_config`` that are not vLLM's own or named here are kvdisk's
(``TierConfig``): a misspelt one is an error at start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from kvdisk import ConfigError, Identity, TierConfig
from kvdisk.serving.vllm.identity import chosen_backends, identity_of, resolve_weights
from kvdisk.serving.vllm.manager import KVDiskManager
from kvdisk.serving.vllm.metrics import metric_definitions
from kvdisk.serving.vllm.worker import KVDiskWorker

# Options that vLLM's own connector reads from the same place.
_VLLM_OPTIONS: Final = frozenset(
    {
        "blocks_per_chunk",
        "block_size",
        "offload_prompt_only",
        "self_describing_kv_events",
        "canonical_layout",
        "sync_load_budget_bytes",
        "spec_name",
        "spec_module_path",
    }
)
_WEIGHTS: Final = "weights"
# What a disk reads during a step of the GPU, which loads wait for in the ring.
_RING_OF_A_GPU: Final = "1GiB"

logger = init_logger("vllm.kvdisk")


class KVDiskSpec(OffloadingSpec):  # type: ignore[misc]
    """``tier_config`` and ``identity`` are the same in every process of the engine.

    To the files' identity a rank adds what only it can know: the attention backends of its layers.
    """

    def __init__(self, config: OffloadingConfig, vllm_config: Any) -> None:
        super().__init__(config)
        if config.canonical_layout:
            raise ConfigError("canonical_layout is not supported: leave it out.")
        if config.extra_config.get("sync_load_budget_bytes"):
            raise ConfigError(
                "sync_load_budget_bytes would make every request wait for the disk: leave it out."
            )
        self._vllm_config = vllm_config
        said = str(config.extra_config.get(_WEIGHTS, ""))
        weights, reason = resolve_weights(vllm_config, said)
        self.tier_config = _tier_config(config, reason)
        self.block_bytes = int(config.worker_kv_bytes_per_block)
        self.identity: Identity = identity_of(
            vllm_config,
            _layout_fields(config),
            replica=config.parallel.data_parallel_index,
            weights=weights,
        )
        self.token_bytes = sum(self.block_bytes / group.tokens_per_block for group in config.groups)
        self._manager: KVDiskManager | None = None
        self._worker: KVDiskWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()

    def get_manager(self) -> KVDiskManager:
        if self._manager is None:
            self._manager = KVDiskManager(
                self.tier_config,
                self.block_bytes,
                world_size=self.config.parallel.world_size,
                blocks_per_chunk=self.blocks_per_chunk,
                events=self.kv_events_config.enable_kv_cache_events,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> KVDiskWorker:
        if self._worker is None:
            backends = chosen_backends(self._vllm_config)
            self._worker = KVDiskWorker(
                kv_caches,
                replace(self.identity, extra={**self.identity.extra, "backends": backends}),
                self.tier_config,
                block_bytes=self.block_bytes,
                rank=self.config.parallel.rank,
                world_size=self.config.parallel.world_size,
                blocks_per_chunk=self.blocks_per_chunk,
            )
        return self._worker


def require_flush_before_zeroing(vllm_config: Any, kv_cache_config: Any) -> None:
    """Blocks that are still being stored must not be zeroed for their next request.

    vLLM's newer model runner does that, for the models whose blocks it zeroes, before it tells a
    connector to flush them (0.33, ``GPUModelRunner.update_requests``).
    """
    if (
        getattr(vllm_config, "use_v2_model_runner", False)
        and kv_cache_config.needs_kv_cache_zeroing
    ):
        raise ConfigError(
            "this model's KV blocks are zeroed before they are used again, and vLLM's model runner "
            "V2 does so while they may still be stored: set VLLM_USE_V2_MODEL_RUNNER=0."
        )


def _tier_config(config: OffloadingConfig, why_not_kept: str | None) -> TierConfig:
    options = {
        name: value
        for name, value in config.extra_config.items()
        if name not in _VLLM_OPTIONS and name != _WEIGHTS
    }
    if current_platform.is_cuda_alike():
        options.setdefault("ring", _RING_OF_A_GPU)
    keep_nothing_if(why_not_kept, options)
    return share_of_replica(TierConfig.from_mapping(options), config)


def keep_nothing_if(reason: str | None, options: dict[str, Any]) -> None:
    """Turn persistence off, saying why; an error where it was asked for."""
    if reason is None:
        return
    if options.get("persist") is True:
        raise ConfigError(f"persist=true cannot be had: {reason}.")
    logger.warning("kvdisk: blocks are not kept for the next start: %s.", reason)
    options["persist"] = False


def share_of_replica(tier_config: TierConfig, config: OffloadingConfig) -> TierConfig:
    """An equal part of the disk for each data-parallel replica, since each schedules for itself.

    vLLM tells the replicas of a dense model their index but not how many there are: then the
    capacity is each one's own. Their directories differ by identity.
    """
    count = max(1, config.parallel.data_parallel_size)
    return replace(tier_config, capacity_bytes=tier_config.capacity_bytes // count)


def _layout_fields(config: OffloadingConfig) -> dict[str, object]:
    groups: list[Mapping[str, object]] = [
        {"tokens": group.tokens_per_block, "layers": list(group.layer_names)}
        for group in config.groups
    ]
    return {
        "order": config.kv_cache_layout or "",
        "block_bytes": config.worker_kv_bytes_per_block,
        "groups": groups,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
    }
