"""``kvdisk doctor``: what on this machine keeps kvdisk from being fast, or from starting.

People run it when something is wrong, so it must not fail itself: it needs no native module, no
torch and no GPU, takes no setting of a server, and leaves nothing behind.

What always holds: one line per check, in the same order, coloured only on a terminal; everything
that came from the system is shown with control characters escaped; exit status 0 without an
error, 1 with one, 2 when there is no such directory.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from kvdisk import __version__
from kvdisk.cli import EXIT_BAD_VERDICT
from kvdisk.cli.text import NamedPath, printable
from kvdisk.errors import ConfigError
from kvdisk.probe import Check, run_checks

_COLOURS: Final = {"ok": "green", "warning": "yellow", "error": "bold red"}
_GRAVEST_FIRST: Final = ("error", "warning", "ok")


@click.command()
@click.argument("path", default=".", type=NamedPath())
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every measured value.")
def doctor(path: Path, as_json: bool) -> int:
    """Check whether this machine and the directory PATH suit kvdisk.

    PATH is where the cache is to be (default: the current directory). A small file is written
    there and removed. Each line says "ok", "warning" (kvdisk works, but slower or less safely) or
    "error" (kvdisk cannot open), what was found, and what to do. The exit status is 1 when a line
    says "error".
    """
    _require_directory(path)
    checks = run_checks(path)
    status = next(s for s in _GRAVEST_FIRST if any(check.status == s for check in checks))
    if as_json:
        click.echo(_as_json(path, checks, status))
    else:
        _print_lines(path, checks)
    return EXIT_BAD_VERDICT if status == "error" else 0


def _require_directory(path: Path) -> None:
    """Raise ConfigError when ``path`` cannot be examined at all."""
    try:
        path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{printable(path)}: {reason}. Name an existing directory.") from None
    if not path.is_dir():
        raise ConfigError(f"{printable(path)} is not a directory. Name an existing directory.")


def _as_json(path: Path, checks: Sequence[Check], status: str) -> str:
    document = {
        "kvdisk": __version__,
        "path": str(path),
        "status": status,
        "checks": [
            {
                "name": check.name,
                "status": check.status,
                "found": check.found,
                "remedy": check.remedy,
                "values": dict(check.values),
            }
            for check in checks
        ],
    }
    return json.dumps(document, indent=2)


def _print_lines(path: Path, checks: Sequence[Check]) -> None:
    counts = Counter(check.status for check in checks)
    summary = ", ".join(f"{counts[s]} {s}" for s in reversed(_GRAVEST_FIRST))
    summary = f"{summary}: kvdisk {__version__} in {printable(path.absolute())}"
    if sys.stdout.isatty():
        _print_table(checks, summary)
        return
    for check in checks:
        click.echo(f"{check.status:<8} {check.name:<12} {_sentence(check)}")
    click.echo(summary)


def _print_table(checks: Sequence[Check], summary: str) -> None:
    """On a terminal: colours, and long lines wrapped within their column."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    for check in checks:
        text = Text(printable(check.found))
        if check.remedy is not None:
            text.append(f"\nTo do: {printable(check.remedy)}", style="bold")
        table.add_row(Text(check.status, style=_COLOURS[check.status]), Text(check.name), text)
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(summary))


def _sentence(check: Check) -> str:
    found = printable(check.found)
    return found if check.remedy is None else f"{found}. To do: {printable(check.remedy)}"
