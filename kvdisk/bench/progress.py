"""How far a measurement is: a bar on a terminal, one line per phase elsewhere. All on stderr.

The bar is drawn from the calls that report progress, never by a thread of its own, which would take
CPU from what is measured.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from kvdisk.bench.runner import Progress as Report


class Phases:
    """Phases of one measurement; ``begin`` ends the one before."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[speed]}"),
                console=Console(stderr=True),
                transient=True,
                auto_refresh=False,
            )

    def begin(self, name: str, total_bytes: int | None, duration_s: float | None) -> Report:
        """Progress counts bytes up to ``total_bytes``, or else time up to ``duration_s``."""
        started = time.monotonic()
        bar = self._bar
        if bar is None:
            click.echo(f"{name} ...", err=True)
            return lambda done_bytes: None
        if self._task is not None:
            bar.remove_task(self._task)
        task = self._task = bar.add_task(name, total=total_bytes or duration_s, speed="")
        bar.refresh()

        def report(done_bytes: int) -> None:
            elapsed_s = time.monotonic() - started
            speed = f"{done_bytes / elapsed_s / 1e6:.0f} MB/s" if done_bytes and elapsed_s else ""
            bar.update(task, completed=done_bytes if total_bytes else elapsed_s, speed=speed)
            bar.refresh()

        return report

    def __enter__(self) -> Phases:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
