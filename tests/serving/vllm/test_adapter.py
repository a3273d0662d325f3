"""What the adapters decide by themselves, without an engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import TransferJob

import kvdisk.serving.vllm
from kvdisk import ConfigError
from kvdisk.messages import RankReport, RankResult, Transfer
from kvdisk.serving.vllm import spec
from kvdisk.serving.vllm.connector import KVDiskConnectorWorker, KVDiskMetadata
from kvdisk.serving.vllm.identity import chosen_backends, known_weights
from kvdisk.serving.vllm.manager import KVDiskLoadStoreSpec, KVDiskManager
from kvdisk.serving.vllm.secondary_tier import KVDiskTier
from kvdisk.serving.vllm.spec import KVDiskSpec
from kvdisk.serving.vllm.worker import KVDiskWorker
from kvdisk.testing import SimulatedDisk, SimulatedWorker, simulated_config
from kvdisk.transfer import Direction, RowStatus

pytestmark = pytest.mark.quick


def rows(
    blocks: list[int],
    sizes: list[int],
    firsts: list[int],
    groups: list[int],
    *,
    per_chunk: int,
    is_load: bool,
) -> list[int]:
    worker = KVDiskWorker.__new__(KVDiskWorker)
    worker._blocks_per_chunk = per_chunk
    nothing: Any = None
    transfer = Transfer(1, Direction.STORE, [], nothing, nothing, nothing)
    disk = KVDiskLoadStoreSpec(transfer, len(groups) * per_chunk, groups)
    gpu = GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=firsts)
    return worker._blocks_by_row(gpu, disk, is_load=is_load).tolist()


class TestBlocksByRow:
    def test_one_block_a_chunk_in_two_groups(self) -> None:
        found = rows([5, 6, 9], [2, 1], [0, 0], [0, 0, 1], per_chunk=1, is_load=False)
        assert found == [5, 6, 9]

    def test_a_load_may_begin_and_end_within_a_chunk(self) -> None:
        found = rows([7, 8, 9], [3], [2], [0, 0], per_chunk=3, is_load=True)
        assert found == [-1, -1, 7, 8, 9, -1]

    @pytest.mark.parametrize(
        ("blocks", "first"), [([10, 11, 14, 15, 16, 17], 0), ([11, 13], 1), ([11], 0)]
    )
    def test_a_store_with_holes_moves_nothing(self, blocks: list[int], first: int) -> None:
        chunks = [0] if len(blocks) != 2 else [0, 0]
        per_chunk = 8 if len(blocks) != 2 else 2
        found = rows(blocks, [len(blocks)], [first], chunks, per_chunk=per_chunk, is_load=False)
        assert set(found) == {-1}


class TestKnownWeights:
    def model(self, name: str, commit: str | None = None) -> Any:
        return SimpleNamespace(
            model=name, model_weights="", hf_config=SimpleNamespace(_commit_hash=commit)
        )

    def test_of_the_hub_is_the_commit_and_without_one_unknown(self) -> None:
        assert known_weights(self.model("org/name")) is None
        first, second = (known_weights(self.model("org/name", each)) for each in ("a", "b"))
        assert first != second

    def test_of_a_file_or_directory_changes_when_it_is_saved_anew(self, tmp_path: Path) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"a" * 1000)
        before = [known_weights(self.model(str(each))) for each in (file, tmp_path)]
        file.write_bytes(b"b" * 1000)
        after = [known_weights(self.model(str(each))) for each in (file, tmp_path)]
        assert None not in before
        assert not set(before) & set(after)


def test_the_attention_backends_of_a_rank_are_those_of_its_layers() -> None:
    def layer(name: str) -> Any:
        backend = SimpleNamespace(get_name=lambda: name)
        return SimpleNamespace(get_attn_backend=lambda: backend)

    layers = {"0": layer("FLASH_ATTN"), "1": layer("FLASHINFER"), "2": layer("FLASH_ATTN"), "3": 1}
    config = SimpleNamespace(static_forward_context=layers)
    found = chosen_backends(SimpleNamespace(compilation_config=config))
    assert found == ["FLASHINFER", "FLASH_ATTN"]


def keys_of(numbers: Iterable[int]) -> list[OffloadKey]:
    return [make_offload_key(b"block %d" % number, 0) for number in numbers]


class Simulated:
    """A manager and one worker on a simulated disk of 253 slots."""

    def __init__(self, disk: SimulatedDisk | None = None, **options: Any) -> None:
        config = simulated_config(253, 64)
        options = {"world_size": 1, "blocks_per_chunk": 1, **options}
        self.manager = KVDiskManager(config, 64, **options)
        self.disk = disk or SimulatedDisk()
        self.worker = SimulatedWorker(self.disk, np.zeros((64, 64), np.uint8), config)
        self.manager.attach(self.worker.take_opened())
        self.request = ReqContext("one")

    def store(self, numbers: Iterable[int]) -> None:
        output = self.manager.prepare_store(keys_of(numbers), self.request)
        assert output is not None
        if len(output.store_spec.transfer):
            self.worker.submit(output.store_spec.transfer)
        self.poll()

    def load(self, numbers: Iterable[int]) -> None:
        self.worker.submit(self.manager.prepare_load(keys_of(numbers), self.request).transfer)
        self.poll()

    def poll(self) -> None:
        self.manager.apply([self.worker.poll()])

    def events(self) -> list[tuple[bool, set[OffloadKey]]]:
        """Whether removed, and which; each kind once."""
        found: dict[bool, list[OffloadKey]] = {}
        for event in self.manager.take_events():
            assert event.medium is Medium.STORAGE
            found.setdefault(event.removed, []).extend(event.keys)
        assert all(len(keys) == len(set(keys)) for keys in found.values())
        return [(removed, set(keys)) for removed, keys in found.items()]


def test_a_request_waits_for_one_failed_load_only() -> None:
    """Scenario A22: what timed out stays on the disk, and must not be loaded for ever."""
    rig = Simulated()
    manager, keys = rig.manager, keys_of(range(4))
    first, other = ReqContext("first"), ReqContext("other")
    rig.store(range(4))
    assert manager.lookup(keys[0], first) is LookupResult.HIT
    load = manager.prepare_load(keys, first)
    statuses = np.array([RowStatus.OK, RowStatus.OK, RowStatus.TIMED_OUT, RowStatus.TIMED_OUT])
    result = RankResult(
        load.transfer.id, statuses.astype(np.uint8), np.zeros(4, np.int32), np.zeros(4, np.bool_)
    )
    manager.apply([RankReport(0, results=[result])])
    assert manager.lookup(keys[0], first) is LookupResult.MISS
    assert manager.lookup(keys[0], other) is LookupResult.HIT
    manager.on_request_finished(first)
    assert manager.lookup(keys[3], first) is LookupResult.HIT


def test_a_load_may_take_as_long_as_its_planner_says() -> None:
    rig = Simulated()
    rig.store(range(4))
    assert rig.manager.prepare_load(keys_of(range(2)), rig.request).transfer.within_s is None
    rig.manager.load_within_s = lambda: 3.5
    assert rig.manager.prepare_load(keys_of(range(2, 4)), rig.request).transfer.within_s == 3.5


def test_an_idle_engine_steps_to_send_a_clear_and_not_to_wait_for_it() -> None:
    rig = Simulated()
    rig.store(range(4))
    assert not rig.manager.has_pending_work()
    rig.manager.reset_cache()
    assert rig.manager.has_pending_work()
    (message,) = rig.manager.take_clears()
    assert not rig.manager.has_pending_work()
    assert rig.manager.lookup(keys_of([0])[0], rig.request) is LookupResult.MISS
    rig.worker.clear(message)
    rig.poll()
    rig.store(range(4))
    assert rig.manager.lookup(keys_of([0])[0], rig.request) is LookupResult.HIT


class TestEvents:
    """A router is told of every chunk that the disk gains or loses: once, and in that order."""

    def test_of_what_is_stored_evicted_and_stored_again(self) -> None:
        rig = Simulated(events=True)
        rig.store(range(200))
        rig.store(range(200))  # there already
        assert rig.events() == [(False, set(keys_of(range(200))))]
        rig.store(range(200, 300))
        (_, gone), (_, come) = sorted(rig.events(), reverse=True)
        assert come == set(keys_of(range(200, 300)))
        assert len(gone) == 300 - 253
        assert gone < set(keys_of(range(200)))
        again = [number for number in range(200) if keys_of([number])[0] in gone]
        rig.store(again)
        assert (False, gone) in rig.events()

    def test_of_a_damaged_block_once(self) -> None:
        rig = Simulated(events=True)
        rig.disk.faults.bit_flip = 1.0
        rig.store(range(4))
        assert rig.events() == [(False, set(keys_of(range(4))))]
        rig.load([0, 1])
        assert rig.events() == [(True, set(keys_of([0, 1])))]
        rig.poll()
        assert rig.events() == []

    def test_not_of_a_store_that_failed(self) -> None:
        rig = Simulated(events=True)
        rig.disk.faults.store_error = 1.0
        rig.store(range(4))
        assert rig.events() == []

    def test_of_all_when_everything_is_cleared(self) -> None:
        rig = Simulated(events=True)
        rig.store(range(4))
        rig.manager.reset_cache()
        assert rig.events() == [(False, set(keys_of(range(4)))), (True, set(keys_of(range(4))))]

    def test_a_chunk_is_gone_with_its_first_block(self) -> None:
        rig = Simulated(events=True, blocks_per_chunk=2)
        rig.store(range(100))
        assert rig.events() == [(False, set(keys_of(range(100))))]
        rig.store(range(100, 150))
        ((_, gone), (_, come)) = sorted(rig.events(), reverse=True)
        assert come == set(keys_of(range(100, 150)))
        assert all(rig.manager.lookup(key, rig.request) is LookupResult.MISS for key in gone)
        left = set(keys_of(range(150))) - gone
        assert all(rig.manager.lookup(key, rig.request) is LookupResult.HIT for key in left)

    def test_not_of_what_an_earlier_run_left(self) -> None:
        disk = SimulatedDisk()
        Simulated(disk).store(range(200))
        rig = Simulated(disk, events=True)
        rig.store(range(200, 400))
        assert rig.events() == [(False, set(keys_of(range(200, 400))))]

    def test_nothing_is_kept_unless_wanted(self) -> None:
        rig = Simulated()
        rig.store(range(4))
        rig.manager.reset_cache()
        assert rig.events() == []

    def test_also_below_the_ram_tier(self, tmp_path: Path) -> None:
        ram = np.random.default_rng(1).integers(0, 256, (300, 4096), np.uint8)
        tier = KVDiskTier(
            described_engine(kv_events=True),
            ram.data,
            "KVDiskTier",
            enable_kv_events=True,
            path=str(tmp_path),
            capacity="1MiB",
            ring="1MiB",
        )
        try:
            request, told = ReqContext("one"), set[OffloadKey]()
            for first in range(0, 300, 50):
                numbers = range(first, first + 50)
                chunks = np.array(numbers)
                tier.submit_store(TransferJob(first, keys_of(numbers), chunks, False, request))
                while not (finished := list(tier.get_finished_jobs())):
                    tier._tier.wait(1.0)
                assert [each.success for each in finished] == [True]
                for event in tier.take_events():
                    assert event.removed == (set(event.keys) <= told)
                    told ^= set(event.keys)
            hit = [key for key in keys_of(range(300)) if tier.lookup(key, request).name == "HIT"]
            assert told == set(hit)
            assert 0 < len(told) < 300
        finally:
            tier.shutdown()


def described_engine(*, kv_events: bool) -> Any:
    """What ``KVDiskTier`` reads of vLLM's description of an engine."""
    return SimpleNamespace(
        kv_events_config=SimpleNamespace(enable_kv_cache_events=kv_events),
        config=SimpleNamespace(
            kv_cache_layout="LBHNC",
            groups=[SimpleNamespace(tokens_per_block=32, layer_names=["0"])],
            cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
            model=SimpleNamespace(name="model", dtype="float32"),
            parallel=SimpleNamespace(
                world_size=1, data_parallel_index=0, data_parallel_size=1, tp_size=1, pp_size=1
            ),
        ),
    )


