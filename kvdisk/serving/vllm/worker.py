"""A rank's side under vLLM's offloading connector: its blocks to and from our slots.

What always holds: a transfer that vLLM submitted is reported finished once, whatever became of it;
what was not loaded is named, block by block, so that vLLM recomputes it. No call waits for the
disk but ``wait``, which waits until blocks may be reused: for copies, not for the disk, and what
has not begun is given up instead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvdisk import ConfigError, Identity, Layout, RowStatus, TierConfig, TierWorker
from kvdisk.load_plan import longest_transfer_s
from kvdisk.messages import Clear, PathState, RankOpened, RankReport, RankResult
from kvdisk.serving.vllm.failsafe import Failsafe, failsafe, logger
from kvdisk.serving.vllm.manager import KVDiskLoadStoreSpec

_NO_BLOCK: Final = -1
_LATE_EVENTS_MAX: Final = 1024  # of transfers that ran into their deadlines: perhaps still in use


@dataclass
class _Job:
    """A transfer of vLLM's: ``blocks`` are its block ids, row by row of ours or without a row."""

    job_id: int
    is_load: bool
    blocks: npt.NDArray[np.int64]
    moves: npt.NDArray[np.int64]  # the block of each row that is moved, or _NO_BLOCK
    bytes_per_row: int
    began_s: float
    event: Any = None
    source_free: bool = False


