"""What an operator may set, checked once.

Every option is a field of ``TierConfig``. An option's name is the field's name without its unit
(``capacity`` sets ``capacity_bytes``), since an option carries its unit in the value. A config that
exists is valid: every range was checked when it was made, an unknown option is an error, and
nothing is silently adjusted. ``effective()`` is what to log, and can be given back to
``from_mapping``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from kvdisk.errors import ConfigError
from kvdisk.memory import require_memory
from kvdisk.units import display_size, format_duration, format_size, parse_duration, parse_size

Direct = Literal["auto", "require", "off"]
Backend = Literal["auto", "uring", "threads"]
Eviction = Literal["lru", "s3fifo"]
Admission = Literal["all", "second-touch"]
PartialLoads = Literal["auto", "on", "off"]

_MIB: Final = 1024**2
_PAGE_BYTES: Final = 4096
_MS: Final = 10**6
_SECOND: Final = 10**9
_HOUR: Final = 3600 * _SECOND

# What people coming from elsewhere type, and what it is called here.
_SYNONYMS: Final = {
    "root": "path",
    "dir": "path",
    "directory": "path",
    "paths": "path",
    "size": "capacity",
    "limit": "capacity",
    "max_size": "capacity",
    "depth": "iodepth",
    "queue_depth": "iodepth",
    "o_direct": "direct",
    "use_direct_io": "direct",
    "ioengine": "backend",
    "engine": "backend",
    "timeout": "load_deadline",
    "buffer": "ring",
    "buffers": "ring",
    "policy": "eviction",
    "eviction_policy": "eviction",
}


_CHOICE: Final = {"kind": "choice", "least": None, "most": None}


def _option(
    kind: str, default: object, least: float | None = None, most: float | None = None
) -> Any:
    """A field with its kind and its inclusive range. Units of the range are those of the field."""
    return field(default=default, metadata={"kind": kind, "least": least, "most": most})


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """The disk tier's settings. Sizes in bytes, times in nanoseconds, all exact integers.

    Construct it from typed values, or with ``from_mapping`` from what an operator wrote. Both raise
    ConfigError, whose text says what to change.

    paths
        Directories for the rank files, absolute, usually one per disk; shards take turns on them.
    capacity_bytes
        The most that data and slot records together take on all paths, for all ranks that share
        this configuration; each rank gets an equal part.
    direct
        O_DIRECT: "auto" probes and falls back to the page cache, "require" makes that an error,
        "off" never uses it.
    backend
        "auto" takes io_uring where it is allowed and threads elsewhere; a name makes it required.
    iodepth
        Requests in flight per shard and direction.
    store_depth_beside_loads
        How many full buffers of stores a shard has in flight while loads are about and for a second
        after, so that a load waits behind little; without loads ``iodepth`` alone bounds them.
    ring_bytes
        Pinned host memory for all bounce buffers of the process, over all shards.
    merge_bytes
        Neighbouring slots of one transfer are read or written together up to this many bytes.
    load_reserve
        Share of the ring that stores never take, 0 to 0.9.
    store_queue_bytes
        Stores beyond this many queued bytes are refused at once. What waits takes no memory of the
        tier's: it stays where it is.
    load_deadline_ns, store_deadline_ns
        A row without an answer by then has failed, and its buffer is quarantined.
    store_wait_ns
        A store that finds no bounce buffer within this time is dropped, so that the serving
        engine's blocks are not held by a slow disk. Of a device, from when its blocks are written.
    shards
        Engine threads per path, each with its own ring and its own slots.
    eviction
        Which block goes when room is needed: "lru" (a prefix's tail before its head) or "s3fifo"
        (blocks used once go first).
    admission
        Which blocks are stored: "all", or "second-touch", those offered for the second time.
    write_budget_bytes
        Store no more than this many bytes a day, over all ranks; 0 is no limit.
    partial_loads
        Whether a serving engine's adapter loads a part of a hit and lets the GPU compute the rest
        where both together are faster: "on" as the measured rates say, "auto" only where that gains
        something worth while, "off" never.
    evict_waiting_last
        Whether a serving engine's adapter has what waiting requests will need evicted last from the
        engine's own caches, and not for new blocks that nobody waits for.
    persist
        Keep blocks for the next start. When false the files are unlinked as soon as they are open.
    """

    paths: tuple[Path, ...] = _option("paths", ())
    capacity_bytes: int = _option("size", 0, _MIB, 2**62)
    direct: Direct = field(default="auto", metadata=_CHOICE)
    backend: Backend = field(default="auto", metadata=_CHOICE)
    iodepth: int = _option("count", 32, 1, 1024)
    store_depth_beside_loads: int = _option("count", 2, 1, 1024)
    ring_bytes: int = _option("pages", 256 * _MIB, _MIB, 1024 * 1024 * _MIB)
    merge_bytes: int = _option("pages", _MIB, _PAGE_BYTES, 256 * _MIB)
    load_reserve: float = _option("share", 0.25, 0.0, 0.9)
    store_queue_bytes: int = _option("size", 2048 * _MIB, _PAGE_BYTES, 2**62)
    load_deadline_ns: int = _option("duration", 2 * _SECOND, _MS, _HOUR)
    store_deadline_ns: int = _option("duration", 10 * _SECOND, _MS, _HOUR)
    store_wait_ns: int = _option("duration", _SECOND // 2, 0, _HOUR)
    shards: int = _option("count", 1, 1, 64)
    eviction: Eviction = field(default="lru", metadata=_CHOICE)
    admission: Admission = field(default="all", metadata=_CHOICE)
    write_budget_bytes: int = _option("size", 0, 0, 2**62)
    partial_loads: PartialLoads = field(default="auto", metadata=_CHOICE)
    evict_waiting_last: bool = _option("switch", True)
    persist: bool = _option("switch", True)

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("path is missing: name a directory on a local NVMe disk.")
        if self.capacity_bytes == 0:
            raise ConfigError('capacity is missing: say how much disk to use, such as "200GiB".')
        for option, (name, metadata) in _OPTIONS.items():
            _CHECKS[metadata["kind"]](option, getattr(self, name), metadata)
        if self.ring_bytes < self.shards * _MIB:
            raise ConfigError(
                f"ring={format_size(self.ring_bytes)} is too small for shards={self.shards}: "
                f"each needs at least 1MiB, so set ring to {self.shards}MiB or more."
            )

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> TierConfig:
        """From what an operator wrote (JSON, command line): sizes and times as text with units.

        Raises ConfigError for an unknown option, naming the one that was probably meant, and for
        every value that is not exactly what the option takes.
        """
        values: dict[str, Any] = {}
        for option, value in options.items():
            if option not in _OPTIONS:
                raise ConfigError(_unknown_option(str(option)))
            name, metadata = _OPTIONS[option]
            values[name] = _PARSERS[metadata["kind"]](option, value)
        return cls(**values)

    def effective(self) -> dict[str, object]:
        """Every option with the value in force, defaults included, as ``from_mapping`` takes it."""
        return {
            option: _format(metadata["kind"], getattr(self, name))
            for option, (name, metadata) in _OPTIONS.items()
        }

    def buffers_per_shard(self, slot_bytes: int) -> tuple[int, int]:
        """``(buffer_bytes, buffer_count)`` of one shard's ring for slots of ``slot_bytes``.

        A buffer holds one slot, or as many whole slots as ``merge`` allows. Raises ConfigError when
        fewer than two buffers fit: then one load would shut out every other transfer.
        """
        buffer_bytes = max(1, self.merge_bytes // slot_bytes) * slot_bytes
        share = self.ring_bytes // self.shards
        if share // buffer_bytes < 2 and buffer_bytes > slot_bytes:
            buffer_bytes = slot_bytes
        count = share // buffer_bytes
        if count < 2:
            least = format_size(-(-2 * slot_bytes * self.shards // _PAGE_BYTES) * _PAGE_BYTES)
            raise ConfigError(
                f"ring={format_size(self.ring_bytes)} over shards={self.shards} holds {count} "
                f"blocks of {display_size(slot_bytes)}, but needs 2 per shard: set ring to {least} "
                "or more, or lower shards."
            )
        return buffer_bytes, count

    def check_memory(self, root: Path = Path("/")) -> None:
        """Raise ConfigError when the ring is more than this machine or control group can give.

        Call it just before allocating. ``root`` is where ``proc`` and ``sys`` are found.
        """
        require_memory(self.ring_bytes, f"ring={format_size(self.ring_bytes)}", root)


def _option_name(field_name: str) -> str:
    if field_name == "paths":
        return "path"
    return field_name.removesuffix("_bytes").removesuffix("_ns")


_OPTIONS: Final[dict[str, tuple[str, Mapping[str, Any]]]] = {
    _option_name(each.name): (each.name, each.metadata) for each in fields(TierConfig)
}
_CHOICES: Final = {
    "direct": get_args(Direct),
    "backend": get_args(Backend),
    "eviction": get_args(Eviction),
    "admission": get_args(Admission),
    "partial_loads": get_args(PartialLoads),
}


def _unknown_option(option: str) -> str:
    meant = _SYNONYMS.get(option.lower().replace("-", "_"))
    if meant is None:
        plain = option.lower().replace("-", "_").removesuffix("_bytes").removesuffix("_ns")
        near = difflib.get_close_matches(plain, _OPTIONS, n=1)
        meant = near[0] if near else None
    if meant is not None:
        return f'unknown option "{option}": did you mean "{meant}"?'
    return f'unknown option "{option}": the options are {", ".join(_OPTIONS)}.'


# From what an operator wrote to the field's type ------------------------------------------------


def _parse_paths(option: str, value: object) -> tuple[Path, ...]:
    if isinstance(value, (str, os.PathLike)):
        entries: list[object] = [value]
    elif isinstance(value, (list, tuple)):
        entries = list(value)
    else:
        raise ConfigError(f"{option}={value!r}: write a directory, or a list of directories.")
    paths = []
    for entry in entries:
        text = os.fspath(entry) if isinstance(entry, (str, os.PathLike)) else None
        if not isinstance(text, str) or not text.strip() or "\0" in text:
            raise ConfigError(f"{option}={entry!r}: not the name of a directory.")
        try:
            paths.append(Path(os.path.abspath(Path(text).expanduser())))
        except RuntimeError as error:
            raise ConfigError(f"{option}={text}: {error}; write the full path.") from error
    return tuple(paths)


def _parse_count(option: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        return int(value)
    raise ConfigError(f"{option}={value!r}: write a whole number.")


def _parse_share(option: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    raise ConfigError(f"{option}={value!r}: write a share between 0 and 1, such as 0.25.")


def _parse_switch(option: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return value == "true"
    raise ConfigError(f"{option}={value!r}: write true or false.")


def _parse_size(option: str, value: object) -> int:
    return parse_size(value, option)


def _parse_duration(option: str, value: object) -> int:
    return parse_duration(value, option)


def _parse_choice(option: str, value: object) -> object:
    return value


_PARSERS: Final[dict[str, Callable[[str, object], Any]]] = {
    "paths": _parse_paths,
    "size": _parse_size,
    "pages": _parse_size,
    "duration": _parse_duration,
    "count": _parse_count,
    "share": _parse_share,
    "switch": _parse_switch,
    "choice": _parse_choice,
}
_FORMATS: Final[dict[str, Callable[[Any], object]]] = {
    "paths": lambda paths: [str(path) for path in paths],
    "size": format_size,
    "pages": format_size,
    "duration": format_duration,
}


def _format(kind: str, value: Any) -> object:
    return _FORMATS[kind](value) if kind in _FORMATS else value


# Whether the field's value is allowed -----------------------------------------------------------


def _check_paths(option: str, paths: object, _: Mapping[str, Any]) -> None:
    if not isinstance(paths, tuple):
        raise ConfigError(f"{option}={paths!r}: give a tuple of pathlib.Path.")
    for path in paths:
        if not isinstance(path, Path) or not path.is_absolute() or "\0" in str(path):
            raise ConfigError(f"{option}={path!r}: must be an absolute pathlib.Path.")
    if len(set(paths)) != len(paths):
        raise ConfigError(f"{option}: the same directory is named twice.")


def _check_whole(option: str, value: object, metadata: Mapping[str, Any]) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{option}={value!r}: must be an int.")
    least, most = metadata["least"], metadata["most"]
    if not least <= value <= most:
        kind = metadata["kind"]
        given = value if value < 0 else _format(kind, value)
        low, high = _format(kind, least), _format(kind, most)
        raise ConfigError(f"{option}={given}: must be between {low} and {high}.")


def _check_pages(option: str, value: object, metadata: Mapping[str, Any]) -> None:
    _check_whole(option, value, metadata)
    if isinstance(value, int) and value % _PAGE_BYTES:
        raise ConfigError(f"{option}={format_size(value)}: must be a multiple of 4KiB.")


def _check_share(option: str, value: object, metadata: Mapping[str, Any]) -> None:
    least, most = metadata["least"], metadata["most"]
    if not isinstance(value, float) or not least <= value <= most:  # NaN fails the comparison
        raise ConfigError(f"{option}={value!r}: must be a number between {least:g} and {most:g}.")


def _check_switch(option: str, value: object, _: Mapping[str, Any]) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{option}={value!r}: must be True or False.")


def _check_choice(option: str, value: object, _: Mapping[str, Any]) -> None:
    choices = _CHOICES[option]
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(f'"{choice}"' for choice in choices)
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        raise ConfigError(f"{option}={value!r}: must be one of {known}.{hint}")


_CHECKS: Final[dict[str, Callable[[str, object, Mapping[str, Any]], None]]] = {
    "paths": _check_paths,
    "size": _check_whole,
    "pages": _check_pages,
    "duration": _check_whole,
    "count": _check_whole,
    "share": _check_share,
    "switch": _check_switch,
    "choice": _check_choice,
}
