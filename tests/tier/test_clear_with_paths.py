"""A clear holds for every path, also for one that was away when it was made (A8)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdisk.errors import DeviceError
from kvdisk.rank_file import RankFile
from kvdisk.rank_header import HEADER_BYTES, RankHeader, parse_header
from kvdisk.transfer import RowStatus
from tests.tier.rig import ok, tier_rig

KEYS = list(range(100))
CAPACITY = 16 << 20


def away(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No path of this name can be opened."""
    real = RankFile.create_or_open

    def failing(directory: Path, **options: Any) -> RankFile:
        if directory.parent.name == name:
            raise DeviceError("it is away", errno=5)
        return real(directory, **options)

    monkeypatch.setattr(RankFile, "create_or_open", failing)


def test_a8_a_path_that_was_away_during_a_clear_brings_nothing_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / "good", tmp_path / "away"]
    with tier_rig(*paths, capacity=CAPACITY) as rig:
        assert rig.store(KEYS) == ok(100)
    with pytest.MonkeyPatch.context() as patch:
        away(patch, "away")
        with tier_rig(*paths, capacity=CAPACITY) as rig:
            assert rig.tier.clear()
            assert "misses this clear" in caplog.text
            assert rig.store(KEYS[:50], generation=1) == ok(50)
    with tier_rig(*paths, capacity=CAPACITY) as rig:
        found = rig.load(KEYS, generation=1)  # a block of generation 0 would be wrong bytes
        assert found == ok(50) + [RowStatus.MISS] * 50
        assert rig.store(KEYS, generation=1) == ok(100)
    with tier_rig(*paths, capacity=CAPACITY) as rig:
        assert rig.load(KEYS, generation=1) == ok(100)


def test_a8_a_crash_between_the_paths_of_a_clear_clears_both(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    with tier_rig(*paths, capacity=CAPACITY) as rig:
        assert rig.store(KEYS) == ok(100)
    (records,) = paths[0].glob("*/rank-0-of-1.idx")
    with records.open("r+b") as file:
        header = parse_header(file.read(HEADER_BYTES))
        assert isinstance(header, RankHeader)
        file.seek(0)
        file.write(replace(header, epoch=header.epoch + 1, clears=header.clears + 1).pack())
    with tier_rig(*paths, capacity=CAPACITY) as rig:
        assert rig.lookup(KEYS) == 0
        assert rig.load(KEYS) == [RowStatus.MISS] * 100
        assert rig.store(KEYS, generation=1) == ok(100)


def test_a8_paths_that_were_cleared_apart_know_which_clear_was_the_later(tmp_path: Path) -> None:
    """One is used alone and cleared, then the other; neither was there when the other one was."""
    with tier_rig(tmp_path / "one", capacity=CAPACITY) as rig:
        assert rig.tier.clear()
        assert rig.store(KEYS, generation=1) == ok(100)
    with tier_rig(tmp_path / "two", capacity=CAPACITY) as rig:
        assert rig.tier.clear()
        assert rig.store(KEYS[:50], generation=2) == ok(50)
    for _ in range(2):
        with tier_rig(tmp_path / "one", tmp_path / "two", capacity=2 * CAPACITY) as rig:
            found = rig.load(KEYS, generation=2)  # generation 1 would be wrong bytes
            assert found == ok(50) + [RowStatus.MISS] * 50


def test_a_new_path_takes_part_after_clears_of_the_others(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "one", capacity=CAPACITY) as rig:
        assert rig.tier.clear()
        assert rig.tier.clear()
        assert rig.store(KEYS) == ok(100)
    for _ in range(2):
        with tier_rig(tmp_path / "one", tmp_path / "new", capacity=CAPACITY) as rig:
            assert rig.load(KEYS) == ok(100)
            assert rig.store(range(200, 300)) == ok(100)
