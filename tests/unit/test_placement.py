"""Slots over paths: arithmetic that every process must agree on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.config import TierConfig
from kvdisk.errors import ConfigError
from kvdisk.placement import Placement
from kvdisk.rank_file import record_file_bytes


def config(paths: int, capacity_bytes: int) -> TierConfig:
    roots = tuple(Path(f"/disk{i}") for i in range(paths))
    return TierConfig(paths=roots, capacity_bytes=capacity_bytes)


@given(
    paths=st.integers(1, 5),
    block_bytes=st.integers(1, 4 << 20),
    ranks=st.integers(1, 8),
    capacity_mib=st.integers(512, 4096),
)
def test_every_slot_has_one_place_and_the_limit_holds(
    paths: int, block_bytes: int, ranks: int, capacity_mib: int
) -> None:
    placement = Placement.of(config(paths, capacity_mib << 20), block_bytes, ranks)
    count = placement.slot_count
    slots = np.unique(np.r_[np.arange(min(count, 500)), count - 1])
    paths_of, locals_of = placement.path_of(slots).tolist(), placement.local(slots).tolist()
    places = set(zip(paths_of, locals_of, strict=True))
    assert len(places) == len(slots)
    for path, local in places:
        assert 0 <= path < paths
        assert 0 <= local < placement.slots_per_path
    back = [
        int(placement.slot(path, np.array([local]))[0])
        for path, local in zip(paths_of, locals_of, strict=True)
    ]
    assert back == slots.tolist()
    data_bytes = placement.slots_per_path * placement.slot_bytes
    taken = paths * ranks * (data_bytes + record_file_bytes(placement.slots_per_path))
    assert taken <= capacity_mib << 20


def test_neighbours_stay_together_in_a_stripe_and_a_prefix_spreads_over_paths() -> None:
    placement = Placement.of(config(3, 1 << 30), 256 << 10, 1)
    assert placement.stripe_slots == 4  # 1 MiB
    slots = np.arange(24)
    assert (
        placement.path_of(slots).tolist()
        == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1] * 4 + [2] * 4
    )
    assert placement.local(slots[:4]).tolist() == [0, 1, 2, 3]
    assert placement.local(slots[12:16]).tolist() == [4, 5, 6, 7]


def test_placement_does_not_depend_on_options_that_may_change_between_starts() -> None:
    base = config(2, 1 << 30)
    other = TierConfig(
        paths=base.paths, capacity_bytes=base.capacity_bytes, merge_bytes=1 << 23, shards=4
    )
    assert Placement.of(base, 65536, 2) == Placement.of(other, 65536, 2)


def test_split_names_every_position_once() -> None:
    placement = Placement.of(config(3, 1 << 30), 1 << 20, 1)
    slots = np.array([5, 0, 17, 3, 4, 9])
    parts = dict(placement.split(slots))
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(6))
    for path, positions in parts.items():
        assert (placement.path_of(slots[positions]) == path).all()


def test_a_capacity_below_one_block_of_every_rank_says_how_much_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"too small for blocks of 2\.00 MiB on 4 ranks"):
        Placement.of(config(2, 8 << 20), 2 << 20, 4)
