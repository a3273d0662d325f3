"""Damages stored slots and records in every way, and counts that each becomes a miss.

    python -m tests.tier.flips --flips 100000 --seed 1

A tier is filled; then, round after round, some of its slots are damaged in the file while it runs,
every key is loaded and compared, and the counters must say exactly what was damaged. Record damage
is read back through a restart. The damage: single bits of slots and of records, a tear at every 512
bytes of a slot, lost and misdirected writes, an older generation of the same slot put back, two
slots swapped, zeros. The last line is what counts:

    damaged=… became_misses=… wrong_bytes=0
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvdisk.rank_header import HEADER_BYTES, RECORD_BYTES
from kvdisk.transfer import RowStatus
from tests.tier.tier_rig import KIB, TierRig, keys_of

SLOTS = 256
BLOCK_BYTES = 4 * KIB + 512  # so that a slot has padding behind the block
SLOT_BYTES = 8 * KIB
SECTOR = 512
KEYS = keys_of(range(SLOTS))
_PATIENCE_NS = 60_000_000_000


class Bench:
    """A full tier whose files are damaged behind its back; what came of it in ``totals``."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.totals: Counter[str] = Counter()
        self.generation = 0
        self.rig = self._open()
        self.refill(KEYS)

    def _open(self) -> TierRig:
        legal = self.rig.legal if hasattr(self, "rig") else None
        rig = TierRig(
            self.directory,
            slots=SLOTS,
            block_bytes=BLOCK_BYTES,
            legal=legal,
            store_wait_ns=_PATIENCE_NS,  # a busy machine refuses nothing
            store_deadline_ns=_PATIENCE_NS,
            load_deadline_ns=_PATIENCE_NS,
        )
        self.data, self.records = rig.data_files[0], rig.record_files[0]
        return rig

    def refill(self, keys: list[bytes]) -> None:
        """Store ``keys`` anew, under a new generation, which alone is legal then."""
        self.generation += 1
        self.rig.tier.drop(keys)
        for key in keys:
            self.rig.legal[key] = set()
        statuses = self.rig.store(keys, self.generation)
        assert set(statuses) <= {RowStatus.OK}, statuses

    def slot_of(self, key: bytes) -> int:
        return int(self.rig.tier._scheduler._allocator.find([key])[0])

    @contextmanager
    def _file(self, path: Path) -> Iterator[int]:
        descriptor = os.open(path, os.O_RDWR)
        try:
            yield descriptor
        finally:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    # --- slots, in service

    def damage_slots(self, kind: str, keys: list[bytes], harm: Callable[[int, int], None]) -> None:
        """``harm(descriptor, offset)`` to the slot of each of ``keys``: all of them, and they
        alone, must turn out corrupt, once, and be stored again afterwards."""
        with self._file(self.data) as descriptor:
            for key in keys:
                harm(descriptor, self.slot_of(key) * SLOT_BYTES)
        before = self.rig.misses("corrupt")
        statuses = dict(zip(KEYS, self.rig.load(KEYS), strict=True))
        wrong = [key for key in KEYS if (statuses[key] is RowStatus.CORRUPT) != (key in set(keys))]
        assert not wrong, f"{kind}: {len(wrong)} of {len(keys)}: {[statuses[k] for k in wrong]}"
        assert self.rig.misses("corrupt") - before == len(keys), "the counter is not exact"
        assert self.rig.tier.readable(KEYS).sum() == SLOTS - len(keys), "a corrupt key stays"
        again = self.rig.load(keys)
        assert set(again) == {RowStatus.MISS}, "a corrupt key is tried twice"
        assert self.rig.misses("corrupt") - before == len(keys)
        self.totals[kind] += len(keys)
        self.refill(keys)

    def some_keys(self, count: int) -> list[bytes]:
        return self.random.sample(KEYS, count)

    def flip_slots(self, count: int) -> None:
        def flip(descriptor: int, offset: int) -> None:
            _flip(descriptor, offset, self.random.randrange(8 * BLOCK_BYTES))

        self.damage_slots("flipped bits", self.some_keys(count), flip)

    def tear_slots(self) -> None:
        """An older generation before or behind each sector boundary of the block."""
        older = self._older_slots()
        for boundary in range(SECTOR, BLOCK_BYTES, SECTOR):
            for first, end in ((0, boundary), (boundary, SLOT_BYTES)):
                keys = self.some_keys(4)
                harms = iter(keys)

                def tear(
                    descriptor: int,
                    offset: int,
                    harms: Iterator[bytes] = harms,
                    part: slice = slice(first, end),
                ) -> None:
                    os.pwrite(descriptor, older[next(harms)][part], offset + part.start)

                self.damage_slots("tears", keys, tear)

    def put_back_older(self, count: int) -> None:
        """The write of a block was lost: what lies there is the same key's older generation."""
        older = self._older_slots()
        keys = self.some_keys(count)
        harms = iter(keys)
        self.damage_slots(
            "older generations",
            keys,
            lambda descriptor, offset: _require_written(
                os.pwrite(descriptor, older[next(harms)], offset)
            ),
        )

    def swap(self, count: int) -> None:
        """Neighbours of the sample change places: misdirected writes."""
        keys = self.some_keys(count)
        with self._file(self.data) as descriptor:
            bytes_ = [os.pread(descriptor, SLOT_BYTES, self.slot_of(k) * SLOT_BYTES) for k in keys]
        others = iter(bytes_[1:] + bytes_[:1])
        self.damage_slots(
            "swapped slots",
            keys,
            lambda descriptor, offset: _require_written(
                os.pwrite(descriptor, next(others), offset)
            ),
        )

    def zero(self, count: int) -> None:
        """A whole slot reads as zeros, as after a power cut, or one page of it does."""
        for first, length in ((0, SLOT_BYTES), (0, 4 * KIB)):
            self.damage_slots(
                "zeroed",
                self.some_keys(count),
                lambda descriptor, offset, first=first, length=length: _require_written(
                    os.pwrite(descriptor, bytes(length), offset + first)
                ),
            )

    def _older_slots(self) -> dict[bytes, bytes]:
        """What each key's slot holds now; afterwards every key has a newer generation, in the same
        slot or not."""
        with self._file(self.data) as descriptor:
            slots = {
                key: os.pread(descriptor, SLOT_BYTES, self.slot_of(key) * SLOT_BYTES)
                for key in KEYS
            }
        self.refill(KEYS)
        return slots

    # --- records, through a restart

    def flip_records(self, count: int) -> None:
        """A bit of each of ``count`` records; the next process must not find those keys."""
        keys = self.some_keys(count)
        slots = [self.slot_of(key) for key in keys]
        self.rig.close()
        with self._file(self.records) as descriptor:
            for slot in slots:
                bit = self.random.randrange(8 * RECORD_BYTES)
                _flip(descriptor, HEADER_BYTES + slot * RECORD_BYTES, bit)
        self._restart_without("record bits", keys)

    def swap_records(self, count: int) -> None:
        keys = self.some_keys(count)
        places = [HEADER_BYTES + self.slot_of(key) * RECORD_BYTES for key in keys]
        self.rig.close()
        with self._file(self.records) as descriptor:
            found = [os.pread(descriptor, RECORD_BYTES, place) for place in places]
            for place, record in zip(places, found[1:] + found[:1], strict=True):
                os.pwrite(descriptor, record, place)
        self._restart_without("swapped records", keys)

    def stale_records(self, count: int) -> None:
        """The newest records are lost: what lies there is of the same slots' older blocks."""
        with self._file(self.records) as descriptor:
            old = os.pread(descriptor, SLOTS * RECORD_BYTES, HEADER_BYTES)
        self.refill(KEYS)
        keys = self.some_keys(count)
        slots = [self.slot_of(key) for key in keys]
        self.rig.close()
        with self._file(self.records) as descriptor:
            for slot in slots:
                at = slot * RECORD_BYTES
                os.pwrite(descriptor, old[at : at + RECORD_BYTES], HEADER_BYTES + at)
        self.rig = self._open()
        statuses = dict(zip(KEYS, self.rig.load(KEYS), strict=True))
        # An old record may name another key of the sample, which then has two records.
        good = sum(status is RowStatus.OK for status in statuses.values())
        assert good == SLOTS - count, f"stale records: {good} of {SLOTS - count}"
        assert set(statuses.values()) <= {RowStatus.OK, RowStatus.MISS, RowStatus.CORRUPT}
        self.totals["stale records"] += count
        self.refill(KEYS)

    def _restart_without(self, kind: str, keys: list[bytes]) -> None:
        self.rig = self._open()
        statuses = dict(zip(KEYS, self.rig.load(KEYS), strict=True))
        wrong = [key for key in KEYS if (statuses[key] is RowStatus.MISS) != (key in set(keys))]
        assert not wrong, f"{kind}: {[statuses[key] for key in wrong]}"
        assert self.rig.tier.stats().counters.restored == SLOTS - len(keys)
        self.totals[kind] += len(keys)
        self.refill(keys)


