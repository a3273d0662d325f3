"""``kvdisk gc``: namespaces that nothing uses any more, listed and, when asked for, removed.

What always holds: without a selection nothing is removed; with one it asks first, on a terminal,
unless ``--yes`` is given; exit status 0 when everything that was to go is gone, 1 when something is
left (no consent, in use, not ours), 2 when it could not run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvdisk.cli import EXIT_BAD_VERDICT
from kvdisk.cli.text import NamedPath, count_text, printable, time_text
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.units import display_size, parse_duration, parse_size

if TYPE_CHECKING:
    from kvdisk.cleanup import Namespace

_NS_PER_S = 1_000_000_000


@click.command()
@click.argument("root", type=NamedPath())
@click.option("--keep-newest", type=int, metavar="N", help="Keep the N that were used last.")
@click.option("--older-than", metavar="TIME", help="Only what was not used for so long: 30d, 12h.")
@click.option("--max-size", metavar="SIZE", help="Only until what stays takes no more: 500GiB.")
@click.option(
    "--damaged", is_flag=True, help="Remove files of ours that were set aside as damaged."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
def gc(
    root: Path,
    keep_newest: int | None,
    older_than: str | None,
    max_size: str | None,
    damaged: bool,
    yes: bool,
) -> int:
    """List the namespaces in ROOT by last use and size, and remove those that are selected.

    Without a selection it only lists. --keep-newest and --older-than say which may go, both when
    both are given; --max-size removes the longest unused of those, until the rest fits.

    Only files with kvdisk's mark are removed, never those of a namespace that a server has open,
    never through a link. What is not kvdisk's stays and is named.
    """
    from kvdisk.cleanup import find, select
    from kvdisk.identity import is_namespace_name
    from kvdisk.looking import require_directory

    age_ns = None if older_than is None else parse_duration(older_than, "older-than")
    bytes_max = None if max_size is None else parse_size(max_size, "max-size")
    if keep_newest is not None and keep_newest < 0:
        raise ConfigError(f"keep-newest={keep_newest}: must be 0 or more.")
    require_directory(root)
    if is_namespace_name(root.absolute().name):
        raise ConfigError(f"{printable(root)} is one namespace: name the root above it.")
    try:
        found, unreadable = find(root.absolute())
    except OSError as error:
        raise DeviceError.from_os_error(
            error, "look into", error.filename or root, "Run it as the cache's user."
        ) from error
    going = select(
        found,
        keep_newest=keep_newest,
        older_than_s=None if age_ns is None else age_ns / _NS_PER_S,
        bytes_max=bytes_max,
        now_s=time.time(),
    )
    cleaned = [each for each in found if damaged and each.contents.leftovers]
    _list(root, found, going, cleaned)
    for name in unreadable:
        click.echo(f"left    {printable(name)}")
    selects = damaged or any(each is not None for each in (keep_newest, older_than, max_size))
    if not selects:
        click.echo("Nothing is selected: --keep-newest, --older-than, --max-size or --damaged do.")
        return 0
    if not going and not cleaned:
        click.echo("Nothing to remove.")
        return 0
    if not yes and not _consent(going, cleaned):
        return EXIT_BAD_VERDICT
    return 0 if _remove(going, cleaned) else EXIT_BAD_VERDICT


def _list(
    root: Path, found: Sequence[Namespace], going: Sequence[Namespace], cleaned: Sequence[Namespace]
) -> None:
    total = display_size(sum(each.allocated_bytes for each in found))
    click.echo(f"{count_text(len(found), 'namespace')} in {printable(root)}, {total}")
    for each in found:
        model = "unknown" if each.identity is None else str(each.identity.get("model", "unknown"))
        fate = "remove" if each in going else "keep"
        click.echo(
            f"{fate:<7} {each.directory.name}  {display_size(each.allocated_bytes):>11}  "
            f"last used {time_text(each.used_s)}  {printable(model)}, {each.lock}"
        )
        for name in each.contents.leftovers:
            click.echo(f"        {'remove' if each in cleaned else 'keep'} {printable(name)}")
        for name in each.contents.others:
            click.echo(f"        not ours: {printable(name)}")


def _consent(going: Sequence[Namespace], cleaned: Sequence[Namespace]) -> bool:
    if not sys.stdin.isatty():
        click.echo("Nothing was removed: there is no terminal to ask on; --yes removes.", err=True)
        return False
    what = [count_text(len(going), "namespace")] if going else []
    if cleaned:
        count = sum(len(each.contents.leftovers) for each in cleaned)
        what.append(count_text(count, "damaged file"))
    if click.confirm(f"Remove {' and '.join(what)}?"):
        return True
    click.echo("Nothing was removed.", err=True)
    return False


def _remove(going: Sequence[Namespace], cleaned: Sequence[Namespace]) -> bool:
    """Damaged files first, so that a namespace can go whole. True: all of it is gone."""
    from kvdisk.cleanup import remove, remove_leftovers

    freed, good = 0, True
    steps = [(each, remove_leftovers) for each in cleaned] + [(each, remove) for each in going]
    for namespace, step in steps:
        removal = step(namespace)
        freed += removal.freed_bytes
        if removal.problem:
            good = False
            click.echo(f"{namespace.directory.name}: {printable(removal.problem)}", err=True)
    click.echo(f"{display_size(freed)} freed.")
    return good
