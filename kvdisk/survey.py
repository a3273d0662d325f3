"""What lies in a cache's directories: namespaces, their identity, their rank files, what they hold.

It reads records and no payloads, changes nothing and may run beside a live server. A live server's
figures are those of its record file, which lags behind its memory.

Ranks are read side by side, a stretch of slots at a time, so that a cache of any size takes a few
megabytes to look at.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdisk.errors import DeviceError
from kvdisk.identity import (
    NAMESPACE_FILE,
    NAMESPACE_FILE_BYTES_MAX,
    is_namespace_name,
    parse_identity,
)
from kvdisk.looking import (
    Buffer,
    FileReader,
    Lock,
    lock_of,
    open_directory,
    open_plain,
    require_directory,
)
from kvdisk.ours import RANK_FILE, contents_of, namespaces_in
from kvdisk.rank_header import HEADER_BYTES, RECORD_BYTES, RankHeader, parse_header
from kvdisk.slot_records import RecordState, as_records, record_states

_SLOTS_AT_ONCE: Final = 8192


@dataclass(frozen=True)
class FileFacts:
    """``allocated_bytes`` is what the file takes on the disk; times are seconds since 1970."""

    name: str
    size_bytes: int
    allocated_bytes: int
    modified_s: float


@dataclass
class RankSurvey:
    """The two files of one rank, and what the records say.

    ``problem`` says in a few words why nothing can be said about the records; "" when there is
    nothing wrong. ``used`` counts records that prove themselves, ``void`` those of an earlier epoch
    (cleared), ``damaged`` those that prove nothing.
    """

    rank: int
    world_size: int
    data: FileFacts | None = None
    records: FileFacts | None = None
    header: RankHeader | None = None
    problem: str = ""
    lock: Lock = field(default_factory=lambda: Lock(False))
    used: int = 0
    void: int = 0
    damaged: int = 0

    @property
    def stem(self) -> str:
        return f"rank-{self.rank}-of-{self.world_size}"

    @property
    def allocated_bytes(self) -> int:
        return sum(each.allocated_bytes for each in (self.data, self.records) if each)

    @property
    def modified_s(self) -> float:
        return max((each.modified_s for each in (self.data, self.records) if each), default=0.0)

    @property
    def created_s(self) -> float | None:
        """When the file was begun: a new file takes its epoch from the clock."""
        return self.header.epoch / 1e9 if self.header else None


@dataclass(frozen=True)
class NamespaceSurvey:
    """``identity`` is what kvdisk.json says, None when it is missing or not to be believed.

    ``agreeing`` has, for each world size, how many slots hold the same key on all of its ranks:
    what a restart would recover; None when a rank is missing. ``others`` are names that are none
    of ours.
    """

    directory: Path
    identity: dict[str, Any] | None
    ranks: list[RankSurvey]
    agreeing: dict[int, int | None]
    leftovers: list[FileFacts]
    others: list[str]

    @property
    def live(self) -> bool:
        return any(rank.lock.held for rank in self.ranks)


def find_namespaces(path: Path) -> list[Path]:
    """``path`` itself when it holds rank files or has a namespace's name, else those below it.

    Raises OSError when ``path`` cannot be listed.
    """
    with ExitStack() as stack:
        folder = open_directory(path)
        stack.callback(os.close, folder)
        if is_namespace_name(path.name) or any(map(RANK_FILE.fullmatch, os.listdir(folder))):
            return [path]
        return [path / name for name in namespaces_in(folder)[0]]


def survey_namespace(directory: Path) -> NamespaceSurvey:
    """Look at one namespace. Raises OSError when it cannot be listed."""
    with ExitStack() as stack:
        folder = open_directory(directory)
        stack.callback(os.close, folder)
        ranks, leftovers, others = _list(folder)
        worlds = sorted({rank.world_size for rank in ranks})
        agreeing = {
            world: _survey_world(folder, [rank for rank in ranks if rank.world_size == world])
            for world in worlds
        }
        return NamespaceSurvey(
            directory, read_identity(folder), ranks, agreeing, leftovers, sorted(others)
        )


def read_identity(folder: int) -> dict[str, Any] | None:
    """What the ``kvdisk.json`` in a directory says, whoever owns it; None when not believable."""
    try:
        file = open_plain(folder, NAMESPACE_FILE)
    except OSError:
        return None
    with os.fdopen(file, "rb") as opened:
        try:
            return parse_identity(opened.read(NAMESPACE_FILE_BYTES_MAX))
        except OSError:
            return None


def _list(folder: int) -> tuple[list[RankSurvey], list[FileFacts], list[str]]:
    """Ranks in order, with the facts of their files; leftovers; names that are none of ours."""
    ranks: dict[tuple[int, int], RankSurvey] = {}
    leftovers, others = [], []
    contents = contents_of(folder)
    for name in sorted([*contents.ours, *contents.leftovers, *contents.others]):
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        matched = RANK_FILE.fullmatch(name)
        facts = FileFacts(name, status.st_size, status.st_blocks * 512, status.st_mtime)
        if not stat.S_ISREG(status.st_mode):
            others.append(name)
        elif matched:
            world, rank = int(matched[2]), int(matched[1])
            survey = ranks.setdefault((world, rank), RankSurvey(rank, world))
            if matched[3] == "kv":
                survey.data = facts
            else:
                survey.records = facts
        elif name in contents.leftovers:
            leftovers.append(facts)
        elif name in contents.others:
            others.append(name)
    return [ranks[key] for key in sorted(ranks)], leftovers, others


def _survey_world(folder: int, ranks: Sequence[RankSurvey]) -> int | None:
    """Fill in what the records of one world's ranks say; how many slots agree, if all are here."""
    with ExitStack() as stack:
        readers = []
        for rank in ranks:
            reader = _open_records(folder, rank)
            if reader is not None:
                stack.callback(reader.close)
                readers.append((rank, reader))
        agreeing = 0
        slots = max((rank.header.slot_count for rank, _ in readers if rank.header), default=0)
        buffer = Buffer(_SLOTS_AT_ONCE * RECORD_BYTES)
        for first in range(0, slots, _SLOTS_AT_ONCE):
            agreeing += _survey_stretch(readers, first, buffer)
    complete = len(readers) == ranks[0].world_size and not any(rank.problem for rank in ranks)
    return agreeing if complete else None