def _flip(descriptor: int, offset: int, bit: int) -> None:
    at = offset + bit // 8
    found = os.pread(descriptor, 1, at)[0]
    os.pwrite(descriptor, bytes([found ^ 1 << bit % 8]), at)


def _require_written(count: int) -> None:
    assert count > 0


def campaign(flips: int, seed: int, directory: Path) -> Counter[str]:
    """``flips`` single bits, and everything else some times over."""
    bench = Bench(directory, seed)
    bench.tear_slots()
    for _ in range(3):
        bench.put_back_older(64)
        bench.swap(64)
        bench.zero(64)
        bench.swap_records(64)
        bench.stale_records(64)
    left = flips
    while left > 0:
        in_slots = min(left, 128)
        bench.flip_slots(in_slots)
        left -= in_slots
        if left > 0 and bench.random.random() < 0.25:
            in_records = min(left, 128)
            bench.flip_records(in_records)
            left -= in_records
    bench.rig.tier.check()
    bench.rig.close()
    return bench.totals


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flips", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path("build/flips"))
    options = parser.parse_args()
    logging.getLogger("kvdisk").setLevel(logging.ERROR)  # what is damaged is told by us
    options.directory.mkdir(parents=True, exist_ok=True)
    print(f"flips: flips={options.flips} seed={options.seed}", flush=True)
    files = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        totals = campaign(options.flips, options.seed, files)
    finally:
        shutil.rmtree(files)
    for kind, count in totals.items():
        print(f"{kind}: {count}")
    # Whatever was not a miss has ended the campaign.
    print(f"damaged={totals.total()} became_misses={totals.total()} wrong_bytes=0")
    sys.exit(0)


if __name__ == "__main__":
    main()