def test_the_classes_that_a_configuration_names_are_there() -> None:
    for name in kvdisk.serving.vllm.__all__:
        assert getattr(kvdisk.serving.vllm, name).__name__ == name
    with pytest.raises(AttributeError, match="KVDiskNothing"):
        kvdisk.serving.vllm.KVDiskNothing  # noqa: B018


def test_loads_within_a_step_are_refused_at_start() -> None:
    """They would make the engine wait for the disk, and vLLM asks nobody what came of them."""
    config = SimpleNamespace(
        canonical_layout=False,
        extra_config={"sync_load_budget_bytes": 1 << 20},
        enable_kv_cache_events=False,
        groups=(),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
    )
    with pytest.raises(ConfigError, match="sync_load_budget_bytes"):
        KVDiskSpec(config, None)


def test_loads_begin_before_the_gpu_is_given_the_step_and_once() -> None:
    submitted: list[int] = []

    def submit_load(job_id: int, source: Any, target: Any) -> bool:
        submitted.append(job_id)
        return True

    made = KVDiskConnectorWorker.__new__(KVDiskConnectorWorker)
    made.worker = SimpleNamespace(submit_load=submit_load)  # type: ignore[assignment]
    made._load_jobs = {}
    made._unsubmitted_store_jobs = []
    target = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
    job: Any = SimpleNamespace(req_id="one", src_spec=None, dst_spec=target, sync=False)
    metadata = KVDiskMetadata({1: job}, {}, set())
    made.begin_loads(metadata)
    assert submitted == [1]
    made.start_kv_transfers(metadata)  # as vLLM does when the step has been given to the GPU
    assert submitted == [1]


