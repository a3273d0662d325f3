"""A tier on real files, in host memory, that checks every byte it loads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvdisk.config import TierConfig
from kvdisk.identity import Identity
from kvdisk.layout import Layout
from kvdisk.open_transfers import TierResult
from kvdisk.tier import DiskTier
from kvdisk.transfer import RowStatus

PATIENCE_S = 60.0  # a bound against hanging tests, never a measurement
SEGMENTS = 4
POISON = 0xA5


def identity(layout: Layout, **changes: Any) -> Identity:
    fields: dict[str, Any] = {
        "model": "test",
        "weights": "1",
        "dtype": "uint8",
        "block_tokens": 16,
        "layout": layout.fingerprint_fields(),
        "key_hash": "sha256",
    }
    return Identity(**{**fields, **changes})


def content(key: int, generation: int, block_bytes: int) -> np.ndarray[Any, Any]:
    """What a block holds follows from its key, so nothing has to be remembered."""
    random = np.random.default_rng([key, generation])
    return random.integers(0, 256, block_bytes, dtype=np.uint8).reshape(SEGMENTS, -1)


class TierRig:
    """``blocks`` blocks to store from, as many to load into. Keys are small numbers."""

    def __init__(
        self,
        *paths: Path,
        blocks: int = 128,
        block_bytes: int = 64 << 10,
        identity_changes: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.cache = np.zeros((SEGMENTS, 2 * blocks, block_bytes // SEGMENTS), dtype=np.uint8)
        self.layout = Layout.from_tensors(list(self.cache))
        self.config = TierConfig.from_mapping(
            {
                "path": [str(path) for path in paths],
                "capacity": 16 << 20,
                "ring": "4MiB",
                "iodepth": 8,
                **options,
            }
        )
        self.tier = DiskTier.open(
            self.layout, identity(self.layout, **(identity_changes or {})), self.config
        )
        self.results: dict[int, TierResult] = {}
        self.freed: list[int] = []

    def submit_store(self, keys: Sequence[int], generation: int = 0, **options: Any) -> int:
        rows = np.arange(len(keys))
        assert len(keys) <= self.blocks
        for row, key in enumerate(keys):
            self.cache[:, row] = content(key, generation, self.block_bytes)
        return self.tier.store([name(key) for key in keys], rows, **options)

    def submit_load(self, keys: Sequence[int]) -> int:
        assert len(keys) <= self.blocks
        self.cache[:, self.blocks :] = POISON
        return self.tier.load(
            [name(key) for key in keys], np.arange(self.blocks, self.blocks + len(keys))
        )

    def finish(self, transfer_id: int) -> list[RowStatus]:
        while transfer_id not in self.results:
            assert self.tier.wait(PATIENCE_S), "a transfer did not end"
            self.poll()
        return [RowStatus(status) for status in self.results[transfer_id].statuses]

    def poll(self) -> None:
        events = self.tier.poll()
        self.freed += events.source_free
        for result in events.finished:
            assert result.transfer_id not in self.results, "a transfer ended twice"
            self.results[result.transfer_id] = result

    def store(self, keys: Sequence[int], generation: int = 0, **options: Any) -> list[RowStatus]:
        return self.finish(self.submit_store(keys, generation, **options))

    def load(self, keys: Sequence[int], generation: int = 0) -> list[RowStatus]:
        """Load and compare: a row that is OK must be that generation's, byte for byte."""
        statuses = self.finish(self.submit_load(keys))
        for row, (key, status) in enumerate(zip(keys, statuses, strict=True)):
            if status is RowStatus.OK:
                found = self.cache[:, self.blocks + row]
                right = content(key, generation, self.block_bytes)
                assert np.array_equal(found, right), f"wrong bytes for key {key}"
        return statuses

    def lookup(self, keys: Sequence[int]) -> int:
        return self.tier.lookup([name(key) for key in keys])

    def data_file(self, path: int = 0) -> Path:
        directory = self.config.paths[path] / identity(self.layout).namespace
        return directory / "rank-0-of-1.kv"

    def close(self, timeout_s: float = 5.0) -> int:
        abandoned = self.tier.close(timeout_s)
        self.poll()
        return abandoned


@contextlib.contextmanager
def tier_rig(*paths: Path, **options: Any) -> Iterator[TierRig]:
    """A rig that is closed at the end, with nothing leaked."""
    rig = TierRig(*paths, **options)
    try:
        yield rig
        rig.tier.check()
        counts = rig.tier.stats().slots
        assert counts.pinned == counts.storing == 0, "a pin or a store leaked"
    finally:
        rig.close()


def name(key: int) -> bytes:
    return b"block-%d" % key


def ok(count: int) -> list[RowStatus]:
    return [RowStatus.OK] * count
