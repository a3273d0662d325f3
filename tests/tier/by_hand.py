"""A rank that exists only as the reports it sends, for tests of the scheduler alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvdisk.messages import PathState, RankOpened, RankReport, RankResult, Transfer
from kvdisk.scheduler import TierScheduler
from kvdisk.transfer import FAILURES

UP = PathState()


def opened(scheduler: TierScheduler, rank: int) -> RankOpened:
    placement = scheduler.placement
    nothing = np.zeros(0, dtype=np.int64)
    return RankOpened(
        rank=rank,
        world_size=scheduler.world_size,
        slot_bytes=placement.slot_bytes,
        slot_count=placement.slot_count,
        restored_slots=nothing,
        restored_sequences=nothing.astype(np.uint64),
        restored_keys=np.zeros((0, 64), dtype=np.uint8),
        restored_key_lengths=nothing.astype(np.uint8),
        clears=0,
        paths=(UP,) * placement.path_count,
        facts={},
    )


def report(
    rank: int,
    transfer: Transfer,
    statuses: Sequence[int],
    *,
    error: int = 0,
    quarantined: Sequence[bool] | None = None,
) -> RankReport:
    rows = np.array(statuses, dtype=np.uint8)
    result = RankResult(
        transfer.id,
        rows,
        np.where(np.isin(rows, FAILURES), error, 0).astype(np.int32),
        np.array(quarantined or [False] * len(rows), dtype=np.bool_),
    )
    return RankReport(rank, source_free=[transfer.id], results=[result])
