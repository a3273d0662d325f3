"""A whole tier to break: blocks in numpy memory, whose content says whose it is.

What always holds: a block's content follows from its key and a generation, and names both, so that
whatever a load delivers proves itself without anybody having kept it. A load that is OK must
deliver one whole generation that was submitted for that very key; anything else is wrong bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvdisk.config import TierConfig
from kvdisk.identity import Identity
from kvdisk.layout import Layout
from kvdisk.open_transfers import TierResult
from kvdisk.rank_file import record_file_bytes
from kvdisk.tier import DiskTier
from kvdisk.transfer import Direction, RowStatus

KIB, MIB = 1 << 10, 1 << 20
PATIENCE_S = 60.0  # a bound against hanging tests, never a measurement
SENTINEL = 0xA5
NEVER_READ = (RowStatus.MISS, RowStatus.BUSY, RowStatus.REFUSED)

Block = np.ndarray[Any, Any]


class WrongBytes(AssertionError):
    """A load said OK and delivered what it must not."""


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


def content(key: bytes, generation: int, block_bytes: int) -> Block:
    """What block ``key`` holds in a generation: 16 bytes that name both, then noise from them."""
    name = hashlib.blake2b(key, digest_size=8).digest() + generation.to_bytes(8, "little")
    noise = np.random.Generator(np.random.SFC64(list(name)))
    return np.frombuffer(name + noise.bytes(block_bytes - len(name)), dtype=np.uint8)


def generation_in(block: Block, key: bytes) -> int:
    """The generation of ``key`` that ``block`` holds, whole. Raises WrongBytes for all else."""
    generation = int.from_bytes(block[8:16].tobytes(), "little")
    if not np.array_equal(block, content(key, generation, len(block))):
        raise WrongBytes(f"not the bytes of {key.hex()}, generation {generation}")
    return generation


def identity_of(layout: Layout, /, **changes: Any) -> Identity:
    fields: dict[str, Any] = {
        "model": "test",
        "weights": "1",
        "dtype": "bfloat16",
        "block_tokens": 16,
        "layout": layout.fingerprint_fields(),
        "key_hash": "test",
        **changes,
    }
    return Identity(**fields)


def config_of(
    paths: Sequence[Path], slots: int, block_bytes: int, ranks: int = 1, **options: Any
) -> TierConfig:
    """A configuration with room for exactly ``slots`` slots in each rank's file of each path."""
    slot_bytes = -(-block_bytes // 4096) * 4096
    file_bytes = slots * slot_bytes + record_file_bytes(slots)
    return TierConfig(
        paths=tuple(path.resolve() for path in paths),
        capacity_bytes=len(paths) * ranks * file_bytes,
        **{"ring_bytes": len(paths) * 4 * MIB, **options},
    )


class Blocks:
    """``count`` blocks to store from, and as many to load into, behind them."""

    def __init__(self, count: int, block_bytes: int, segments: int = 4) -> None:
        self.count = count
        self.block_bytes = block_bytes
        shape = (2 * count, block_bytes // segments)
        self.segments = [np.zeros(shape, dtype=np.uint8) for _ in range(segments)]
        self.layout = Layout.from_tensors(self.segments)

    def fill(self, block: int, bytes_: Block | int) -> None:
        if isinstance(bytes_, int):
            for segment in self.segments:
                segment[block] = bytes_
            return
        for segment, part in zip(self.segments, np.split(bytes_, len(self.segments)), strict=True):
            segment[block] = part

    def read(self, block: int) -> Block:
        return np.concatenate([segment[block] for segment in self.segments])


Rig = TypeVar("Rig", bound="TierRig")


class TierRig:
    """A DiskTier on ``paths`` with ``slots`` slots a path, and what may be found in it.

    ``legal`` has the generations that were submitted for each key; hand it on to the rig that
    opens the same files again.
    """

    # Not promised, yet so, unless a clear turns what was loaded into a miss.
    missed_rows_are_untouched = True

    def __init__(
        self,
        *paths: Path,
        slots: int = 64,
        block_bytes: int = 16 * KIB,
        blocks: int | None = None,
        legal: dict[bytes, set[int]] | None = None,
        identity: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        config: TierConfig | None = None,
        **options: Any,
    ) -> None:
        """``config``, if there is one, takes the place of ``slots`` and ``options``."""
        self.blocks = Blocks(blocks or slots * len(paths), block_bytes)
        self.legal = defaultdict(set) if legal is None else legal
        self.config = config or config_of(paths, slots, block_bytes, **options)
        self.identity = identity_of(self.blocks.layout, **(identity or {}))
        self.tier = DiskTier.open(self.blocks.layout, self.identity, self.config, clock=clock)
        self.results: dict[int, TierResult] = {}
        self.source_free: set[int] = set()
        self._targets: dict[int, tuple[list[bytes], list[int]]] = {}

    # --- moving

    def submit_store(
        self, keys: Sequence[bytes], generation: int = 0, first_block: int = 0, **options: Any
    ) -> int:
        """Store ``keys`` from the blocks at ``first_block`` and after it."""
        where = range(first_block, first_block + len(keys))
        for key, block in zip(keys, where, strict=True):
            self.legal[key].add(generation)
            self.blocks.fill(block, content(key, generation, self.blocks.block_bytes))
        return self.tier.store(keys, list(where), **options)

    def submit_load(
        self, keys: Sequence[bytes], first_block: int = 0, within_s: float | None = None
    ) -> int:
        first = self.blocks.count + first_block
        where = list(range(first, first + len(keys)))
        for block in where:
            self.blocks.fill(block, SENTINEL)
        transfer_id = self.tier.load(keys, where, within_s=within_s)
        self._targets[transfer_id] = list(keys), where
        return transfer_id

    def poll(self) -> None:
        events = self.tier.poll()
        for transfer_id in events.source_free:
            assert transfer_id not in self.source_free, "a source was freed twice"
            self.source_free.add(transfer_id)
        for result in events.finished:
            assert result.transfer_id not in self.results, "a transfer ended twice"
            assert result.direction is Direction.LOAD or result.transfer_id in self.source_free
            self.results[result.transfer_id] = result
            if result.direction is Direction.LOAD:
                self._check(*self._targets.pop(result.transfer_id), result)

    def finish(self, transfer_id: int) -> list[RowStatus]:
        until = time.monotonic() + PATIENCE_S
        while transfer_id not in self.results:
            assert time.monotonic() < until, "a transfer did not end"
            self.tier.wait(1.0)
            self.poll()
        return [RowStatus(status) for status in self.results[transfer_id].statuses]

    def finish_all(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.tier.stats().open_transfers:
            assert time.monotonic() < until, "a transfer did not end"
            self.tier.wait(1.0)
            self.poll()
        self.poll()

    def wait_until(self, true: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < until, "it never became so"
            self.tier.wait(0.02)
            self.poll()

    def store(self, keys: Sequence[bytes], generation: int = 0, **options: Any) -> list[RowStatus]:
        return self.finish(self.submit_store(keys, generation, **options))

    def load(self, keys: Sequence[bytes], within_s: float | None = None) -> list[RowStatus]:
        """Load, and check every block: right and whole, or not touched at all."""
        return self.finish(self.submit_load(keys, within_s=within_s))

    def hits(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys`` load well, however many there are."""
        count = 0
        for first in range(0, len(keys), self.blocks.count):
            statuses = self.load(keys[first : first + self.blocks.count])
            count += statuses.count(RowStatus.OK)
        return count

    def loaded_generation(self, index: int) -> int:
        """Of the ``index``th block of the latest load."""
        return int.from_bytes(self.blocks.read(self.blocks.count + index)[8:16].tobytes(), "little")

    def misses(self, reason: str) -> int:
        return self.tier.stats().counters.misses[reason]

    def _check(self, keys: list[bytes], where: list[int], result: TierResult) -> None:
        for key, block, status in zip(keys, where, result.statuses, strict=True):
            found = self.blocks.read(block)
            if status == RowStatus.OK:
                self.delivered(key, found)
            elif self.missed_rows_are_untouched and status in NEVER_READ:
                assert (found == SENTINEL).all(), (
                    f"{RowStatus(status).name}, yet the block was written"
                )

    def delivered(self, key: bytes, block: Block) -> None:
        """A load has delivered this; raises WrongBytes when it must not."""
        generation = generation_in(block, key)
        if generation not in self.legal[key]:
            raise WrongBytes(f"{key.hex()}: generation {generation} must not be found")

    # --- ending

    def close(self, timeout_s: float = 5.0) -> int:
        abandoned = self.tier.close(timeout_s)
        self.poll()
        return abandoned

    @property
    def directories(self) -> list[Path]:
        return [path / self.identity.namespace for path in self.config.paths]

    @property
    def data_files(self) -> list[Path]:
        return [directory / "rank-0-of-1.kv" for directory in self.directories]

    @property
    def record_files(self) -> list[Path]:
        return [directory / "rank-0-of-1.idx" for directory in self.directories]


def tier_rig(*paths: Path, **options: Any) -> AbstractContextManager[TierRig]:
    """A rig that is recounted and closed at the end."""
    return closing(TierRig(*paths, **options))


@contextlib.contextmanager
def closing(made: Rig) -> Iterator[Rig]:
    """At the end every buffer and slot must be accounted for."""
    try:
        yield made
        made.finish_all()
        made.tier.check()
        stats = made.tier.stats()
        assert stats.slots.pinned == stats.slots.storing == 0
        assert stats.engine_sum("ring_used") == 0, "a buffer leaked"
    finally:
        made.close()


def ok(count: int) -> list[RowStatus]:
    return [RowStatus.OK] * count


def keys_of(*numbers: int | range) -> list[bytes]:
    flat = [range(each, each + 1) if isinstance(each, int) else each for each in numbers]
    return [key_of(number) for part in flat for number in part]