def _open_records(folder: int, rank: RankSurvey) -> FileReader | None:
    """A reader of the rank's record file; header, lock and problem are noted."""
    if rank.data is not None:
        with suppress(OSError):
            file = open_plain(folder, rank.data.name)
            rank.lock = lock_of(file)
            os.close(file)
    else:
        rank.problem = "its data file is missing"
    if rank.records is None:
        rank.problem = "its record file is missing"
        return None
    try:
        reader = FileReader(folder, rank.records.name)
    except OSError as error:
        rank.problem = f"its record file cannot be opened ({error.strerror})"
        return None
    header = read_header(reader)
    if isinstance(header, str):
        rank.problem = header
        reader.close()
        return None
    if not rank.lock.held:
        rank.lock = lock_of(reader.file)
    rank.header = header
    return reader


def read_header(reader: FileReader) -> RankHeader | str:
    """The header of an open record file, or in a few words why there is none."""
    try:
        return parse_header(reader.read(Buffer(HEADER_BYTES), HEADER_BYTES, 0).tobytes())
    except OSError as error:
        return f"its header cannot be read ({error.strerror})"


def _survey_stretch(
    readers: Sequence[tuple[RankSurvey, FileReader]], first: int, buffer: Buffer
) -> int:
    """Count the states of each rank's records of a stretch of slots; how many slots agree."""
    same: npt.NDArray[np.bool_] | None = None
    keys: npt.NDArray[np.uint8] | None = None
    for rank, reader in readers:
        valid, rank_keys = _read_stretch(rank, reader, first, buffer)
        if same is None or keys is None:
            same, keys = valid, rank_keys
            continue
        count = min(len(same), len(valid))
        same, keys = same[:count] & valid[:count], keys[:count]
        same &= (keys == rank_keys[:count]).all(axis=1)
    return 0 if same is None else int(np.count_nonzero(same))


def _read_stretch(
    rank: RankSurvey, reader: FileReader, first: int, buffer: Buffer
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]:
    """Which records of a stretch are valid, and their keys with the length as a last byte."""
    assert rank.header is not None
    slots = max(0, min(rank.header.slot_count - first, _SLOTS_AT_ONCE))
    try:
        offset = HEADER_BYTES + first * RECORD_BYTES
        raw = reader.read(buffer, slots * RECORD_BYTES, offset)
    except OSError as error:
        rank.problem = f"its records cannot be read ({error.strerror})"
        raw = buffer.bytes[:0]
    states = record_states(raw, first, rank.header.epoch)
    rank.used += int(np.count_nonzero(states == RecordState.VALID))
    rank.void += int(np.count_nonzero(states == RecordState.VOID))
    rank.damaged += int(np.count_nonzero(states == RecordState.DAMAGED))
    records = as_records(raw)
    keys = np.concatenate([records["key"], records["key_length"][:, np.newaxis]], axis=1)
    return states == RecordState.VALID, keys


def look_into(path: Path) -> list[NamespaceSurvey]:
    """``survey`` for a command: everything at once, trouble as an error that says what to do."""
    require_directory(path)
    try:
        return list(survey(path.absolute()))
    except OSError as error:
        raise DeviceError.from_os_error(
            error, "look into", error.filename or path, "Run it as the cache's user."
        ) from error


def survey(path: Path) -> Iterator[NamespaceSurvey]:
    """Every namespace that ``path`` holds, one by one."""
    for directory in find_namespaces(path):
        with suppress(FileNotFoundError):  # removed meanwhile
            yield survey_namespace(directory)
