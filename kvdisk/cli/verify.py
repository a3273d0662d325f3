"""``kvdisk verify``: every stored block is read and proved, also beside a live server.

What always holds: nothing is written; Ctrl-C ends it cleanly, with what was found so far. Exit
status 0 when all is well, 1 when a block or a file is damaged, 2 when it could not run, 130 after
Ctrl-C. Results go to stdout, progress to stderr.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvdisk import __version__
from kvdisk.cli import EXIT_BAD_VERDICT, EXIT_INTERRUPTED
from kvdisk.cli.text import NamedPath, count_text, printable
from kvdisk.errors import ConfigError
from kvdisk.units import display_size, parse_size

if TYPE_CHECKING:
    from kvdisk.scrub import FileReport, RankScrub
    from kvdisk.survey import NamespaceSurvey

_RATE: Final = "256MiB"
_JOBS_MAX: Final = 64
_LISTED_MAX: Final = 100
_LINE_EVERY_S: Final = 10.0


@click.command()
@click.argument("path", type=NamedPath())
@click.option(
    "--rate",
    default=_RATE,
    help=f"Read no more than this a second; 0 is no limit.  [default: {_RATE}]",
)
@click.option("--jobs", type=int, default=2, help="Blocks read at once.  [default: 2]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every damaged block.")
def verify(path: Path, rate: str, jobs: int, as_json: bool) -> int:
    """Read every stored block in PATH and prove it: a cache's root, or one namespace in it.

    May run beside a live server: it takes no lock, reads past the page cache, and counts blocks
    that the server replaces meanwhile as changed, not as damaged. The exit status is 1 when a
    block is damaged. Such a block is a miss for the server, never a wrong answer.
    """
    from kvdisk.scrub import Pace, RankScrub
    from kvdisk.survey import look_into

    bytes_per_s = parse_size(rate.removesuffix("/s"), "rate")
    if not 1 <= jobs <= _JOBS_MAX:
        raise ConfigError(f"jobs={jobs}: must be between 1 and {_JOBS_MAX}.")
    found = look_into(path)
    if not any(each.ranks for each in found):
        raise ConfigError(f"{printable(path)}: there are no rank files here; name a cache's root.")
    stop = threading.Event()
    pace = Pace(bytes_per_s, stop)
    scrubs = [
        RankScrub(each.directory, rank.stem, jobs=jobs, pace=pace, stop=stop)
        for each in found
        for rank in each.ranks
    ]
    complete = _run(scrubs, _blocks_in(found))
    reports = [scrub.report for scrub in scrubs]
    if as_json:
        click.echo(json.dumps(_document(path, reports, complete), indent=2))
    else:
        _print(reports, complete)
    if not complete:
        return EXIT_INTERRUPTED
    return 0 if all(report.clean for report in reports) else EXIT_BAD_VERDICT


def _blocks_in(found: Sequence[NamespaceSurvey]) -> int:
    return sum(rank.used for each in found for rank in each.ranks)


def _run(scrubs: Sequence[RankScrub], blocks: int) -> bool:
    """All of them, one after the other; False when the user has stopped it."""
    try:
        with _Progress(scrubs, blocks) as progress:
            for scrub in scrubs:
                progress.begin(scrub)
                scrub.run(progress.show)
            progress.show()
    except KeyboardInterrupt:
        return False
    return True


class _Progress:
    """A bar on a terminal, a line now and then elsewhere. On stderr."""

    def __init__(self, scrubs: Sequence[RankScrub], blocks: int) -> None:
        self._scrubs = scrubs
        self._blocks = blocks
        self._begun_s = time.monotonic()
        self._line_at_s = self._begun_s + _LINE_EVERY_S
        self._name = ""
        self._bar: Any = None
        self._task: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("", total=max(1, blocks), figures="")

    def begin(self, scrub: RankScrub) -> None:
        self._name = printable(scrub.report.path.name)
        if self._bar is None:
            click.echo(f"{printable(scrub.report.path)} ...", err=True)
        self.show()

    def show(self) -> None:
        reports = [scrub.report for scrub in self._scrubs]
        done = sum(report.blocks + report.changed for report in reports)
        elapsed_s = max(time.monotonic() - self._begun_s, 1e-6)
        speed = sum(report.bytes for report in reports) / elapsed_s
        damaged = sum(len(report.damaged) for report in reports)
        figures = f"{done}/{self._blocks} blocks, {speed / 1e6:.0f} MB/s, {damaged} damaged"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=self._name, figures=figures)
            self._bar.refresh()
        elif time.monotonic() >= self._line_at_s:
            self._line_at_s = time.monotonic() + _LINE_EVERY_S
            click.echo(figures, err=True)

    def __enter__(self) -> _Progress:
        self._context().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._context().__exit__(None, None, None)

    def _context(self) -> AbstractContextManager[object]:
        return nullcontext() if self._bar is None else self._bar


def _print(reports: Sequence[FileReport], complete: bool) -> None:
    for report in reports:
        click.echo(f"{printable(report.path)}: {_summary(report)}")
        for damage in report.damaged[:_LISTED_MAX]:
            click.echo(
                f"  damaged: slot {damage.slot}, offset {damage.offset} of "
                f"{printable(damage.file.name)}: {damage.why}"
            )
        if len(report.damaged) > _LISTED_MAX:
            click.echo(f"  and {len(report.damaged) - _LISTED_MAX} more: --json lists all")
    blocks = sum(report.blocks for report in reports)
    damaged = sum(len(report.damaged) for report in reports)
    prefix = "" if complete else "interrupted, so far: "
    click.echo(f"{prefix}{count_text(blocks, 'block')} checked, {damaged} damaged")
    if damaged:
        click.echo("Damaged blocks are misses. After a crash or a power cut a few are expected.")


def _summary(report: FileReport) -> str:
    if report.problem:
        return f"PROBLEM: {report.problem}"
    parts = [f"{count_text(report.blocks, 'block')} ({display_size(report.bytes)}) checked"]
    if report.live:
        parts.append("in use by a live server")
    if report.changed:
        parts.append(f"{report.changed} changed meanwhile")
    if report.unsteady:
        parts.append(f"{report.unsteady} wrong at first and right when read again")
    if not report.direct:
        parts.append("through the page cache, which may hide what the disk holds")
    parts.append(f"{len(report.damaged)} damaged" if report.damaged else "none damaged")
    return ", ".join(parts)


def _document(path: Path, reports: Sequence[FileReport], complete: bool) -> dict[str, Any]:
    return {
        "kvdisk": __version__,
        "path": str(path),
        "complete": complete,
        "clean": all(report.clean for report in reports),
        "files": [
            {
                "path": str(report.path),
                "problem": report.problem,
                "live": report.live,
                "direct": report.direct,
                "blocks": report.blocks,
                "bytes": report.bytes,
                "changed": report.changed,
                "unsteady": report.unsteady,
                "damaged": [
                    {
                        "file": str(each.file),
                        "slot": each.slot,
                        "offset": each.offset,
                        "why": each.why,
                    }
                    for each in report.damaged
                ],
            }
            for report in reports
        ],
    }
