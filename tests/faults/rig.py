"""A whole path to break: blocks in numpy memory, an engine, a file. Checks every byte it moves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvdisk.layout import Layout
from kvdisk.transfer import Events, RowStatus, TransferEngine, TransferResult

PATIENCE_S = 60.0  # a bound against hanging tests, never a measurement
SEGMENTS = 4


class Rig:
    """``source`` and ``target`` halves of one cache: block i is stored, block ``half + i`` loaded.

    The content of a block follows from its key and generation, so what comes back can be checked
    without having kept it.
    """

    def __init__(self, path: Path, *, slots: int, slot_bytes: int, **engine: Any) -> None:
        direct = engine.pop("direct", True)
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self.path = path
        self.half = slots
        self.data_fd = os.open(path, flags, 0o600)
        self.record_fd = os.open(f"{path}.idx", flags, 0o600)
        if os.fstat(self.data_fd).st_size == 0:
            os.ftruncate(self.data_fd, slots * slot_bytes)
        shift = engine.pop("misalign_bytes", 0)
        self.cache = [
            _unaligned((2 * slots, slot_bytes // SEGMENTS), shift) for _ in range(SEGMENTS)
        ]
        self.engine = TransferEngine(
            Layout.from_tensors(self.cache),
            data_fd=self.data_fd,
            record_fd=self.record_fd,
            slot_bytes=slot_bytes,
            slot_count=slots,
            **{"iodepth": 8, "buffers": 16, "load_reserve": 4, **engine},
        )
        self.results: dict[int, TransferResult] = {}
        self.source_free: list[int] = []
        self.released: list[int] = []

    def content(self, key: bytes, generation: int = 0) -> np.ndarray[Any, Any]:
        seed = [generation, *key]
        shape = (SEGMENTS, self.cache[0].shape[1])
        return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    def fill(self, block: int, content: np.ndarray[Any, Any]) -> None:
        for segment, rows in zip(self.cache, content, strict=True):
            segment[block] = rows

    def submit_store(self, items: Sequence[int], generation: int = 0, **options: Any) -> int | None:
        """Store key i in slot i for each of ``items``, from block i."""
        for item in items:
            self.fill(item, self.content(_key(item), generation))
        return self.engine.submit_store([_key(i) for i in items], items, items, **options)

    def submit_load(self, items: Sequence[int], **options: Any) -> int:
        targets = [self.half + item for item in items]
        for target in targets:
            for segment in self.cache:
                segment[target] = 0xA5
        return self.engine.submit_load([_key(i) for i in items], items, targets, **options)

    def finish(self, transfer_id: int | None) -> list[RowStatus]:
        """Wait for a transfer; its statuses."""
        assert transfer_id is not None, "the store was refused"
        while transfer_id not in self.results:
            assert self.engine.wait(PATIENCE_S), "a transfer did not end"
            self.take(self.engine.poll())
        return [RowStatus(status) for status in self.results[transfer_id].statuses]

    def take(self, events: Events) -> None:
        self.source_free += events.source_free
        self.released += events.released_slots
        for result in events.finished:
            assert result.transfer_id not in self.results, "a transfer ended twice"
            self.results[result.transfer_id] = result

    def store(self, items: Sequence[int], generation: int = 0, **options: Any) -> list[RowStatus]:
        return self.finish(self.submit_store(items, generation, **options))

    def load(self, items: Sequence[int], generation: int = 0, **options: Any) -> list[RowStatus]:
        """Load and check: a row that is OK has the right bytes, any other keeps its sentinel."""
        statuses = self.finish(self.submit_load(items, **options))
        self.check(items, statuses, generation)
        return statuses

    def check(
        self, items: Sequence[int], statuses: Sequence[RowStatus], generation: int = 0
    ) -> None:
        for item, status in zip(items, statuses, strict=True):
            found = np.stack([segment[self.half + item] for segment in self.cache])
            if status is RowStatus.OK:
                assert (found == self.content(_key(item), generation)).all(), f"wrong bytes: {item}"
            else:
                assert (found == 0xA5).all(), f"row {item} failed, yet its block was written"

    def close(self, timeout_s: float = 5.0) -> int:
        abandoned = self.engine.close(timeout_s)
        self.take(self.engine.poll())
        for descriptor in (self.data_fd, self.record_fd):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        return abandoned


@contextlib.contextmanager
def rig(path: Path, **options: Any) -> Iterator[Rig]:
    """A rig that is closed at the end, with every buffer back in the ring."""
    made = Rig(path, **options)
    try:
        yield made
        stats = made.engine.stats()
        assert stats["ring_used"] == 0, "a buffer leaked"
    finally:
        made.close()


def ok(count: int) -> list[RowStatus]:
    return [RowStatus.OK] * count


def _key(item: int) -> bytes:
    return b"block-%d" % item


def _unaligned(shape: tuple[int, int], shift_bytes: int) -> np.ndarray[Any, Any]:
    """Zeroed memory that begins ``shift_bytes`` past a page."""
    room = np.zeros(shape[0] * shape[1] + 4096 + shift_bytes, dtype=np.uint8)
    start = -room.ctypes.data % 4096 + shift_bytes
    return room[start : start + shape[0] * shape[1]].reshape(shape)