class KVDiskWorker(Failsafe, OffloadingWorker):  # type: ignore[misc]
    """``tier_worker`` is this rank's half of the tier; ``take_reports`` is for the scheduler."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        identity: Identity,
        config: TierConfig,
        *,
        block_bytes: int,
        rank: int,
        world_size: int,
        blocks_per_chunk: int,
    ) -> None:
        """Opens the rank's files. Raises as ``TierWorker.open``."""
        tensors = [each.tensor for each in kv_caches.tensors]
        layout = Layout.from_tensors(tensors)
        if layout.block_bytes > block_bytes:
            raise ConfigError(
                f"a block has {layout.block_bytes} bytes here, but {block_bytes} for the "
                "scheduler: this model's cache layout is not supported; please report it."
            )
        self._tensors = tensors
        self._blocks_per_chunk = blocks_per_chunk
        self._block_bytes = layout.block_bytes
        self._flush_limit_s = longest_transfer_s(config)
        self._device = tensors[0].device
        self.tier_worker = TierWorker.open(
            layout, identity, config, rank=rank, world_size=world_size, block_bytes=block_bytes
        )
        self._opened = self.tier_worker.take_opened()
        self._jobs: dict[int, _Job] = {}  # by our transfer's id
        self._transfers: dict[int, int] = {}  # by vLLM's job id
        self._reports: list[RankReport] = []
        self._ended: list[TransferResult] = []
        self._failed: dict[int, list[int]] = {}  # job: blocks that were not loaded
        self._late_events: deque[Any] = deque(maxlen=_LATE_EVENTS_MAX)

    # --- vLLM's calls

    @failsafe(
        lambda self, job_id, src_spec, dst_spec: self._refuse(
            job_id, src_spec, dst_spec, is_load=False
        )
    )
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: KVDiskLoadStoreSpec
    ) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_load=False)

    @failsafe(
        lambda self, job_id, src_spec, dst_spec, expedited=False: self._refuse(
            job_id, dst_spec, src_spec, is_load=True
        )
    )
    def submit_load(
        self,
        job_id: int,
        src_spec: KVDiskLoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        return self._submit(job_id, dst_spec, src_spec, is_load=True)

    @failsafe(lambda self: self._take_ended())
    def get_finished(self) -> list[TransferResult]:
        """Always success: what failed is in ``take_failed``, because vLLM asserts success here."""
        self._poll()
        return self._take_ended()

    def wait(self, job_ids: Iterable[int]) -> None:
        """Until the blocks of these jobs may be reused. Stores not yet begun are given up.

        Raises TimeoutError when a copy hangs in the device: then no block is safe.
        """
        if not self._flush(job_ids):
            raise TimeoutError("kvdisk: a copy from or to GPU memory did not end")

    def shutdown(self) -> None:
        self.tier_worker.close()

    # --- ours

    def clear(self, clears: Iterable[Clear]) -> None:
        for message in clears:
            if self.broken:
                logger.error("kvdisk: the reset cannot be made durable: remove the cache by hand")
            else:
                self.tier_worker.clear(message)

    def take_opened(self) -> RankOpened:
        """The first message to the scheduler; what was restored is in it once."""
        opened, self._opened = self._opened, self._opened.without_restored()
        return opened

    def take_reports(self) -> list[RankReport]:
        """What the scheduler has to know."""
        reports, self._reports = self._reports, []
        return reports

    def take_failed(self) -> dict[int, list[int]]:
        """Loads that ended since the last call and left blocks unloaded, and which."""
        failed, self._failed = self._failed, {}
        return failed

    # --- steps of the above

    @failsafe(lambda self, job_ids: True)
    def _flush(self, job_ids: Iterable[int]) -> bool:
        wanted = [self._transfers[job_id] for job_id in job_ids if job_id in self._transfers]
        for transfer_id in wanted:
            self.tier_worker.cancel_waiting(transfer_id)
        until = time.monotonic() + self._flush_limit_s
        while any(self._holds_blocks(transfer_id) for transfer_id in wanted):
            left = until - time.monotonic()
            if left <= 0:
                return False
            self.tier_worker.wait(left)
            self._poll()
        return True

    def _submit(
        self,
        job_id: int,
        gpu: GPULoadStoreSpec,
        disk: KVDiskLoadStoreSpec,
        *,
        is_load: bool,
    ) -> bool:
        by_row = self._blocks_by_row(gpu, disk, is_load=is_load)
        transfer = disk.transfer
        moves = by_row[transfer.positions]
        event = self._record_event()
        job = _Job(
            job_id,
            is_load,
            np.asarray(gpu.block_ids, dtype=np.int64),
            moves,
            self._block_bytes,
            time.monotonic(),
            event,
        )
        self._jobs[transfer.id] = job
        self._transfers[job_id] = transfer.id
        if len(transfer):
            handle = 0 if event is None else int(event.cuda_event)
            self.tier_worker.submit(replace(transfer, block_ids=moves), event=handle)
        else:
            self._end(transfer.id, np.empty(0, dtype=np.uint8))
        return True

    def _blocks_by_row(
        self, gpu: GPULoadStoreSpec, disk: KVDiskLoadStoreSpec, *, is_load: bool
    ) -> npt.NDArray[np.int64]:
        """The block of each row, ``_NO_BLOCK`` for rows that have none here.

        Blocks come group by group, and chunks as well. A group's blocks are consecutive ones of a
        sequence; the first may lie within its chunk, and a load may end within one. Where a store's
        blocks do not fill their chunks (a sliding window has left some), it cannot be told which
        rows they are, and none of the group's is moved.
        """
        per_chunk = self._blocks_per_chunk
        by_row = np.full(disk.row_count, _NO_BLOCK, dtype=np.int64)
        blocks = np.asarray(gpu.block_ids, dtype=np.int64)
        chunk_groups = np.asarray(disk.group_ids, dtype=np.int64)
        used_groups = [int(group) for group in dict.fromkeys(disk.group_ids)]
        spans = [
            (int(size), int(first))
            for size, first in zip(gpu.group_sizes, gpu.block_indices, strict=True)
            if size
        ]
        assert len(spans) == len(used_groups), "blocks and chunks are of different groups"
        begin = 0
        for group, (size, first_block) in zip(used_groups, spans, strict=True):
            chunks = np.flatnonzero(chunk_groups == group)
            rows = (chunks[:, None] * per_chunk + np.arange(per_chunk)).reshape(-1)
            skip = first_block % per_chunk
            slack = len(rows) - skip - size
            if slack == 0 or (is_load and 0 < slack < per_chunk):
                by_row[rows[skip : skip + size]] = blocks[begin : begin + size]
            begin += size
        return by_row

    def _record_event(self) -> Any:
        """Behind what the GPU has been given so far; None where computing is synchronous.

        A store's blocks are complete then. A load's blocks may be in use until then: the step under
        way may still write for the request that they belonged to before.
        """
        if self._device.type != "cuda":
            return None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _holds_blocks(self, transfer_id: int) -> bool:
        job = self._jobs.get(transfer_id)
        return job is not None and (job.is_load or not job.source_free)

    def _take_ended(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def _break_down(self) -> None:
        """Nothing is copied any more when the jobs end, since vLLM then reuses their blocks: also
        not what waits for the GPU in a stream, and is copied when that gets there.
        """
        for job in self._jobs.values():
            if job.event is not None:
                job.event.synchronize()
        self.tier_worker.close()
        away = PathState(loads=False, stores=False, reason="an error of kvdisk's, see the log")
        paths = (away,) * len(self._opened.paths)
        self._reports.append(RankReport(self._opened.rank, paths=paths))
        for transfer_id in list(self._jobs):
            self._give_up(transfer_id)

    def _refuse(
        self, job_id: int, gpu: GPULoadStoreSpec, disk: KVDiskLoadStoreSpec, *, is_load: bool
    ) -> bool:
        """A job that is submitted to a broken worker, or broke it."""
        if not any(ended.job_id == job_id for ended in self._ended):
            blocks = np.asarray(gpu.block_ids, dtype=np.int64)
            moves = np.full(len(disk.transfer), _NO_BLOCK, dtype=np.int64)
            job = _Job(job_id, is_load, blocks, moves, self._block_bytes, time.monotonic())
            self._jobs[disk.transfer.id] = job
            self._give_up(disk.transfer.id)
        return True

    def _give_up(self, transfer_id: int) -> None:
        job = self._jobs[transfer_id]
        rows = len(job.moves)
        statuses = np.full(rows, RowStatus.TIMED_OUT, dtype=np.uint8)
        result = RankResult(transfer_id, statuses, np.zeros(rows, np.int32), np.zeros(rows, bool))
        free = [] if job.is_load else [transfer_id]
        self._reports.append(RankReport(self._opened.rank, free, [result]))
        self._end(transfer_id, statuses)

    def _poll(self) -> None:
        report = self.tier_worker.poll()
        if not report:
            return
        self._reports.append(report)
        for transfer_id in report.source_free:
            if transfer_id in self._jobs:
                self._jobs[transfer_id].source_free = True
        for result in report.results:
            self._end(result.transfer_id, result.statuses)

    def _end(self, transfer_id: int, statuses: npt.NDArray[np.uint8]) -> None:
        job = self._jobs.get(transfer_id)  # until its end is told, whatever happens
        if job is None:
            return
        if job.event is not None and np.any(statuses == RowStatus.TIMED_OUT):
            self._late_events.append(job.event)
        ok = statuses == RowStatus.OK
        if job.is_load:
            loaded = job.moves[ok]
            missing = np.setdiff1d(job.blocks, loaded)
            if len(missing):
                self._failed[job.job_id] = missing.tolist()
        moved_bytes = int(np.count_nonzero(ok)) * job.bytes_per_row
        seconds = time.monotonic() - job.began_s
        del self._jobs[transfer_id]
        self._transfers.pop(job.job_id, None)
        self._ended.append(TransferResult(job.job_id, True, moved_bytes, seconds))
