"""``kvdisk inspect``: what a cache's files hold, and what a restart would find.

What always holds: nothing is changed, no payload is read, and a live server notices nothing; exit
status 0 when every rank could be looked at, 1 when something is wrong with a file, 2 when there is
no such directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvdisk import __version__
from kvdisk.cli import EXIT_BAD_VERDICT
from kvdisk.cli.text import NamedPath, count_text, printable, time_text
from kvdisk.units import display_size

if TYPE_CHECKING:
    from kvdisk.survey import NamespaceSurvey, RankSurvey

_IDENTITY_LABELS: Final = {
    "model": "model",
    "weights": "weights",
    "dtype": "dtype",
    "block_tokens": "tokens a block",
    "quantization": "quantization",
    "parallel": "parallel",
    "key_hash": "keys by",
}


@click.command()
@click.argument("path", type=NamedPath())
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every field.")
def inspect(path: Path, as_json: bool) -> int:
    """Show what the rank files in PATH hold: a cache's root, or one namespace in it.

    Reads slot records, never payloads, takes nobody's lock and may run beside a live server. The
    figures of a live cache are those of its record file, which lags behind the server's memory.
    The exit status is 1 when something is wrong with a file.
    """
    # Only here, so that --help needs neither numpy nor the native module.
    from kvdisk.survey import look_into

    found = look_into(path)
    if as_json:
        click.echo(json.dumps(_document(path, found), indent=2))
    elif not found:
        click.echo(f"no cache in {printable(path)}")
    else:
        click.echo("\n\n".join("\n".join(_lines(each)) for each in found))
    wrong = any(rank.problem for each in found for rank in each.ranks)
    return EXIT_BAD_VERDICT if wrong else 0


# For people --------------------------------------------------------------------------------------


def _lines(found: NamespaceSurvey) -> list[str]:
    lines = [printable(found.directory), f"  identity   {_identity_text(found.identity)}"]
    for rank in found.ranks:
        lines.append(f"  {f'rank {rank.rank}/{rank.world_size}':<10} {_rank_text(rank)}")
    lines += [_restart_line(world, agreeing) for world, agreeing in found.agreeing.items()]
    for each in found.leftovers:
        size = display_size(each.allocated_bytes)
        lines.append(f"  leftover   {printable(each.name)}, {size} on disk")
    lines += [f"  not ours   {printable(name)}" for name in found.others]
    if not found.ranks:
        lines.append("  empty      no rank files: persist=False, or all were removed")
    if found.live:
        lines.append("  live       figures are those of the record files, which lag behind memory")
    return lines


def _restart_line(world: int, agreeing: int | None) -> str:
    if agreeing is None:
        return f"  restart    would recover nothing: not all of {world} ranks can be read"
    which = "" if world == 1 else f", those with the same key on all {world} ranks"
    return f"  restart    would recover {count_text(agreeing, 'block')}{which}"


def _identity_text(identity: dict[str, Any] | None) -> str:
    if identity is None:
        return "unknown: kvdisk.json is missing or damaged"
    parts = []
    for name, label in _IDENTITY_LABELS.items():
        value = identity.get(name)
        if value not in ("", None, {}):
            parts.append(f"{label} {value if isinstance(value, str) else json.dumps(value)}")
    return printable(", ".join(parts))


def _rank_text(rank: RankSurvey) -> str:
    parts = []
    if rank.header is not None:
        header = rank.header
        share = f" ({rank.used / header.slot_count:.0%})"
        parts = [
            f"{count_text(header.slot_count, 'slot')} of {display_size(header.slot_bytes)}",
            f"{rank.used} used{share}",
        ]
        if rank.void:
            parts.append(f"{rank.void} of an earlier epoch")
        if rank.damaged:
            parts.append(f"{count_text(rank.damaged, 'damaged record')}")
    parts.append(f"{display_size(rank.allocated_bytes)} on disk")
    if rank.created_s is not None:
        parts.append(f"begun {time_text(rank.created_s)}")
    parts += [f"written {time_text(rank.modified_s)}", str(rank.lock)]
    if rank.problem:
        parts.append(f"PROBLEM: {rank.problem}")
    return ", ".join(parts)


# For programs ------------------------------------------------------------------------------------


def _document(path: Path, found: list[NamespaceSurvey]) -> dict[str, Any]:
    return {
        "kvdisk": __version__,
        "path": str(path),
        "namespaces": [
            {
                "directory": str(each.directory),
                "identity": each.identity,
                "live": each.live,
                "ranks": [_rank_document(rank) for rank in each.ranks],
                "slots_recoverable": {str(world): n for world, n in each.agreeing.items()},
                "leftovers": [
                    {"name": left.name, "allocated_bytes": left.allocated_bytes}
                    for left in each.leftovers
                ],
                "others": each.others,
            }
            for each in found
        ],
    }


def _rank_document(rank: RankSurvey) -> dict[str, Any]:
    header = rank.header
    return {
        "rank": rank.rank,
        "world_size": rank.world_size,
        "slots": header.slot_count if header else None,
        "slot_bytes": header.slot_bytes if header else None,
        "epoch": header.epoch if header else None,
        "fingerprint": header.fingerprint.hex() if header else None,
        "used": rank.used,
        "void": rank.void,
        "damaged": rank.damaged,
        "size_bytes": sum(each.size_bytes for each in (rank.data, rank.records) if each),
        "allocated_bytes": rank.allocated_bytes,
        "begun_s": rank.created_s,
        "written_s": rank.modified_s,
        "held": rank.lock.held,
        "holder": rank.lock.holder,
        "problem": rank.problem,
    }
