"""Short runs of the campaigns, so that they are known to work and to find what they look for.

The long ones are `make crash`, `make flips`, `make powercut` and `make storm`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvdisk.transfer import Direction, RowStatus
from tests.faults.fuse_disk import needs_fuse
from tests.tier import crash, flips, powercut, storm
from tests.tier.tier_rig import TierRig, WrongBytes, content, generation_in, key_of, keys_of


def test_kills_while_storing_leave_right_bytes_or_misses(tmp_path: Path) -> None:
    totals = crash.campaign(6, 1, tmp_path)
    assert (totals.crashes, totals.wrong) == (6, 0)
    assert totals.found > 0


def test_everything_survives_a_writer_that_ends_in_peace(tmp_path: Path) -> None:
    """The campaign's own arithmetic: without a kill, what was readable is found, all of it."""
    world = crash.World.choose(random.Random(3), tmp_path)
    lines: list[str] = []
    rig = crash.Writer(world, 1, lines.append).run(steps=200)
    rig.finish_all()
    rig.close()
    said = [line for line in lines if line.startswith("readable")]
    crash.understand(world, said[-1:])
    answer = crash.verify_in_child(world)
    assert world.expected <= set(answer["found"])
    assert answer["wrong"] == 0


def test_a_generation_that_nobody_stored_counts_as_wrong_bytes(tmp_path: Path) -> None:
    world = crash.World.choose(random.Random(3), tmp_path)
    rig = world.open()
    rig.store(world.keys[:4], generation=1)
    rig.close()
    world.legal.clear()
    assert crash.verify_in_child(world)["wrong"] == 4


def test_content_proves_whose_it_is() -> None:
    key, other = key_of(1), key_of(2)
    block = content(key, 7, 8192).copy()
    assert generation_in(block, key) == 7
    with pytest.raises(WrongBytes):
        generation_in(block, other)
    block[8000] ^= 1
    with pytest.raises(WrongBytes):
        generation_in(block, key)


@pytest.mark.slow
def test_a13_damage_of_every_kind_becomes_misses_and_is_counted(tmp_path: Path) -> None:
    totals = flips.campaign(3000, 1, tmp_path)
    assert totals["flipped bits"] + totals["record bits"] == 3000
    assert totals["tears"] == 4 * 2 * (flips.BLOCK_BYTES // flips.SECTOR - 1)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("file_system", ["ext4", "xfs"])
def test_power_cuts_leave_right_bytes_or_misses(file_system: str) -> None:
    bare, synced = powercut.campaign(2, 1, file_system)
    assert (bare.crashes, synced.crashes) == (1, 1)
    assert bare.wrong + synced.wrong == 0


@pytest.mark.root
@pytest.mark.slow
@needs_fuse
def test_two_disks_that_fail_hang_and_lie_give_right_bytes_or_misses(tmp_path: Path) -> None:
    totals = storm.campaign(500, 4, tmp_path)
    assert totals.wrong == 0
    assert totals.clears > 0
    assert totals.restarts > 0
    for direction in Direction:
        assert totals.of(direction, RowStatus.OK) > 100, "or it would prove nothing"
        assert totals.of(direction, RowStatus.TIMED_OUT) > 0
    assert totals.of(Direction.LOAD, RowStatus.CORRUPT) > 0


def test_padding_behind_a_block_is_zero_on_disk(tmp_path: Path) -> None:
    """A6: never old memory, which would be somebody's prompt."""
    rig = TierRig(tmp_path, slots=flips.SLOTS, block_bytes=flips.BLOCK_BYTES)
    assert set(rig.store(keys_of(range(64)))) == {RowStatus.OK}
    assert set(rig.store(keys_of(range(64, 128)))) == {RowStatus.OK}
    rig.close()
    data = rig.data_files[0].read_bytes()
    for start in range(0, 128 * flips.SLOT_BYTES, flips.SLOT_BYTES):
        slot = data[start : start + flips.SLOT_BYTES]
        assert not any(slot[flips.BLOCK_BYTES :]), "padding is not zero"
        assert any(slot[: flips.BLOCK_BYTES])
