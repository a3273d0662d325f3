"""The typed face of the native engine: batches of blocks to and from slots.

``TransferEngine`` moves blocks between the memory that a ``Layout`` describes, of the host or of a
GPU, and the slots of one rank's files. It decides nothing: which key lives in which slot is the
caller's business. What always holds:

* A call never waits for the disk; only ``wait`` and ``close`` block, both with a limit.
* A transfer that was accepted ends exactly once, within its deadline plus a small slack, with one
  status per row. Rows fail one by one; nothing raises after ``submit_*``.
* The memory of the layout is kept alive until the kernel has let go of it.

This is the only module that imports ``kvdisk._native``'s engine.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdisk import _native
from kvdisk.config import Backend, TierConfig
from kvdisk.errors import ConfigError, DeviceError, KVDiskError
from kvdisk.layout import Layout
from kvdisk.rank_file import RankFile

KEY_BYTES_MAX: Final = _native.key_bytes_max
_NS_PER_S: Final = 1_000_000_000
_ROWS_PER_BUFFER_MAX: Final = 32
_PAGE_BYTES: Final = 4096
_SECONDS_MAX: Final = 1e9

_log = logging.getLogger("kvdisk")

# Local file systems that answer a submission at once and do the work elsewhere. On any other (FUSE,
# network) the kernel may do the I/O inside the submission, so it is told not to.
_FILE_SYSTEMS_WITH_ASYNC_IO: Final = frozenset({"ext4", "ext3", "xfs", "btrfs", "f2fs", "tmpfs"})
# Where I/O is a copy by the processor. io_uring hands those to one kernel thread after the other is
# busy only when told to; writes to a file take turns there in any case, and would wait spinning.
_FILE_SYSTEMS_OF_COPIES: Final = frozenset({"tmpfs"})

# Memory that a hanging kernel may still read from or write to after close: kept for ever.
_abandoned: list[object] = []


class Direction(enum.IntEnum):
    """Which way a transfer goes; the values are the native engine's."""

    STORE = 0
    LOAD = 1


class RowStatus(enum.IntEnum):
    """How one row of a transfer ended; the values are the native engine's."""

    OK = 1
    MISS = 2  # load: the slot does not hold this key
    CORRUPT = 3  # load: not the bytes that were stored; the slot's record is dropped
    FAILED = 4  # the disk failed, see `errors`
    TIMED_OUT = 5  # the deadline passed
    REFUSED = 6  # store: no room in the ring in time, or cancelled before it began
    BUSY = 7  # the slot has another transfer in flight, or is quarantined
    COPY_FAILED = 8  # a copy to or from the block failed, or a store's event; the disk is well


FAILURES: Final = (RowStatus.FAILED, RowStatus.COPY_FAILED)  # those with an errno


@dataclass(frozen=True)
class TransferResult:
    """How a transfer ended, row by row in the order of its submission.

    ``statuses`` (uint8) are ``RowStatus`` values, ``errors`` (int32) the errno of failed rows and 0
    elsewhere. ``quarantined`` (bool) marks rows whose slot the kernel may still be reading or
    writing: do not use such a slot again until ``Events.released_slots`` names it.
    """

    transfer_id: int
    direction: Direction
    statuses: npt.NDArray[np.uint8]
    errors: npt.NDArray[np.int32]
    quarantined: npt.NDArray[np.bool_]

    @property
    def ok(self) -> bool:
        """Every row succeeded."""
        return bool((self.statuses == RowStatus.OK).all())


@dataclass(frozen=True)
class Events:
    """What has happened since the last ``poll``.

    ``source_free``: ids of stores whose blocks may be overwritten; told once per store, no later
    than its result. ``released_slots``: slots that have left quarantine.
    """

    source_free: list[int]
    finished: list[TransferResult]
    released_slots: list[int]


class Progress(NamedTuple):
    """What the disk has made of the loads of an engine's shard, or of its stores.

    ``busy_ns`` is how long anything was being moved for them; while ``busy``, that includes time
    for which no bytes have been told yet.
    """

    bytes: int = 0
    busy_ns: int = 0
    busy: bool = False


