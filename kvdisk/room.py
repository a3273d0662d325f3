"""Whether the disks have room for a tier, asked before anything is made or allocated.

A capacity that is a slip of the pen takes gigabytes of memory for its keys alone, so the error that
matters must come first. What always holds: files are only looked at.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvdisk.config import TierConfig
from kvdisk.errors import DeviceError
from kvdisk.identity import Identity
from kvdisk.placement import Placement
from kvdisk.rank_header import file_names, record_file_bytes
from kvdisk.reserve import no_room, room_for


def require_room(
    config: TierConfig, identity: Identity, placement: Placement, rank: int, world_size: int
) -> None:
    """Raise DeviceError when no path has room for the rank's files.

    Where only some have, opening leaves the others out. What another process takes meanwhile shows
    when the space is reserved.
    """
    size_bytes = placement.slots_per_path * placement.slot_bytes
    size_bytes += record_file_bytes(placement.slots_per_path)
    shortages = []
    for path in config.paths:
        directory = path / identity.namespace
        names = file_names(rank, world_size)
        shortage = _shortage(path, [directory / name for name in names], size_bytes)
        if shortage is None:
            return
        shortages.append(shortage)
    raise shortages[0]


def _shortage(path: Path, files: list[Path], size_bytes: int) -> DeviceError | None:
    """None where there is room, and where opening will say what else is wrong."""
    there_bytes = 0
    for file in files:
        with suppress(OSError):
            there_bytes += os.lstat(file).st_blocks * 512
    # Not Path.exists, which raises where a mount is dead or a directory above is not ours.
    place = path if os.path.exists(path) else path.parent
    with suppress(OSError):
        answer = os.statvfs(place)
        if not room_for(size_bytes - there_bytes, answer):
            return no_room(path, size_bytes - there_bytes, size_bytes, answer)
    return None
