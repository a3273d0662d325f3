"""A rate that is measured all the time: of a disk's loads, of a GPU's prefill."""

from __future__ import annotations

import math
from typing import Final

_MEMORY_S: Final = 1.0  # of being busy: what was measured before that counts little


class RateMeter:
    """Amount per second of being busy; what came last counts most."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """``amount`` was done in ``seconds`` (not negative) of being busy.

        One measurement counts for no longer than the memory is: a process that was stopped for a
        minute has not become slow for as long.
        """
        if seconds > _MEMORY_S:
            amount, seconds = amount * _MEMORY_S / seconds, _MEMORY_S
        kept = math.exp(-seconds / _MEMORY_S)
        self._amount = self._amount * kept + amount
        self._seconds = self._seconds * kept + seconds

    @property
    def rate(self) -> float | None:
        """None: nothing was measured yet."""
        return self._amount / self._seconds if self._seconds > 0 else None
