"""When a path sits out and comes back, under a clock that the test holds."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from kvdisk.path_health import PathHealth
from kvdisk.transfer import Direction, RowStatus, TransferResult

LOAD, STORE = Direction.LOAD, Direction.STORE


def result(
    direction: Direction, *statuses: RowStatus, number: int = 0, quarantined: bool = False
) -> TransferResult:
    rows = len(statuses)
    return TransferResult(
        1,
        direction,
        np.array(statuses, dtype=np.uint8),
        np.full(rows, number, dtype=np.int32),
        np.full(rows, quarantined),
    )


def failing(direction: Direction, number: int) -> TransferResult:
    return result(direction, RowStatus.FAILED, number=number)


HUNG_LOAD = result(LOAD, RowStatus.TIMED_OUT, quarantined=True)
HUNG_STORE = result(STORE, RowStatus.TIMED_OUT, quarantined=True)


def test_one_failure_among_successes_changes_nothing() -> None:
    health = PathHealth()
    for _ in range(20):
        health.record(result(LOAD, RowStatus.FAILED, RowStatus.OK, number=errno.EIO), 0.0)
        health.record(failing(LOAD, errno.EIO), 0.0)
        health.record(result(LOAD, RowStatus.OK), 0.0)
    assert health.state.loads
    assert health.state.stores


@pytest.mark.parametrize(
    ("number", "transfers"),
    [(errno.EIO, 2), (errno.EROFS, 2), (errno.ENOSPC, 3), (errno.EAGAIN, 3)],
)
def test_stores_sit_out_after_failures_in_a_row_and_loads_go_on(
    number: int, transfers: int
) -> None:
    health = PathHealth()
    for _ in range(transfers):
        assert health.allows(STORE)
        health.record(failing(STORE, number), 0.0)
    assert not health.allows(STORE)
    assert health.allows(LOAD)
    assert errno.errorcode[number] in health.state.reason


def test_a_hang_counts_at_once_and_a_hung_load_stops_stores_too() -> None:
    health = PathHealth()
    health.record(HUNG_STORE, 0.0)
    assert health.state.loads
    assert not health.state.stores
    health = PathHealth()
    health.record(HUNG_LOAD, 0.0)
    assert not health.state.loads
    assert not health.state.stores


def test_misses_and_refusals_say_nothing_about_the_disk() -> None:
    health = PathHealth()
    for _ in range(50):
        health.record(result(LOAD, RowStatus.MISS, RowStatus.CORRUPT), 0.0)
        health.record(result(STORE, RowStatus.REFUSED, RowStatus.BUSY), 0.0)
        health.record(result(STORE, RowStatus.TIMED_OUT), 0.0)  # never reached the disk
    assert health.state.loads
    assert health.state.stores


def test_a_copy_that_fails_says_nothing_about_the_disk() -> None:
    health = PathHealth()
    for direction in (LOAD, STORE):
        for _ in range(50):
            health.record(result(direction, RowStatus.COPY_FAILED, number=errno.EIO), 0.0)
    assert health.state.loads
    assert health.state.stores
    assert health.next_probe_s() is None


def test_loads_that_are_always_too_slow_stop_costing_their_deadline() -> None:
    health = PathHealth()
    for _ in range(3):
        health.record(result(LOAD, RowStatus.TIMED_OUT), 0.0)
    assert not health.state.loads


def test_probes_come_later_and_later_and_success_brings_it_back() -> None:
    health = PathHealth()
    health.record(HUNG_LOAD, 0.0)
    now_s, waits = 0.0, []
    for _ in range(9):
        assert health.probe_due(now_s) is None
        due_s = health.next_probe_s()
        assert due_s is not None
        waits.append(due_s - now_s)
        now_s = due_s
        assert health.probe_due(now_s) is LOAD
        health.probed(LOAD, errno.EIO, now_s)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    due_s = health.next_probe_s()
    assert due_s is not None
    health.probed(LOAD, 0, due_s)
    assert health.state.loads
    assert health.next_probe_s() is None


def test_after_a_probe_the_next_failure_puts_it_out_at_once_for_longer() -> None:
    health = PathHealth()
    for _ in range(3):
        health.record(failing(STORE, errno.ENOSPC), 0.0)
    health.probed(STORE, 0, 1.0)
    assert health.allows(STORE)
    health.record(failing(STORE, errno.ENOSPC), 1.0)
    assert not health.allows(STORE)
    assert health.next_probe_s() == 2.0  # the second wait is a second, not half
    health.probed(STORE, 0, 2.0)
    health.record(result(STORE, RowStatus.OK), 2.0)
    for _ in range(2):
        health.record(failing(STORE, errno.ENOSPC), 3.0)
        assert health.allows(STORE)


def test_a_late_answer_of_the_disk_makes_the_probe_due() -> None:
    health = PathHealth()
    health.record(HUNG_STORE, 0.0)
    assert health.probe_due(0.1) is None
    health.answered(0.1)
    assert health.probe_due(0.1) is STORE
