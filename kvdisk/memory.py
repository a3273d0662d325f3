"""How much memory this process may still take, so that a too large request fails at open.

Pinned memory cannot be swapped or reclaimed: asking for more than there is does not fail, it gets
the serving engine killed some minutes later. So the bounce ring, and what every slot takes, are
compared with the smallest of MemAvailable and what every control group above the process leaves,
before anything is allocated.

What always holds: files are only read; a file that is missing or odd is no limit, not an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdisk.errors import ConfigError
from kvdisk.units import display_size

# The most that a slot takes, while a full tier opens (510 bytes measured, and 350 afterwards). In a
# worker: its record (128), its use in each shard, and what the restart has found there (90). In the
# scheduler: key, state and turn, by eviction policy, and as much again while it takes that over.
WORKER_BYTES_PER_SLOT: Final = 240
SCHEDULER_BYTES_PER_SLOT: Final = {"lru": 270, "s3fifo": 335}


@dataclass(frozen=True)
class MemoryHeadroom:
    """``available_bytes`` can still be taken; ``source`` says in words which limit that is."""

    available_bytes: int
    source: str


def memory_headroom(root: Path = Path("/")) -> MemoryHeadroom | None:
    """The tightest limit on this process, or None where the system tells nothing.

    ``root`` is where ``proc`` and ``sys`` are found; tests give a made-up tree.
    """
    limits = []
    available = _table(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        limits.append(MemoryHeadroom(available * 1024, "MemAvailable of this machine"))
    for directory, version in _control_groups(root):
        left = _control_group_left(directory, version)
        if left is not None:
            name = "/" + str(directory.relative_to(root))
            limits.append(MemoryHeadroom(left, f"what the control group {name} leaves"))
    return min(limits, key=lambda limit: limit.available_bytes, default=None)


def require_memory(request_bytes: int, what: str, root: Path = Path("/")) -> None:
    """Raise ConfigError when ``request_bytes`` cannot be had. Allocates nothing."""
    headroom = memory_headroom(root)
    if headroom is None or request_bytes <= headroom.available_bytes:
        return
    raise ConfigError(
        f"{what} asks for {display_size(request_bytes)} of pinned memory, but {headroom.source} "
        f"is {display_size(headroom.available_bytes)}. Make {what} smaller, or give the process "
        "more memory."
    )


def require_slot_memory(
    slots: int, bytes_per_slot: int, ring_bytes: int = 0, root: Path = Path("/")
) -> None:
    """Raise ConfigError when ``slots``, beside a ring, take more than can be had."""
    headroom = memory_headroom(root)
    slots_bytes = slots * bytes_per_slot
    if headroom is None or slots_bytes + ring_bytes <= headroom.available_bytes:
        return
    beside = f", beside {display_size(ring_bytes)} for the ring" if ring_bytes else ""
    raise ConfigError(
        f"capacity: keys and records of {slots} slots take up to {display_size(slots_bytes)} of "
        f"memory{beside}, but {headroom.source} is {display_size(headroom.available_bytes)}. Make "
        "capacity smaller or blocks larger (more tokens a block), or give the process more memory."
    )


def _control_groups(root: Path) -> list[tuple[Path, int]]:
    """Directories of the memory controller for this process and all its ancestors, with version.

    Inside a container the path in /proc/self/cgroup may be the host's and not exist here; then the
    mount's own top is the container's group, and the walk up ends there in any case.
    """
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" and number == "0":
            top, version = root / "sys/fs/cgroup", 2
        elif "memory" in controllers.split(","):
            top, version = root / "sys/fs/cgroup/memory", 1
        else:
            continue
        group = top / path.lstrip("/")
        while group != top and top in group.parents:
            found.append((group, version))
            group = group.parent
        found.append((top, version))
    return found


def _control_group_left(directory: Path, version: int) -> int | None:
    """Limit less use, where page cache does not count as use: the kernel gives it back."""
    names = (
        ("memory.max", "memory.current", "")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    limit, used = _number(directory / names[0]), _number(directory / names[1])
    if limit is None or used is None:
        return None
    stat = _table(directory / "memory.stat")
    cache = stat.get(f"{names[2]}inactive_file", 0) + stat.get(f"{names[2]}active_file", 0)
    return max(0, limit - max(0, used - cache))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None


def _table(path: Path) -> dict[str, int]:
    """``name value [unit]`` or ``name: value [unit]``, a line each."""
    table = {}
    for line in _lines(path):
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdecimal():
            table[words[0]] = int(words[1])
    return table
