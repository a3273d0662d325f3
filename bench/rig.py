"""An engine with the default configuration on nameless files, for the measurements beside this."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvdisk.bench.caches import Cache, make_cache
from kvdisk.bench.job import Geometry
from kvdisk.bench.scratch import describe_place
from kvdisk.config import TierConfig
from kvdisk.rank_file import RankFile
from kvdisk.transfer import TransferEngine


@dataclass
class Rig:
    """An open engine, its blocks (to store, then to load into), and its slots, all filled."""

    engine: TransferEngine
    cache: Cache
    file: RankFile
    slot_count: int

    def keys(self, slots: list[int]) -> list[bytes]:
        return [slot.to_bytes(16, "little") for slot in slots]

    def store(self, slots: list[int]) -> int:
        """Submits, never refused; the same content for the same slots."""
        blocks = [slot % self.cache.source_count for slot in slots]
        transfer = self.engine.submit_store(self.keys(slots), slots, blocks)
        assert transfer is not None
        return transfer

    def load(self, slots: list[int], first_target: int = 0) -> int:
        base = self.cache.source_count + first_target
        blocks = range(base, base + len(slots))
        return self.engine.submit_load(self.keys(slots), slots, np.array(blocks))

    def fill(self) -> None:
        batch = self.cache.source_count
        for first in range(0, self.slot_count, batch):
            self.store(list(range(first, min(first + batch, self.slot_count))))
            self.drain(1)

    def drain(self, transfers: int) -> None:
        """Wait for so many transfers; every row must be ok."""
        while transfers > 0:
            assert self.engine.wait(30.0), "the disk hangs"
            for result in self.engine.poll().finished:
                assert result.ok, result.statuses
                transfers -= 1


@contextmanager
def open_rig(
    path: Path,
    *,
    block_bytes: int,
    slot_count: int,
    sources: int,
    targets: int,
    layers: int = 32,
    device: str = "cpu",
    **options: Any,
) -> Iterator[Rig]:
    """``options`` are those of TierConfig, such as ``iodepth``."""
    path.mkdir(parents=True, exist_ok=True)
    cache = make_cache(device, Geometry(layers, block_bytes // layers, ""), sources, targets, 1)
    config = TierConfig(
        paths=(path.resolve(),),
        capacity_bytes=max(1 << 20, 2 * block_bytes * slot_count),
        store_queue_bytes=1 << 40,
        load_deadline_ns=60 * 10**9,
        store_deadline_ns=60 * 10**9,
        **options,
    )
    with tempfile.TemporaryDirectory(dir=path, prefix=".kvdisk-bench-") as directory:
        file = RankFile.create_or_open(
            Path(directory), 0, 1, slot_count, block_bytes, bytes(32), "auto", persist=False
        )
    with file, TransferEngine.open(cache.layout, file, config) as engine:
        rig = Rig(engine, cache, file, slot_count)
        rig.fill()
        yield rig


def surroundings(path: Path, rig: Rig) -> dict[str, Any]:
    """What every number stands with."""
    place = describe_place(path)
    stats = rig.engine.stats()
    return {
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": place.file_system,
        "disk": place.disk,
        "direct": rig.file.direct,
        "alignment": rig.file.alignment,
        "backend": stats["backend"],
        "copier": stats["copier"],
    }


def report(document: dict[str, Any], output: Path | None) -> None:
    """Print a result, and keep it where that was asked for."""
    text = json.dumps(document, indent=1)
    print(text)
    if output is not None:
        output.write_text(text + "\n")
