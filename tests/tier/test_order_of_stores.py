"""After a restart what was stored last counts as used last, whichever path and shard it is on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvdisk.messages import RankOpened
from kvdisk.worker import TierWorker
from tests.tier.tier_rig import KIB, TierRig, keys_of, ok, tier_rig

SHAPE = {"slots": 192, "block_bytes": 16 * KIB}


def what_a_restart_finds(rig: TierRig) -> RankOpened:
    worker = TierWorker.open(rig.blocks.layout, rig.identity, rig.config)
    opened = worker.take_opened()
    worker.close()
    return opened


def sequence_of_keys(opened: RankOpened) -> dict[bytes, int]:
    keys = [
        row[:length].tobytes()
        for row, length in zip(opened.restored_keys, opened.restored_key_lengths, strict=True)
    ]
    return dict(zip(keys, opened.restored_sequences.tolist(), strict=True))


def test_a_new_disk_beside_an_old_one_holds_the_newest(tmp_path: Path) -> None:
    old, new = keys_of(range(40)), keys_of(range(1000, 1192))
    with tier_rig(tmp_path / "a", **SHAPE) as rig:
        for _ in range(20):  # the old disk has numbered many stores
            rig.tier.drop(old)
            assert rig.store(old) == ok(40)
    with tier_rig(tmp_path / "a", tmp_path / "b", legal=rig.legal, **SHAPE) as rig:
        for first in range(0, 192, 64):
            assert rig.store(new[first : first + 64]) == ok(64)
    opened = what_a_restart_finds(rig)
    sequences = sequence_of_keys(opened)
    paths = rig.tier._scheduler.placement.path_of(opened.restored_slots)
    assert set(paths.tolist()) == {0, 1}
    assert min(sequences[key] for key in new) > max(sequences[key] for key in old)
    # So room is made from what is old.
    with tier_rig(tmp_path / "a", tmp_path / "b", legal=rig.legal, **SHAPE) as rig:
        total = rig.tier.stats().slots.total
        more = keys_of(range(5000, 5000 + total - len(new)))
        for first in range(0, len(more), 64):
            rig.store(more[first : first + 64])
        assert rig.tier.readable(new).all()
        assert not rig.tier.readable(old).any()


def test_stores_on_all_paths_and_shards_are_in_one_order(tmp_path: Path) -> None:
    keys = keys_of(range(300))
    with tier_rig(tmp_path / "a", tmp_path / "b", shards=2, **SHAPE) as rig:
        for key in keys:
            assert rig.store([key]) == ok(1)
    opened = what_a_restart_finds(rig)
    sequences = sequence_of_keys(opened)
    assert len(sequences) == len(set(sequences.values())) == 300
    assert sorted(keys, key=lambda key: sequences[key]) == keys
    assert np.unique(rig.tier._scheduler.placement.path_of(opened.restored_slots)).size == 2
