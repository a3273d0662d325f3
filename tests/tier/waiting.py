"""A clock that tests can move on, and waiting under it."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.tier.tier_rig import TierRig


class Clock:
    """Real time that can be moved on, so that nobody waits for a probe to be due."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def rounds_until(rig: TierRig, clock: Clock, true: Callable[[], bool]) -> None:
    """Poll, moving on so that probes are due, until ``true()``."""

    def moved_on() -> bool:
        clock.ahead_s += 1.0
        return true()

    rig.wait_until(moved_on)
