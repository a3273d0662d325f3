"""When to leave a disk alone, and when to try it again.

A disk that hangs or fails must not cost every request its deadline. So trouble makes a path sit
out, loads and stores apart: a disk that went read-only still serves loads. What brings it back is a
probe, a small real I/O that somebody else performs off the caller's thread, or its own late
completions. Waits grow while trouble lasts, so a dead disk costs nearly nothing.

No I/O and no clock of its own: times are passed in, in seconds, so that every rule can be tested.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdisk.errors import TRANSIENT_ERRORS
from kvdisk.messages import PathState
from kvdisk.transfer import Direction, RowStatus, TransferResult

_FAILURES_MAX: Final = 3  # transfers in a row without one good block
_FATAL_ERRORS: Final = frozenset({errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EIO})
_WAIT_FIRST_S: Final = 0.5
_WAIT_MAX_S: Final = 30.0


@dataclass
class _Lane:
    """One direction of one path."""

    failures: int = 0  # in a row
    wait_s: float = _WAIT_FIRST_S
    out_until: float | None = None  # None: takes part
    reason: str = ""

    def sit_out(self, now_s: float, reason: str) -> None:
        self.out_until = now_s + self.wait_s
        self.wait_s = min(2 * self.wait_s, _WAIT_MAX_S)
        self.reason = reason

    def take_part(self) -> None:
        """The next failure puts it out again at once, for longer; a success forgets all."""
        self.out_until = None
        self.failures = _FAILURES_MAX - 1

    def succeeded(self) -> None:
        self.failures = 0
        self.wait_s = _WAIT_FIRST_S


class PathHealth:
    """Whether one rank uses one path for loads, and whether for stores."""

    def __init__(self) -> None:
        self._lanes = {direction: _Lane() for direction in Direction}

    @property
    def state(self) -> PathState:
        loads, stores = self._lanes[Direction.LOAD], self._lanes[Direction.STORE]
        return PathState(
            loads=loads.out_until is None,
            stores=stores.out_until is None and loads.out_until is None,
            reason=loads.reason if loads.out_until is not None else stores.reason,
        )

    def allows(self, direction: Direction) -> bool:
        state = self.state
        return state.loads if direction is Direction.LOAD else state.stores

    def record(self, result: TransferResult, now_s: float) -> None:
        """Take a transfer's outcome into account; what says nothing of the disk changes nothing."""
        lane = self._lanes[result.direction]
        statuses = result.statuses
        if np.any(statuses == RowStatus.OK):
            lane.succeeded()
            return
        hung = (statuses == RowStatus.TIMED_OUT) & result.quarantined
        failed = statuses == RowStatus.FAILED
        lasting = failed & ~np.isin(result.errors, list(TRANSIENT_ERRORS))
        if np.any(hung):
            lane.failures = _FAILURES_MAX
            reason = "no answer within the deadline"
        elif np.any(lasting):
            number = int(result.errors[np.flatnonzero(lasting)[0]])
            lane.failures += 2 if number in _FATAL_ERRORS else 1
            reason = error_name(number)
        elif np.any(failed):
            lane.failures += 1
            reason = error_name(int(result.errors[np.flatnonzero(failed)[0]]))
        elif result.direction is Direction.LOAD and np.any(statuses == RowStatus.TIMED_OUT):
            lane.failures += 1
            reason = "too slow for the deadline"
        else:
            return
        if lane.out_until is None and lane.failures >= _FAILURES_MAX:
            lane.sit_out(now_s, reason)

    def probe_due(self, now_s: float) -> Direction | None:
        """Which direction to probe now: loads first, since stores wait for them as well."""
        for direction in (Direction.LOAD, Direction.STORE):
            until = self._lanes[direction].out_until
            if until is not None:
                return direction if now_s >= until else None
        return None

    def next_probe_s(self) -> float | None:
        """When ``probe_due`` will say something, if nothing else happens."""
        times = [lane.out_until for lane in self._lanes.values() if lane.out_until is not None]
        return min(times, default=None)

    def probed(self, direction: Direction, error: int, now_s: float) -> None:
        """A probe has ended: ``error`` is 0 or an errno."""
        lane = self._lanes[direction]
        if lane.out_until is None:
            return
        if error == 0:
            lane.take_part()
        else:
            lane.sit_out(now_s, error_name(error))

    def answered(self, now_s: float) -> None:
        """A request that was given up has completed after all: the disk answers, so ask soon."""
        for lane in self._lanes.values():
            if lane.out_until is not None:
                lane.out_until = min(lane.out_until, now_s)


def error_name(number: int) -> str:
    """``EIO (Input/output error)``."""
    return f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"
