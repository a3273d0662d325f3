"""Whether strided regions share memory: two blocks in the same bytes would overwrite each other.

Exact for every combination of addresses, strides and sizes, without listing blocks where that can
be avoided: a cache has hundreds of thousands of blocks, and this runs at every start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from kvdisk.errors import LayoutError

# Regions of different strides that interleave are compared segment by segment, 24 bytes for each.
_LISTED_MAX: Final = 1 << 26


class StridedRegion(Protocol):
    """What is needed of a region: segment ``b`` lies at ``address + b * block_stride_bytes``."""

    @property
    def address(self) -> int: ...
    @property
    def block_stride_bytes(self) -> int: ...
    @property
    def segment_bytes(self) -> int: ...


def clusters(extents: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Indices of half-open ``(start, end)`` ranges, grouped by overlap, if only in a chain."""
    groups: list[list[int]] = []
    group_end = 0
    for index in sorted(range(len(extents)), key=extents.__getitem__):
        start, end = extents[index]
        if groups and start < group_end:
            groups[-1].append(index)
            group_end = max(group_end, end)
        else:
            groups.append([index])
            group_end = end
    return groups


def find_overlap(regions: Sequence[StridedRegion], block_count: int) -> tuple[int, int] | None:
    """Two regions (or one, twice) with a byte in common in any two blocks, or None."""
    for index, region in enumerate(regions):
        if block_count > 1 and region.block_stride_bytes < region.segment_bytes:
            return index, index
    extents = [
        (
            region.address,
            region.address + region.block_stride_bytes * (block_count - 1) + region.segment_bytes,
        )
        for region in regions
    ]
    for members in clusters(extents):
        if len(members) == 1:
            continue
        if block_count == 1:
            return members[0], members[1]
        strides = {regions[index].block_stride_bytes for index in members}
        overlap = (
            _overlap_of_one_stride(regions, members, strides.pop(), block_count)
            if len(strides) == 1
            else _overlap_by_listing(regions, members, block_count)
        )
        if overlap is not None:
            return overlap
    return None


def _overlap_of_one_stride(
    regions: Sequence[StridedRegion], members: Sequence[int], stride: int, block_count: int
) -> tuple[int, int] | None:
    """Modulo the stride, a region is one interval; it is passed at ``block_count`` rounds in a row.

    So two regions share a byte exactly when their intervals and their rounds both overlap.
    """
    base = min(regions[index].address for index in members)
    intervals = []  # (start, end, first round, region)
    for index in members:
        first_round, start = divmod(regions[index].address - base, stride)
        end = start + regions[index].segment_bytes
        intervals.append((start, min(end, stride), first_round, index))
        if end > stride:
            intervals.append((0, end - stride, first_round + 1, index))
    intervals.sort()
    open_ones: list[tuple[int, int, int, int]] = []
    for interval in intervals:
        start, _, first_round, index = interval
        open_ones = [other for other in open_ones if other[1] > start]
        for _, _, other_round, other_index in open_ones:
            if abs(first_round - other_round) < block_count:
                return other_index, index
        open_ones.append(interval)
    return None


def _overlap_by_listing(
    regions: Sequence[StridedRegion], members: Sequence[int], block_count: int
) -> tuple[int, int] | None:
    """Sort every segment of every block: if any two overlap, so do two neighbours."""
    if len(members) * block_count > _LISTED_MAX:
        raise LayoutError(
            f"{len(members)} views of one allocation differ in block stride and have {block_count} "
            "blocks, too many to prove apart: pass views with one block stride."
        )
    blocks = np.arange(block_count, dtype=np.int64)
    starts = np.concatenate(
        [regions[index].address + blocks * regions[index].block_stride_bytes for index in members]
    )
    lengths = np.repeat(
        np.array([regions[index].segment_bytes for index in members], dtype=np.int64), block_count
    )
    order = np.argsort(starts, kind="stable")
    touching = np.flatnonzero(starts[order[1:]] < starts[order[:-1]] + lengths[order[:-1]])
    if touching.size == 0:
        return None
    first, second = order[touching[0]], order[touching[0] + 1]
    return members[int(first) // block_count], members[int(second) // block_count]
