"""One rank's files: slots in ``rank-R-of-N.kv``, a header and slot records in ``.idx``.

Opening is where everything that can be refused is refused: unsafe directories, planted files, a
second user of the same rank, missing space, missing O_DIRECT. After that the native engine gets
two descriptors and nothing here touches the data.

What always holds:
    * Both files are locked before anything about them is changed; the names belong to the holder.
    * A file is resized or emptied only when it carries our mark: the header page of a record file,
      an extended attribute on a data file. Anything else with our name is renamed to
      ``.damaged-N``, never deleted, and the start is cold.
    * Mode and space are settled when ``create_or_open`` returns. When it raises, or ``undo`` is
      called after it, what it made is gone again, and a cache that was there is as it was: what
      cannot be undone is left to ``finish``, when nothing else can fail any more.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvdisk.config import Direct
from kvdisk.direct_mode import DirectMode, choose_mode, set_direct, without_direct
from kvdisk.errors import TRANSIENT_ERRORS, ConfigError, DeviceError
from kvdisk.private_files import (
    open_locked,
    open_private_directory,
    put_back,
    set_aside,
    shrink_back,
    undo_create,
    unlink_if_same,
)
from kvdisk.rank_header import (
    FINGERPRINT_BYTES,
    HEADER_BYTES,
    RankHeader,
    file_names,
    parse_header,
    record_file_bytes,
    slots_within,
)
from kvdisk.rank_pages import clear_records, disk_trouble, read_page, write_header, write_page
from kvdisk.reserve import reserve

__all__ = ["RankFile", "record_file_bytes", "slots_within"]

_SLOT_ALIGNMENT: Final = 4096
_DATA_MARK: Final = "user.kvdisk"
_DATA_MARK_VALUE: Final = b"KVDISKKV"

_log = logging.getLogger("kvdisk")


@dataclass(eq=False)
class RankFile:
    """The open, locked files of one rank. Close it after the engine that uses its descriptors.

    ``data_fd`` holds ``slot_count`` slots of ``slot_bytes`` from offset 0; ``record_fd`` holds
    their records from ``record_offset``. Both are opened with O_DIRECT when ``direct``;
    ``alignment`` (bytes) then holds for offsets, lengths and memory, and ``reason`` says in a
    sentence why or why not. ``epoch`` is what valid slot records carry. ``notes`` tells what was
    dropped or could not be had. The lock ends with the last copy of the descriptors.
    """

    data_path: Path
    record_path: Path
    data_fd: int
    record_fd: int
    header: RankHeader
    mode: DirectMode
    notes: tuple[str, ...] = ()
    record_offset: int = HEADER_BYTES
    _folder: int = field(default=-1, repr=False)
    _made: ExitStack = field(default_factory=ExitStack, repr=False)
    _finish: Callable[[RankHeader], None] | None = field(default=None, repr=False)
    _header_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def create_or_open(
        cls,
        directory: Path,
        rank: int,
        world_size: int,
        slot_count: int,
        slot_bytes: int,
        fingerprint: bytes,
        direct: Direct = "auto",
        persist: bool = True,
        finish: bool = True,
    ) -> RankFile:
        """Open the files of ``rank`` in ``directory``, making or resizing them as needed.

        ``slot_bytes`` is a multiple of 4096; ``fingerprint`` (32 bytes) stands for everything that
        must match for stored bytes to be reusable. Slots that survive a change of ``slot_count``
        keep their records. With ``persist=False`` the names are removed and nothing earlier is
        used; then a second opener is not refused, but has files of its own. ``finish=False``: the
        caller calls ``finish`` before anything is stored.

        Raises ConfigError (unsafe or senseless), BusyError (in use), DeviceError (no space, no
        O_DIRECT where required, disk trouble).
        """
        wanted = _wanted_header(rank, world_size, slot_count, slot_bytes, fingerprint)
        place = Path(os.path.abspath(directory))
        with disk_trouble("open", place), ExitStack() as descriptors, ExitStack() as made:
            opening = _Opening(place, wanted, direct, descriptors, made)
            opening.find_what_is_there()
            if not persist:
                opening.make_nameless()
            opening.settle()
            if finish:
                opening.finish(opening.header)
            for note in opening.notes:
                _log.warning("%s", note)
            descriptors.pop_all()
            made_here = made.pop_all()
        return cls(
            data_path=opening.data.path,
            record_path=opening.record.path,
            data_fd=opening.data.file,
            record_fd=opening.record.file,
            header=opening.header,
            mode=opening.mode,
            notes=tuple(opening.notes),
            _folder=opening.folder,
            _made=made_here,
            _finish=None if finish else opening.finish,
        )

    @property
    def direct(self) -> bool:
        return self.mode.direct

    @property
    def alignment(self) -> int:
        return self.mode.alignment

    @property
    def reason(self) -> str:
        return self.mode.reason

    @property
    def file_system(self) -> str:
        return self.mode.file_system

    @property
    def epoch(self) -> int:
        return self.header.epoch

    @property
    def slot_count(self) -> int:
        return self.header.slot_count

    @property
    def slot_bytes(self) -> int:
        return self.header.slot_bytes

    @property
    def reserved_bytes(self) -> int:
        """What both files take on the disk, apart from the file system's own bookkeeping."""
        return self.slot_count * self.slot_bytes + record_file_bytes(self.slot_count)

    def bump_epoch(self, clears: int) -> int:
        """Make every record written so far void, durably: also after a kill or a power cut.

        ``clears`` is the number of the clear that this is, or catches up with.
        Returns the new epoch. Raises DeviceError when the disk did not take it; then nothing may be
        considered invalidated.
        """
        assert not self.closed, "bump_epoch on a closed rank file"
        with self._header_lock:
            header = replace(self.header, epoch=self.header.epoch + 1, clears=clears)
            write_header(self.record_fd, self.record_path, header)
            # A header that the disk took and lost would bring back what was cleared.
            with disk_trouble("read header back", self.record_path):
                if read_page(self.record_fd, 0) != header.pack():
                    raise OSError(errno.EIO, "it is not what was written")
            self.header = header
        return header.epoch

    def begin_probe(self, *, write: bool) -> HeaderProbe:
        """What reads the header, or also writes it again. Raises OSError without a descriptor."""
        assert not self.closed, "begin_probe on a closed rank file"
        return HeaderProbe(self, os.dup(self.record_fd), write)

    def unlink(self) -> None:
        """Remove the names, if they are still those of these files. The space goes at close."""
        assert not self.closed, "unlink on a closed rank file"
        unlink_if_same(self._folder, self.data_path.name, self.data_fd)
        unlink_if_same(self._folder, self.record_path.name, self.record_fd)

    def finish(self) -> None:
        """Give up what earlier runs had and this one has no use for. Raises DeviceError."""
        assert not self.closed, "finish on a closed rank file"
        with self._header_lock:
            if self._finish is not None:
                self._finish(self.header)
            self._finish = None

    def undo(self) -> None:
        """Remove what opening made: the open fails after all.

        As far as nobody else uses it and the disk lets; never raises OSError.
        """
        assert not self.closed, "undo on a closed rank file"
        self._made.close()

    @property
    def closed(self) -> bool:
        return self._folder < 0

    def close(self) -> None:
        """Close the descriptors and, unless an engine still has copies, give up the lock."""
        files = (self.record_fd, self.data_fd, self._folder)
        self.record_fd = self.data_fd = self._folder = -1
        for file in files:
            if file >= 0:
                os.close(file)

    def __enter__(self) -> RankFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HeaderProbe:
    """A small real I/O: 0 when the disk does it, else an errno. To be called once, or closed.

    The call may hang as long as the disk does, so make it on a thread that nobody waits for. It has
    a descriptor of its own: closing the file meanwhile is safe.
    """

    def __init__(self, file: RankFile, descriptor: int, write: bool) -> None:
        self._file = file
        self._descriptor = descriptor
        self._write = write

    def __call__(self) -> int:
        try:
            with self._file._header_lock:
                if parse_header(read_page(self._descriptor, 0)) != self._file.header:
                    return errno.EIO
                if self._write:
                    write_page(self._descriptor, self._file.header.pack(), 0)
        except OSError as error:
            return error.errno or errno.EIO
        finally:
            self.close()
        return 0

    def close(self) -> None:
        """Give the descriptor back, of a probe that is not made after all. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _wanted_header(
    rank: int, world_size: int, slot_count: int, slot_bytes: int, fingerprint: bytes
) -> RankHeader:
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank={rank} of world_size={world_size}: ranks count from 0; use the engine's global "
            "rank, not a device index."
        )
    if slot_count < 1:
        raise ConfigError(
            f"slot_count={slot_count}: not even one slot fits; raise capacity to more than a "
            "block for every rank."
        )
    if slot_bytes < 1 or slot_bytes % _SLOT_ALIGNMENT:
        raise ConfigError(f"slot_bytes={slot_bytes}: must be a multiple of {_SLOT_ALIGNMENT}.")
    if len(fingerprint) != FINGERPRINT_BYTES:
        raise ConfigError(f"fingerprint: {len(fingerprint)} bytes, not {FINGERPRINT_BYTES}.")
    # A fresh epoch from the clock, so that it is none that an earlier file of this name had.
    return RankHeader(time.time_ns(), slot_bytes, slot_count, rank, world_size, fingerprint)


# Opening ----------------------------------------------------------------------------------------


@dataclass
class _File:
    path: Path
    file: int
    size_bytes: int  # as found; 0: it is new, or as good as new

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.file = -1


class _Opening:
    """The steps of ``create_or_open`` and what they have found so far.

    Unless everything succeeds ``made`` removes what was made here, then ``descriptors`` are closed.
    """

    def __init__(
        self,
        directory: Path,
        wanted: RankHeader,
        direct: Direct,
        descriptors: ExitStack,
        made: ExitStack,
    ) -> None:
        self.notes: list[str] = []
        self.header = wanted
        self.found: RankHeader | None = None
        self._former: RankHeader | None = None  # of a cache that is there, also when it is dropped
        self._nameless = False
        self._direct = direct
        self._descriptors = descriptors
        self._made = made
        self.folder = open_private_directory(directory, made)
        descriptors.callback(os.close, self.folder)
        data_name, record_name = file_names(wanted.rank, wanted.world_size)
        self.data = self._open(directory / data_name)
        self.record = self._open(directory / record_name)
        self.mode = choose_mode(directory, direct)
        self._apply_mode()

    def find_what_is_there(self) -> None:
        """Adopt, start over, or set aside. Afterwards ``found`` is the header to go on from."""
        if self.record.size_bytes:
            header = self._read_header()
            if isinstance(header, str) or _identity(header) != _identity(self.header):
                why = header if isinstance(header, str) else "it belongs to another cache or rank"
                self.record = self._replace(self.record, why)
            elif header.slot_bytes != self.header.slot_bytes:
                self._former = header
                self.notes.append(
                    f"{self.record.path}: its slots have {header.slot_bytes} bytes, now "
                    f"{self.header.slot_bytes}; its blocks were dropped"
                )
            else:
                self._former = self.found = header
        ours = self._former is not None or has_mark(self.data.file)
        if self.data.size_bytes and not ours:
            self.data = self._replace(self.data, "it has no record file and not our mark")

    def make_nameless(self) -> None:
        """Nothing survives this process, and nothing earlier is used."""
        if self.found is not None:
            self.notes.append(
                f"{self.data.path}: blocks of earlier runs were dropped: persist=False"
            )
        self.found = None
        self._nameless = True

    def settle(self) -> None:
        """Mode, space and, of new files, the header: all that leaves a cache as it is."""
        if self.found is not None:
            epoch = self.found.epoch + (0 if self.data.size_bytes else 1)
            self.header = replace(self.header, epoch=epoch, clears=self.found.clears)
        elif self._former is not None:
            self.header = replace(self.header, clears=self._former.clears)
            self._prove_mode_and_write(self._former)
        else:
            self._prove_mode_and_write(self.header)
        _set_mark(self.data.file)
        for each in (self.data, self.record):
            if each.size_bytes:
                self._made.callback(shrink_back, each.file, each.size_bytes)
            self._reserve(each)
        with disk_trouble("fsync", self.data.path.parent):
            os.fsync(self.folder)

    def finish(self, header: RankHeader) -> None:
        """What cannot be undone; ``header`` is that of now. Each step leaves files that open."""
        if self._former is not None and self.found is None:
            # Its epoch voids all records at once. Without one the data file might be nobody's.
            write_header(self.record.file, self.record.path, header)
            with disk_trouble("truncate", self.record.path):
                os.ftruncate(self.record.file, HEADER_BYTES)
            self._reserve(self.record)
        elif self.found is not None and header.slot_count < self.found.slot_count:
            clear_records(self.record.file, self.record.path, header.slot_count)
        for each in (self.record, self.data):
            # Also where the size is right: a growth that was killed may have left blocks behind it.
            with disk_trouble("truncate", each.path):
                os.ftruncate(each.file, self._size_bytes(each))
        if self.found is not None and self.found != header:
            write_header(self.record.file, self.record.path, header)
        if self._nameless:
            for each in (self.data, self.record):
                with disk_trouble("unlink", each.path):
                    unlink_if_same(self.folder, each.path.name, each.file)
        with disk_trouble("fsync", self.data.path.parent):
            os.fsync(self.folder)

    def _open(self, path: Path) -> _File:
        opened = _File(path, open_locked(self.folder, path), 0)
        self._descriptors.callback(opened.close)
        opened.size_bytes = os.fstat(opened.file).st_size
        if opened.size_bytes == 0:
            self._made.callback(undo_create, self.folder, path.name, opened.file)
        return opened

    def _replace(self, old: _File, why: str) -> _File:
        name = set_aside(self.folder, old.path)
        self._made.callback(put_back, self.folder, name, old.path.name)
        self.notes.append(f"{old.path}: {why}; set aside as {name}, starting cold")
        new = self._open(old.path)
        old.close()
        with disk_trouble("O_DIRECT", new.path):
            set_direct(new.file, self.mode.direct)
        return new

    def _apply_mode(self) -> None:
        try:
            for each in (self.data, self.record):
                set_direct(each.file, self.mode.direct)
        except OSError as error:
            self._fall_back("the file refused O_DIRECT", error)

    def _fall_back(self, what: str, error: OSError) -> None:
        path = self.record.path
        self.mode = without_direct(self.mode, self._direct, path, what, error.errno or errno.EIO)
        for each in (self.data, self.record):
            set_direct(each.file, False)

    def _read_header(self) -> RankHeader | str:
        try:
            return parse_header(read_page(self.record.file, 0))
        except OSError as error:
            if self.mode.direct and error.errno == errno.EINVAL:
                self._fall_back("the record file refused a direct read", error)
                return self._read_header()
            if error.errno in TRANSIENT_ERRORS:  # it says nothing about the file
                raise
            return f"its header cannot be read ({os.strerror(error.errno or errno.EIO)})"

    def _prove_mode_and_write(self, header: RankHeader) -> None:
        """The first write to our own file is the last word on O_DIRECT."""
        try:
            write_header(self.record.file, self.record.path, header)
        except DeviceError as error:
            if not self.mode.direct or error.errno != errno.EINVAL:
                raise
            refused = OSError(error.errno, os.strerror(error.errno))
            self._fall_back("the record file refused a direct write", refused)
            write_header(self.record.file, self.record.path, header)

    def _size_bytes(self, file: _File) -> int:
        slots = self.header.slot_count
        return record_file_bytes(slots) if file is self.record else slots * self.header.slot_bytes

    def _reserve(self, file: _File) -> None:
        zero_fill = self._direct != "require"
        note = reserve(file.file, file.path, self._size_bytes(file), zero_fill=zero_fill)
        if note is not None and f"{file.path}: {note}" not in self.notes:
            self.notes.append(f"{file.path}: {note}")


def _identity(header: RankHeader) -> tuple[int, int, bytes]:
    return header.rank, header.world_size, header.fingerprint


def has_mark(file: int) -> bool:
    """Whether an open data file is one of ours."""
    try:
        return os.getxattr(file, _DATA_MARK) == _DATA_MARK_VALUE
    except OSError:
        return False


def _set_mark(file: int) -> None:
    with suppress(OSError):  # not every file system has attributes; then the file is set aside
        os.setxattr(file, _DATA_MARK, _DATA_MARK_VALUE)
