"""Work that may hang in the kernel, away from the caller's thread.

Opening, syncing and probing files can block for as long as a disk is in trouble, and nothing can
stop them. Each ``Background`` has at most one such piece of work under way, on a thread that
nobody ever waits for: it does not keep the process from ending either.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """One piece of work at a time; ``wake_fd``, an eventfd, is written when it has ended."""

    def __init__(self, wake_fd: int) -> None:
        self._wake_fd = wake_fd
        self._lock = threading.Lock()
        self._busy = False
        self._ended: list[Result | BaseException] = []

    @property
    def busy(self) -> bool:
        """Something is under way, or its outcome has not been taken."""
        return self._busy

    def start(self, work: Callable[[], Result], name: str) -> None:
        assert not self._busy, "one piece of work at a time"
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()
        self._busy = True

    def take(self) -> Result | BaseException | None:
        """What the work returned or raised; None while it is under way, or there is none."""
        with self._lock:
            if not self._ended:
                return None
            outcome = self._ended.pop()
        self._busy = False
        return outcome

    def abandon(self) -> None:
        """Nobody will take the outcome: do not touch ``wake_fd`` any more."""
        with self._lock:
            self._wake_fd = -1

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            outcome: Result | BaseException = work()
        except BaseException as error:  # handed over, not swallowed
            outcome = error
        with self._lock:
            self._ended.append(outcome)
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
