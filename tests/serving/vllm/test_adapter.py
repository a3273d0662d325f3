"""What the adapters decide by themselves, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, make_offload_key

from kvdisk.messages import RankReport, RankResult, Transfer
from kvdisk.serving.vllm.identity import known_weights
from kvdisk.serving.vllm.manager import KVDiskLoadStoreSpec, KVDiskManager
from kvdisk.serving.vllm.worker import KVDiskWorker
from kvdisk.testing import SimulatedDisk, SimulatedWorker, simulated_config
from kvdisk.transfer import Direction, RowStatus


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


def test_a_request_waits_for_one_failed_load_only() -> None:
    """Scenario A22: what timed out stays on the disk, and must not be loaded for ever."""
    config = simulated_config(253, 64)
    manager = KVDiskManager(config, 64, world_size=1, blocks_per_chunk=1)
    worker = SimulatedWorker(SimulatedDisk(), np.zeros((64, 64), np.uint8), config)
    manager.attach(worker.take_opened())
    keys = [make_offload_key(b"block %d" % number, 0) for number in range(4)]
    first, other = ReqContext("first"), ReqContext("other")
    stored = manager.prepare_store(keys, first)
    assert stored is not None
    worker.submit(stored.store_spec.transfer)
    manager.apply([worker.poll()])
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
