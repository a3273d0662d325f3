"""Bytes and busy time of a rank's disks, as they are told to the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvdisk.disk_time import DiskTime
from kvdisk.transfer import Direction, Progress


def engines(*loads: Progress) -> dict[int, Any]:
    """One on each path, that has never stored anything."""
    return {
        index: SimpleNamespace(
            progress=lambda direction, loads=each: [
                loads if direction is Direction.LOAD else Progress()
            ]
        )
        for index, each in enumerate(loads)
    }


def ms(milliseconds: int) -> int:
    return milliseconds * 10**6


def test_bytes_are_summed_and_time_is_that_of_the_busiest_path() -> None:
    time = DiskTime()
    assert time.since_told(engines(Progress(), Progress())) == {}
    both = engines(Progress(100, ms(100)), Progress(50, ms(300)))
    assert time.since_told(both) == {Direction.LOAD: (150, 0.3)}
    assert time.since_told(both) == {}
    more = engines(Progress(130, ms(180)), Progress(50, ms(300)))
    assert time.since_told(more) == {Direction.LOAD: (30, 0.08)}


def test_a_busy_disk_is_told_of_after_a_while_also_when_it_gave_nothing() -> None:
    time = DiskTime()
    assert time.since_told(engines(Progress(0, ms(100), busy=True))) == {}
    hangs = engines(Progress(0, ms(260), busy=True), Progress(50, ms(10)))
    assert time.since_told(hangs) == {Direction.LOAD: (50, 0.26)}


def test_an_engine_that_was_replaced_begins_anew() -> None:
    time = DiskTime()
    time.since_told(engines(Progress(100, ms(100))))
    assert time.since_told(engines(Progress(10, ms(20)))) == {Direction.LOAD: (10, 0.02)}


def test_shards_that_take_turns_count_for_their_own_time() -> None:
    """Found by an attack: blocks of one shard are loaded, then blocks of the other."""

    def told(time: DiskTime, *shards: Progress) -> Any:
        engine = SimpleNamespace(progress=lambda direction: list(shards) if direction else [])
        return time.since_told({0: engine}).get(Direction.LOAD)  # type: ignore[dict-item]

    time, busy, idle = DiskTime(), Progress(100, ms(100)), Progress()
    assert told(time, busy, idle) == (100, 0.1)
    assert told(time, busy, busy) == (100, 0.1)
    assert told(time, Progress(300, ms(300)), Progress(200, ms(250))) == (300, 0.2)
