"""vLLM's own scheduler, connector and RAM tier above ours, with neither a GPU nor a disk.

The real ``Scheduler``, ``OffloadingConnector`` and ``TieringOffloadingManager`` run step by step on
a simulated disk and with a clock of their own. What a worker would move between GPU and RAM tier is
checked instead: a row that is loaded has the bytes of its key. Same seed, same run.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import ForwardContext
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingWorker,
    TransferResult,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvdisk.serving.vllm import identity, partial_loads, secondary_tier
from kvdisk.serving.vllm.secondary_tier import KVDiskTier
from kvdisk.serving.vllm.tiering_connector import KVDiskTieringConnector
from kvdisk.testing import SimulatedDisk, simulated_config, simulated_tier

BLOCK_TOKENS = 16
ROW_BYTES = 4096
END_TOKEN = 2
CHUNKS = 8  # of a prompt, where a test does not say otherwise
STEPS_MAX = 500


def content(key: bytes) -> bytes:
    return hashlib.blake2b(key).digest() * (ROW_BYTES // 64)


@dataclass
class Moves:
    """What is moved between GPU and RAM tier, as the manager says and the worker does."""

    rows: Any = None
    keys_of: dict[int, tuple[Any, list[bytes]]] = field(default_factory=dict)  # by id of the spec
    loaded: int = 0
    stored: int = 0


MOVES = Moves()


class CheckingWorker(OffloadingWorker):
    """Moves end when they are told to, or when vLLM waits for them."""

    def __init__(self) -> None:
        self.under_way: dict[int, tuple[Any, bool]] = {}
        self.done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.under_way[job_id] = (dst_spec, True)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        self.check(src_spec)
        self.under_way[job_id] = (src_spec, False)
        return True

    def check(self, spec: Any) -> None:
        for key, row in zip(MOVES.keys_of[id(spec)][1], spec.block_ids.tolist(), strict=True):
            assert MOVES.rows[row].tobytes() == content(key), "wrong bytes"

    def end(self, job_id: int) -> None:
        spec, is_store = self.under_way.pop(job_id)
        keys = MOVES.keys_of[id(spec)][1]
        if is_store:
            for key, row in zip(keys, spec.block_ids.tolist(), strict=True):
                MOVES.rows[row] = np.frombuffer(content(key), np.uint8)
            MOVES.stored += len(keys)
        else:
            self.check(spec)
            MOVES.loaded += len(keys)
        del MOVES.keys_of[id(spec)]
        self.done.append(TransferResult(job_id, True, len(keys) * ROW_BYTES, 0.001))

    def end_some(self, chance: random.Random, probability: float) -> None:
        for job_id in list(self.under_way):
            if chance.random() < probability:
                self.end(job_id)

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & self.under_way.keys()):
            self.end(job_id)

    def shutdown(self) -> None:
        pass


class CheckingSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            self._worker = CheckingWorker()
        return self._worker


class OtherTier(ExampleSecondaryTierManager):
    """Takes all that it is given; as it moves no bytes, it gives nothing."""

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.MISS


@dataclass
class Clock:
    now_s: float = 1000.0

    def monotonic(self) -> float:
        self.now_s += 1e-6
        return self.now_s


def remember_keys(manager: Any) -> None:
    """Which key each row is for, in the order of what vLLM hands to its workers."""
    prepare_load, prepare_store = manager.prepare_load, manager.prepare_store

    def loads(keys: Any, context: Any) -> Any:
        keys = list(keys)
        spec = prepare_load(keys, context)
        MOVES.keys_of[id(spec)] = (spec, keys)
        return spec

    def stores(keys: Any, context: Any) -> Any:
        output = prepare_store(keys, context)
        if output is not None and output.keys_to_store:
            spec = output.store_spec
            MOVES.keys_of[id(spec)] = (spec, list(output.keys_to_store))
        return output

    manager.prepare_load, manager.prepare_store = loads, stores


def groups_of(kinds: str) -> list[KVCacheGroupSpec]:
    """``kinds``: "f" for full attention, "s" for a sliding window, one letter a group.

    Capitals: the same with blocks of twice as many tokens.
    """
    made = []
    for number, kind in enumerate(kinds):
        factor = 2 if kind.isupper() else 1
        common = {
            "block_size": factor * BLOCK_TOKENS,
            "num_kv_heads": 1,
            "head_size": 8 // factor,
            "dtype": torch.float32,
        }
        if kind in "fF":
            spec: Any = FullAttentionSpec(**common)
        else:
            spec = SlidingWindowSpec(**common, sliding_window=3 * BLOCK_TOKENS)
        made.append(KVCacheGroupSpec([f"layer{number}"], spec))
    return made


@dataclass
class Setting:
    seed: int = 0
    kinds: str = "f"
    blocks_per_chunk: int = 1
    gpu_blocks: int = 64
    ram_rows: int = 16
    slots: int = 256
    mode: str = "on"
    prefixes: int = 6
    prompt_chunks: int = 8
    seats: int = 8
    step_tokens: int = 128
    evict_waiting_last: bool = True
    policy: str = "fcfs"
    prefix_caching: bool = True
    other_tier: bool = False  # below the same RAM tier

    def __str__(self) -> str:
        return f"{self.kinds}-{self.blocks_per_chunk}-{self.ram_rows}-{self.mode}"


@contextmanager
def engine_of(directory: Path, setting: Setting) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        engine = Engine(directory, setting, patch)
        yield engine
        engine.tier._tier.close()
        MOVES.__init__()  # type: ignore[misc]


class Engine:
    """A scheduler above a RAM tier above a simulated disk."""

    def __init__(self, directory: Path, setting: Setting, patch: pytest.MonkeyPatch) -> None:
        self.setting = setting
        self.chance = random.Random(setting.seed)
        self.clock = Clock()
        fake = SimpleNamespace(monotonic=self.clock.monotonic)
        for module in (secondary_tier, partial_loads):
            patch.setattr(module, "time", fake)
        patch.setattr(identity, "_device", lambda: "none")
        MOVES.__init__()  # type: ignore[misc]
        config = self._config(directory)
        groups = groups_of(setting.kinds)
        page = max(group.kv_cache_spec.page_size_bytes for group in groups)
        cache = KVCacheConfig(
            num_blocks=setting.gpu_blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=page * setting.gpu_blocks,
                    layers=list(group.layer_names),
                    layer_stride=page * setting.gpu_blocks,
                    block_stride=page,
                )
                for group in groups
            ],
            kv_cache_groups=groups,
        )
        config.cache_config.num_gpu_blocks = setting.gpu_blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
        with set_current_vllm_config(config):
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=cache,
                log_stats=True,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                hash_block_size=hash_block_size,
            )
            self.worker_half = KVDiskTieringConnector(config, KVConnectorRole.WORKER, cache)
            caches = {
                group.layer_names[0]: torch.empty(
                    setting.gpu_blocks,
                    2,
                    group.kv_cache_spec.block_size,
                    1,
                    group.kv_cache_spec.head_size,
                    dtype=torch.float32,
                )
                for group in groups
            }
            self.worker_half.register_kv_caches(caches)
        self.worker: CheckingWorker = self.worker_half.connector_worker.spec.get_worker(None)
        self.ours: Any = self.scheduler.connector
        assert isinstance(self.ours, KVDiskTieringConnector)
        self.half = self.ours.connector_scheduler
        self.manager = self.half.manager
        Path(self.manager.primary_tier._mmap_region.mmap_path).unlink()  # vLLM's end would do it
        remember_keys(self.manager)
        self.tier: KVDiskTier = self.ours._tier
        MOVES.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        assert MOVES.rows.shape == (setting.ram_rows, ROW_BYTES), MOVES.rows.shape
        self.disk = SimulatedDisk(setting.seed)
        self.tier._tier.close()
        self.tier._tier = simulated_tier(
            self.disk, MOVES.rows, simulated_config(setting.slots, ROW_BYTES)
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hash_block_size, sha256)
        self.context = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})
        self.requests: dict[str, Request] = {}
        self.count = 0
        self.tokens_computed = 0

    def _config(self, directory: Path) -> VllmConfig:
        setting, model = self.setting, directory / "model"
        model.mkdir()
        fields = {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "ffn_dim": 64,
            "vocab_size": 1000,
            "max_position_embeddings": 4096,
            "word_embed_proj_dim": 64,
            "torch_dtype": "float32",
        }
        (model / "config.json").write_text(json.dumps(fields))
        model_config = ModelConfig(
            model=str(model), dtype="float32", seed=42, skip_tokenizer_init=True
        )
        extra = {
            "spec_name": "CheckingSpec",
            "spec_module_path": __name__,
            "cpu_bytes_to_use": setting.ram_rows * ROW_BYTES,
            "offload_prompt_only": False,
            "secondary_tiers": [
                {
                    "type": "KVDiskTier",
                    "module_path": "kvdisk.serving.vllm",
                    "path": str(directory / "kv"),
                    "capacity": "4MiB",
                    "ring": "1MiB",
                    "weights": "none",
                    "partial_loads": setting.mode,
                    "evict_waiting_last": setting.evict_waiting_last,
                },
                *([{"type": "OtherTier", "module_path": __name__}] * setting.other_tier),
            ],
        }
        if setting.blocks_per_chunk > 1:
            extra["block_size"] = BLOCK_TOKENS * setting.blocks_per_chunk
        cache_config = CacheConfig(
            block_size=BLOCK_TOKENS, enable_prefix_caching=setting.prefix_caching
        )
        cache_config.kv_cache_layout = "LBHNC"
        config = VllmConfig(
            model_config=model_config,
            scheduler_config=SchedulerConfig(
                max_num_seqs=setting.seats,
                policy=setting.policy,
                max_num_batched_tokens=setting.step_tokens,
                max_model_len=4096,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            cache_config=cache_config,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVDiskTieringConnector",
                kv_connector_module_path="kvdisk.serving.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            ),
            device_config=DeviceConfig("cpu"),
        )
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
        return config

    # --- what happens

    def ask(self, prefix: int, tokens: int, answer_tokens: int, name: str | None = None) -> Request:
        prompt = [3 + (prefix * 131 + i * 7) % 900 for i in range(tokens)]
        own = self.chance.randrange(tokens) if self.chance.random() < 0.5 else 0
        prompt[tokens - own :] = [3 + self.chance.randrange(900) for _ in range(own)]
        return self.ask_for(prompt, answer_tokens, name)

    def ask_for(
        self,
        prompt: list[int],
        answer_tokens: int = 1,
        name: str | None = None,
        *,
        resumable: bool = False,
    ) -> Request:
        """``resumable``: more of the prompt may come, by the same name."""
        self.count += 1
        params = SamplingParams(max_tokens=answer_tokens)
        params.update_from_generation_config({}, END_TOKEN)
        request = Request(
            request_id=name or f"r{self.count}",
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
            resumable=resumable,
        )
        self.requests.setdefault(request.request_id, request)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self._forget_finished()

    def reset(self) -> None:
        """As after an update of the weights: all that is cached is void."""
        # What is loaded, or has been and waits for room for the rest, vLLM does not preempt.
        others = [each for each in self.requests.values() if each not in self.scheduler.running]
        preempt = all(request.num_computed_tokens == 0 for request in others)
        self.scheduler.reset_prefix_cache(reset_running_requests=preempt, reset_connector=True)

    def step(self, moves_end: float = 0.5, seconds: float = 0.02) -> None:
        """One step of the engine; each move under way ends in it by chance."""
        output = self.scheduler.schedule()
        self.tokens_computed += sum(output.num_scheduled_tokens.values())
        meta = output.kv_connector_metadata
        self._check_stores(meta.store_jobs)
        self.worker_half.handle_preemptions(meta)
        self.worker_half.bind_connector_metadata(meta)
        self.worker_half.start_load_kv(self.context)
        self.worker.end_some(self.chance, moves_end)
        self.worker_half.wait_for_save()
        sent, received = self.worker_half.get_finished(output.finished_req_ids)
        worker_meta = self.worker_half.build_connector_worker_meta()
        self.worker_half.clear_connector_metadata()
        self.clock.now_s += seconds
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.requests[request_id]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([3 + self.chance.randrange(900)] if done else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[None] * len(ids),
                kv_connector_output=KVConnectorOutput(
                    finished_sending=sent,
                    finished_recving=received,
                    kv_connector_worker_meta=worker_meta,
                ),
            ),
        )
        self._forget_finished()

    def drain(self) -> None:
        """Until nothing waits, runs or is moved."""
        for _ in range(STEPS_MAX):
            if self.idle:
                return
            self.step(moves_end=2.0)
        raise AssertionError(f"not idle after {STEPS_MAX} steps")

    def check(self) -> None:
        """What holds between steps."""
        assert not self.tier.broken
        self.tier._tier.check()
        planner = self.ours.planner
        assert planner is not None, "it raised"
        assert self.ours.waiting is not None, "it raised"
        for running in self.scheduler.running:
            assert running.request_id not in self.ours.waiting
        assert len(self.ours.waiting) <= len(self.requests)
        for request in planner._requests.values():
            assert 0 <= request.promised <= request.to_load
            assert request.to_compute >= 0
        if self.setting.mode != "off":
            for running in self.scheduler.running:
                left = max(0, running.num_tokens - running.num_computed_tokens)
                # An answer's token is known to vLLM before the planner hears of it.
                assert abs(planner._requests[running.request_id].to_compute - left) <= 1

    def _check_stores(self, jobs: dict[int, Any]) -> None:
        """Each row is for the block that is copied into it.

        Not of requests that have ended, nor of what has left a window: these blocks may be
        another's by now, but vLLM has them copied before.
        """
        if self.setting.blocks_per_chunk > 1:
            return
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        groups = self.half.config.kv_group_configs
        for job in jobs.values():
            if job.req_id not in self.requests:
                continue
            keys = MOVES.keys_of[id(job.dst_spec)][1]
            for key, number in zip(keys, job.src_spec.block_ids.tolist(), strict=True):
                if groups[get_offload_group_idx(key)].sliding_window_size_in_chunks is None:
                    assert blocks[number].block_hash in (key, None), "another block's row"

    def _forget_finished(self) -> None:
        for request_id, request in list(self.requests.items()):
            if request.is_finished():
                del self.requests[request_id]

    @property
    def idle(self) -> bool:
        waiting = self.requests or self.scheduler.finished_req_ids
        return not waiting and not self.ours.has_pending_push_work()

    def leftovers(self) -> dict[str, Any]:
        tier, planner = self.tier, self.ours.planner
        primary = self.manager.primary_tier
        left = {
            "allowances": len(tier.allowances),
            "jobs": tier._jobs,
            "rows held": tier._held_rows,
            "vllm's jobs": self.manager._jobs,
            "requests of vllm": self.half._req_status,
            "pinned": [
                key for key in list(primary._policy.chunks) if primary._policy.get(key).ref_cnt != 0
            ],
            "specs": MOVES.keys_of,
            "planned": not planner.idle,
            "waiting": self.ours.waiting and [*self.ours.waiting],
            "broken": tier.broken,
        }
        return {name: value for name, value in left.items() if value}