@dataclass(frozen=True)
class RestoredRecords:
    """The records that proved themselves when the engine opened, in slot order.

    ``slots`` and ``sequences`` (uint64, higher is newer) have one entry per record; ``key_rows``
    are zero-padded ``(n, 64)`` bytes, of which ``key_lengths`` (uint8) count.
    """

    slots: npt.NDArray[np.uint64]
    sequences: npt.NDArray[np.uint64]
    key_rows: npt.NDArray[np.uint8]
    key_lengths: npt.NDArray[np.uint8]

    @property
    def keys(self) -> list[bytes]:
        """The keys as they were stored, one by one."""
        pairs = zip(self.key_rows, self.key_lengths.tolist(), strict=True)
        return [bytes(row[:length]) for row, length in pairs]


def stored_key(key: bytes) -> bytes:
    """The key as slot records hold it: itself up to 64 bytes, else its 256-bit BLAKE2b digest."""
    if len(key) <= KEY_BYTES_MAX:
        return key
    return hashlib.blake2b(key, digest_size=32).digest()


class TransferEngine:
    """Moves blocks of ``layout`` to and from slots of one rank's files.

    ``data_fd`` holds ``slot_count`` slots of ``slot_bytes`` (a multiple of 4096 and ``alignment``)
    from offset 0; ``record_fd`` their records from ``record_offset``, or -1 to keep records in
    memory only. The engine works on duplicates: closing the descriptors does not disturb it.
    ``file_system`` is the data file's, as mounts(5) names it: how to submit depends on it.

    ``iodepth`` payload I/Os are in flight per shard and direction, and ``buffers`` bounce buffers
    of ``rows_per_buffer`` slots stage them; stores never take ``load_reserve`` of those. While
    loads are about, and for a second after, no more bytes of stores are in flight (per shard) than
    ``store_depth_beside_loads`` buffers hold, so that a load waits behind little.
    ``direct_stores`` and ``direct_loads`` skip the bounce copy for blocks in aligned host memory;
    a direct load gives up its deadline while the kernel may still write into the block.

    Raises ConfigError for values that cannot work and DeviceError for what the machine refuses.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        data_fd: int,
        slot_bytes: int,
        slot_count: int,
        record_fd: int = -1,
        record_offset: int = 0,
        epoch: int = 1,
        alignment: int = _PAGE_BYTES,
        backend: Backend = "auto",
        file_system: str = "ext4",
        shards: int = 1,
        iodepth: int = 32,
        buffers: int = 64,
        rows_per_buffer: int = 1,
        load_reserve: int = 8,
        store_depth_beside_loads: int = 2,
        store_queue_bytes: int = 1 << 30,
        direct_stores: bool = False,
        direct_loads: bool = False,
    ) -> None:
        options = _native.EngineOptions()
        options.set_layout(
            [(r.address, r.block_stride_bytes, r.segment_bytes) for r in layout.regions],
            layout.block_count,
        )
        settings: dict[str, object] = {
            "device": layout.device,
            "slot_bytes": slot_bytes,
            "slot_count": slot_count,
            "data_fd": data_fd,
            "record_fd": record_fd,
            "record_offset": record_offset,
            "epoch": epoch,
            "alignment": alignment,
            "backend": backend,
            "force_async": file_system not in _FILE_SYSTEMS_WITH_ASYNC_IO,
            "force_async_reads": file_system in _FILE_SYSTEMS_OF_COPIES,
            "shards": shards,
            "iodepth": iodepth,
            "buffers": buffers,
            "rows_per_buffer": rows_per_buffer,
            "load_reserve": load_reserve,
            "store_depth_beside_loads": store_depth_beside_loads,
            "store_queue_bytes": store_queue_bytes,
            "direct_stores": direct_stores,
            "direct_loads": direct_loads,
        }
        try:
            for name, value in settings.items():
                setattr(options, name, value)
            self._native = _native.Engine(options)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the engine cannot be opened: {error}.") from error
        except OSError as error:
            raise DeviceError(
                f"the engine cannot be opened: {error}", errno=error.errno or 0, op="open"
            ) from error
        except RuntimeError as error:
            raise DeviceError(f"the engine cannot be opened: {error}", op="open") from error
        self._layout = layout
        self._events: dict[int, object] = {}  # of stores whose source is not free yet
        self._closed = False
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count

    @classmethod
    def open(
        cls,
        layout: Layout,
        rank_file: RankFile,
        config: TierConfig,
        *,
        direct_stores: bool = False,
    ) -> TransferEngine:
        """An engine for one rank's files with an operator's settings.

        ``direct_stores`` where the blocks' memory and the disk's alignment allow it.
        Raises as the constructor, and ConfigError when the ring does not fit memory.
        """
        config.check_memory()
        buffer_bytes, buffers = config.buffers_per_shard(rank_file.slot_bytes)
        rows = min(buffer_bytes // rank_file.slot_bytes, _ROWS_PER_BUFFER_MAX)
        buffers = min(buffers * buffer_bytes // (rows * rank_file.slot_bytes), 0xFFFF)
        engine = cls(
            layout,
            data_fd=rank_file.data_fd,
            record_fd=rank_file.record_fd,
            record_offset=rank_file.record_offset,
            epoch=rank_file.epoch,
            slot_bytes=rank_file.slot_bytes,
            slot_count=rank_file.slot_count,
            alignment=rank_file.alignment,
            backend=config.backend,
            file_system=rank_file.file_system,
            shards=config.shards,
            iodepth=config.iodepth,
            buffers=buffers,
            rows_per_buffer=rows,
            load_reserve=reserved_buffers(buffers, config.load_reserve),
            store_depth_beside_loads=config.store_depth_beside_loads,
            store_queue_bytes=config.store_queue_bytes,
            direct_stores=direct_stores and _may_be_direct(layout, rank_file),
        )
        lost = engine._native.lost_record_pages()
        if lost:
            text = "%s: %d pages of records are lost to bad sectors: their blocks were dropped"
            _log.warning(text, rank_file.record_path, lost)
        return engine

    # --- moving blocks

    def submit_store(
        self,
        keys: Sequence[bytes],
        slots: npt.ArrayLike,
        block_ids: npt.ArrayLike,
        *,
        timeout_s: float | None = None,
        start_within_s: float | None = None,
        event: Any = 0,
    ) -> int | None:
        """Store block ``block_ids[i]`` as ``keys[i]`` in ``slots[i]``; returns an id.

        None: refused, because the store queue is full; nothing was begun. Where it has room for
        some, the rows behind those end as REFUSED. ``start_within_s``: a row that found no bounce
        buffer by then ends as REFUSED. ``event`` is what the source must wait
        for: on a GPU a recorded ``torch.cuda.Event`` or a raw CUevent, which must not be recorded
        again before the source is free; for host memory a file descriptor that becomes readable (an
        eventfd); 0 is nothing. The blocks must stay unchanged until ``Events.source_free`` names
        the id.

        Raises ValueError for rows out of range and KVDiskError on a closed engine.
        """
        transfer_id = self._submit(
            Direction.STORE, keys, slots, block_ids, timeout_s, start_within_s, _handle(event)
        )
        if transfer_id is not None and not isinstance(event, int):
            self._events[transfer_id] = event  # the engine asks it until the source is free
        return transfer_id

    def submit_load(
        self,
        keys: Sequence[bytes],
        slots: npt.ArrayLike,
        block_ids: npt.ArrayLike,
        *,
        timeout_s: float | None = None,
        event: int = 0,
    ) -> int:
        """Load ``keys[i]`` from ``slots[i]`` into block ``block_ids[i]``; returns an id.

        A load is never refused. A row whose status is not OK leaves its block's content undefined.
        ``event``, on a GPU: a raw CUevent, recorded behind all that still uses the blocks; they are
        written after it. It must outlive the load. Raises as ``submit_store``.
        """
        transfer_id = self._submit(Direction.LOAD, keys, slots, block_ids, timeout_s, None, event)
        assert transfer_id is not None
        return transfer_id

    def _submit(
        self,
        direction: Direction,
        keys: Sequence[bytes],
        slots: npt.ArrayLike,
        block_ids: npt.ArrayLike,
        timeout_s: float | None,
        start_within_s: float | None,
        event: int,
    ) -> int | None:
        self._require_open()
        packed, lengths = _pack(keys)
        transfer_id = self._native.submit(
            int(direction),
            _indices(block_ids),
            _indices(slots),
            packed,
            lengths,
            _nanoseconds(timeout_s),
            _nanoseconds(start_within_s),
            event,
        )
        return transfer_id or None

    def cancel_waiting(self, transfer_id: int) -> None:
        """End as REFUSED what has not begun of a store; what has begun goes on."""
        self._require_open()
        self._native.cancel_waiting(transfer_id)

    def end_within(self, timeout_s: float) -> None:
        """Everything under way, and all that may still come, ends by then. Never waits; idempotent.

        Unlike ``close``, this leaves the engine at work: it tells later which slots its disk has
        released.
        """
        self._native.end_within(_nanoseconds(timeout_s))

    def poll(self) -> Events:
        """What has happened since the last call; never blocks. Also after ``close``."""
        source_free, finished, released = self._native.poll()
        if self._events:
            for transfer_id in source_free:
                self._events.pop(transfer_id, None)
        results = [
            TransferResult(transfer_id, Direction(direction), statuses, errors, held.view(np.bool_))
            for transfer_id, direction, statuses, errors, held in finished
        ]
        return Events(source_free, results, released)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block, without the GIL, until ``poll`` has something; False when the time is over."""
        return bool(self._native.wait(_nanoseconds(timeout_s)))

    def fileno(self) -> int:
        """A descriptor that is readable while ``poll`` has something to give, for selectors."""
        return int(self._native.event_fd())

    # --- looking at it

    def take_restored(self) -> RestoredRecords:
        """The records found valid at open. Given once; empty afterwards."""
        slots, sequences, _, rows, lengths = self._native.take_restored()
        return RestoredRecords(slots, sequences, rows, lengths)

    def stats(self) -> dict[str, Any]:
        """Counters, histogram summaries (nanoseconds) and occupancy, as plain numbers and text."""
        stats: dict[str, Any] = self._native.stats()
        return stats

    def progress(self, direction: Direction) -> list[Progress]:
        """What each shard's disk has made of loads or stores so far. Never waits."""
        return [Progress(*each) for each in self._native.progress(int(direction))]

    def reset_stats(self) -> None:
        """Set the counters and histograms to zero."""
        self._native.reset_stats()

    # --- ending it

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self, timeout_s: float = 5.0) -> int:
        """End everything: drain until the limit, then time out what is left. Idempotent.

        Returns how many I/Os a hanging disk forced to abandon; their memory is kept for ever.
        ``poll`` still gives the last results.
        """
        limit_ns = _nanoseconds(timeout_s)
        self._closed = True
        abandoned = int(self._native.close(limit_ns))
        if abandoned > 0:
            _abandoned.append((self._native, self._layout))
        return abandoned

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close(1.0)

    def _require_open(self) -> None:
        if self._closed:
            raise KVDiskError("the transfer engine is closed.")


