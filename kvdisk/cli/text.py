"""How the commands write what they have found: names from strangers, times, results as files."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from kvdisk.errors import ConfigError


class NamedPath(click.Path):
    """A path that was really named: "" is a script's variable that is not set, not this place."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not os.fspath(value):
            self.fail("the name is empty.", param, ctx)
        return Path(value)


def printable(text: str | Path) -> str:
    """Without control characters or bytes that are no UTF-8: names come from strangers."""
    shown = os.fspath(text) if isinstance(text, Path) else text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def time_text(seconds: float) -> str:
    """Local time, to the second; "unknown" for what no clock says."""
    try:
        return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return "unknown"


def count_text(count: int, noun: str) -> str:
    """``1 block``, ``2 blocks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def require_writable(
    json_file: str | None,
    plot_file: str | None,
    *,
    write_trace: str | None = None,
    reads: str | None = None,
) -> None:
    """A result that cannot be written should not cost a measurement first, nor what is read, nor
    another result: ConfigError.
    """
    named = (("json", json_file), ("plot", plot_file), ("write-trace", write_trace))
    taken = {} if reads is None else {Path(reads).resolve(): "what is read"}
    for option, name in named:
        if name is None or (name == "-" and option == "json"):
            continue
        file = Path(name).absolute()
        if not file.parent.is_dir() or file.is_dir():
            raise ConfigError(f"{option}={name}: not a file in an existing directory.")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(f"{option}={name}: this user may not write it.")
        if file.resolve() in taken:
            raise ConfigError(f"{option}={name}: that is {taken[file.resolve()]}: name another.")
        taken[file.resolve()] = f"{option} too"
    if plot_file is not None:
        from kvdisk.bench.plot import require_drawable

        require_drawable(Path(plot_file))


def write_json(document: dict[str, Any], name: str) -> None:
    """To that file, or to stdout when it is "-". Raises ConfigError when it cannot be written."""
    text = json.dumps(document, indent=2) + "\n"
    if name == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(name).write_text(text)
    except OSError as error:
        raise ConfigError(f"json={name}: {error.strerror}.") from error
