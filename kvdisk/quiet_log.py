"""Log lines about things that happen thousands of times a second when they happen at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Final

_INTERVAL_S: Final = 10.0


class QuietLog:
    """Says each thing at most once in ten seconds, and then how often it went unsaid."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._said: dict[Hashable, tuple[float, int]] = {}

    def warning(self, about: Hashable, text: str) -> None:
        """``text``, unless something with the same ``about`` was said a moment ago."""
        now_s = self._clock()
        said_s, unsaid = self._said.get(about, (float("-inf"), 0))
        if now_s - said_s < _INTERVAL_S:
            self._said[about] = (said_s, unsaid + 1)
            return
        self._said[about] = (now_s, 0)
        self._log.warning("%s%s", text, f" ({unsaid} more like it before)" if unsaid else "")