def reserved_buffers(buffers: int, share: float) -> int:
    """How many of ``buffers`` stores never take: at least one where ``share`` is not 0.

    One is left to stores in any case.
    """
    return min(math.ceil(buffers * share), buffers - 1)


def _nanoseconds(seconds: float | None) -> int:
    """-1 stands for no limit, and so does a time that no clock will reach."""
    if seconds is None or seconds >= _SECONDS_MAX:
        return -1
    return max(0, round(seconds * _NS_PER_S))


def _handle(event: Any) -> int:
    """The number by which the copier knows an event."""
    if isinstance(event, int):
        return event
    handle = int(event.cuda_event)
    if handle == 0:
        raise ValueError("the event was never recorded: record it on the stream that writes")
    return handle


def _indices(values: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"block ids and slots are integers, not {array.dtype}")
    if array.dtype.kind == "i" and array.size and int(array.min()) < 0:
        raise ValueError("block ids and slots are not negative")
    return np.ascontiguousarray(array, dtype=np.uint64)


def _pack(keys: Iterable[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Keys as the engine takes them: rows of 64 bytes, zero beyond each key's length."""
    stored = [stored_key(key) for key in keys]
    lengths = np.fromiter(map(len, stored), dtype=np.uint8, count=len(stored))
    packed = np.frombuffer(
        b"".join(key.ljust(KEY_BYTES_MAX, b"\0") for key in stored), dtype=np.uint8
    )
    return packed.reshape(-1, KEY_BYTES_MAX), lengths


def _may_be_direct(layout: Layout, rank_file: RankFile) -> bool:
    region = layout.regions[0]
    return (
        layout.device == "cpu"
        and len(layout.regions) == 1
        and layout.block_bytes == rank_file.slot_bytes
        and region.address % rank_file.alignment == 0
        and region.block_stride_bytes % rank_file.alignment == 0
    )