@pytest.mark.parametrize(
    ("on_gpu", "asked", "ring"),
    [(True, {}, 1 << 30), (False, {}, 256 << 20), (True, {"ring": "64MiB"}, 64 << 20)],
)
def test_a_gpu_has_a_ring_for_a_step(
    on_gpu: bool, asked: dict[str, str], ring: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec.current_platform, "is_cuda_alike", lambda: on_gpu)
    monkeypatch.setattr(spec, "share_of_replica", lambda config, _: config)
    extra = {"path": "/unused", "capacity": "4GiB", **asked}
    made = spec._tier_config(SimpleNamespace(extra_config=extra), None)  # type: ignore[arg-type]
    assert made.ring_bytes == ring


@pytest.mark.parametrize(("runner_v2", "zeroes"), [(True, False), (False, True), (True, True)])
def test_blocks_that_may_be_zeroed_while_they_are_stored_are_refused(
    runner_v2: bool, zeroes: bool
) -> None:
    engine = SimpleNamespace(use_v2_model_runner=runner_v2)
    caches = SimpleNamespace(needs_kv_cache_zeroing=zeroes)
    if runner_v2 and zeroes:
        with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            spec.require_flush_before_zeroing(engine, caches)
    else:
        spec.require_flush_before_zeroing(engine, caches)
