"""``kvdisk plot``: pictures of what ``--json`` of ``kvdisk bench`` and ``replay`` has kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvdisk.cli.text import NamedPath
from kvdisk.errors import ConfigError


@click.command()
@click.argument("results", nargs=-1, required=True, type=NamedPath())
@click.option(
    "-o",
    "--output",
    required=True,
    type=NamedPath(),
    metavar="FILE",
    help="A name that ends in .png or .svg.",
)
def plot(results: tuple[Path, ...], output: Path) -> None:
    """Draw bandwidth and p99 latency against block size from RESULTS, or one replay.

    RESULTS are files that kvdisk bench --json (or make bench) wrote; each may hold one result or a
    list of them. Each depth is a line; fio's is dashed. Or one file of kvdisk replay --json: hits
    and time to first token against capacity.
    """
    from kvdisk.bench.plot import draw, require_drawable

    require_drawable(output)
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"{output}: its directory does not exist.")
    documents = [(name, document) for name in results for document in _read(name)]
    replays = [name for name, document in documents if "replay" in document]
    if not replays:
        draw([document for _, document in documents], output, [str(name) for name, _ in documents])
        return
    if len(documents) > 1:
        raise ConfigError(f"{replays[0]}: a replay is drawn by itself: name one result.")
    from kvdisk.replay.plot import draw as draw_replay

    draw_replay(documents[0][1], output, str(replays[0]))


def _read(name: Path) -> list[dict[str, Any]]:
    """The results in a file: one document, a list, or the matrix of bench/run.py."""
    try:
        content = json.loads(name.read_text())
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{name}: not JSON ({error}).") from error
    if isinstance(content, dict) and isinstance(content.get("results"), list):
        content = content["results"]
    documents = content if isinstance(content, list) else [content]
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise ConfigError(f"{name}: not a result of kvdisk bench.")
    return documents
