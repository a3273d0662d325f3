"""vLLM's RAM tier on the CPU platform, which it refuses: for tests of what lies below it.

Only the copy between "device" and RAM tier is replaced, by a plain one; manager, shared memory and
secondary tiers are vLLM's own.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies at once, within the call."""

    def __init__(self, caches: CanonicalKVCaches, region: Any, blocks_per_chunk: int) -> None:
        self.region = region
        self.blocks_per_chunk = blocks_per_chunk
        self.device = [each.tensor for each in caches.tensors]
        self.rows = [
            region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk)
            for each in caches.tensors
        ]
        self.tensors_of_group = [
            [reference.tensor_idx for reference in group] for group in caches.group_data_refs
        ]
        self.done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.copy(job_id, src_spec, dst_spec, to_device=False)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        return self.copy(job_id, dst_spec, src_spec, to_device=True)

    def copy(self, job_id: int, blocks: Any, chunks: Any, *, to_device: bool) -> bool:
        began = time.monotonic()
        moved = first_block = first_chunk = 0
        for group, size in enumerate(blocks.group_sizes):
            skipped = blocks.block_indices[group] % self.blocks_per_chunk
            for offset in range(size):
                chunk, within = divmod(offset + skipped, self.blocks_per_chunk)
                block = int(blocks.block_ids[first_block + offset])
                row = int(chunks.block_ids[first_chunk + chunk])
                for tensor in self.tensors_of_group[group]:
                    page = self.device[tensor].shape[1]
                    on_device = self.device[tensor][block]
                    in_ram = self.rows[tensor][row, within * page : (within + 1) * page]
                    if to_device:
                        on_device.copy_(in_ram)
                    else:
                        in_ram.copy_(on_device)
                    moved += page
            first_block += size
            first_chunk += -(-(size + skipped) // self.blocks_per_chunk) if size else 0
        self.done.append(TransferResult(job_id, True, moved, time.monotonic() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self.device.clear()
        self.rows.clear()
        self.region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> CopyingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
