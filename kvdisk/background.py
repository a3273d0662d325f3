"""Work that may hang in the kernel, away from the caller's thread.

Opening, syncing and probing files can block for as long as a disk is in trouble, and nothing can
stop them. Each ``Background`` has at most one such piece of work under way, on a thread that
nobody ever waits for: it does not keep the process from ending either.

What always holds: the outcome of a piece of work is taken once, by ``take``, by ``abandon``, or by
what ``start`` was told to do with one that nobody will take.
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
        self._abandoned = False
        self._ended: list[Result | BaseException] = []

    @property
    def busy(self) -> bool:
        """Something is under way, or its outcome has not been taken."""
        return self._busy

    def start(
        self,
        work: Callable[[], Result],
        name: str,
        unclaimed: Callable[[Result | BaseException], None] | None = None,
    ) -> bool:
        """Begin ``work``; False when the machine gives no thread for it: then nothing was begun.

        ``unclaimed`` gets the outcome, on the work's thread, if ``abandon`` comes before it.
        """
        assert not self._busy, "one piece of work at a time"
        try:
            threading.Thread(
                target=self._run, args=(work, unclaimed), name=name, daemon=True
            ).start()
        except (RuntimeError, MemoryError):  # pids.max, ulimit -u: says "can't start new thread"
            return False
        self._busy = True
        return True

    def take(self) -> Result | BaseException | None:
        """What the work returned or raised; None while it is under way, or there is none."""
        with self._lock:
            if not self._ended:
                return None
            outcome = self._ended.pop()
        self._busy = False
        return outcome

    def abandon(self) -> Result | BaseException | None:
        """Like ``take``, for the last time: ``wake_fd`` is not touched any more."""
        with self._lock:
            self._abandoned = True
        return self.take()

    def _run(
        self,
        work: Callable[[], Result],
        unclaimed: Callable[[Result | BaseException], None] | None,
    ) -> None:
        try:
            outcome: Result | BaseException = work()
        except BaseException as error:  # handed over, not swallowed
            outcome = error
        with self._lock:
            if not self._abandoned:
                self._ended.append(outcome)
                os.eventfd_write(self._wake_fd, 1)
                return
        if unclaimed is not None:
            unclaimed(outcome)
