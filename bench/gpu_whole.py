"""Blocks of a GPU through the whole engine to a file and back, beside staged.py on the same file.

The two alternate, round by round, so that a disk that is slow this minute is slow for both; ratios
are taken within a round, and the median of them counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rig import Rig, open_rig, surroundings
from staged import Staged

from kvdisk.bench.whole import engine_cpu_ns

_BATCH = 32
_ROWS_QUEUED = 256
SLOTS_BYTES = 2 << 30


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    segment_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.segment_bytes


SHAPES = [
    Shape("2 MiB = 32 x 64 KiB", 32, 64 << 10),
    Shape("512 KiB = 32 x 16 KiB", 32, 16 << 10),
    Shape("640 KiB = 80 x 8 KiB", 80, 8 << 10),
    Shape("256 KiB = 32 x 8 KiB", 32, 8 << 10),
]


def engine_round(rig: Rig, load: bool, seconds: float, random: np.random.Generator) -> int:
    """Blocks moved: batches of slots in random order, as many queued as keep the engine busy."""
    order = random.permutation(rig.slot_count)
    position = open_rows = moved = target = 0
    until = time.monotonic() + seconds
    while True:
        more = time.monotonic() < until
        while more and open_rows + _BATCH <= min(_ROWS_QUEUED, rig.slot_count):
            if position + _BATCH > len(order):
                if open_rows:
                    break  # the next pass may use slots that are still at work
                position = 0
            slots = order[position : position + _BATCH].tolist()
            position += _BATCH
            open_rows += len(slots)
            if load:
                rig.load(slots, target)
                target = (target + _BATCH) % _ROWS_QUEUED
            else:
                rig.store(slots)
        if open_rows == 0:
            return moved
        assert rig.engine.wait(30.0), "the disk hangs"
        for result in rig.engine.poll().finished:
            assert result.ok, result.statuses
            open_rows -= len(result.statuses)
            moved += len(result.statuses)


def staged_round(
    rig: Rig, staged: Staged, load: bool, seconds: float, random: np.random.Generator
) -> int:
    until = time.monotonic() + seconds
    moved = 0
    while time.monotonic() < until:
        slots = random.integers(0, rig.slot_count, _BATCH).tolist()
        if load:
            first = rig.cache.source_count
            staged.load(range(first, first + _BATCH), slots)
        else:
            staged.store([slot % rig.cache.source_count for slot in slots], slots)
        moved += len(slots)
    return moved


def timed(move: Callable[[], int], block_bytes: int) -> dict[str, float]:
    cpu, engine_ns, started = time.process_time(), engine_cpu_ns(), time.monotonic()
    moved_bytes = move() * block_bytes
    return {
        "gb_per_s": moved_bytes / (time.monotonic() - started) / 1e9,
        "cpu_s_per_gb": (time.process_time() - cpu) / moved_bytes * 1e9,
        "engine_cpu_s_per_gb": (engine_cpu_ns() - engine_ns) / moved_bytes,
    }


def prove(rig: Rig, staged: Staged) -> None:
    """The baseline moves the right bytes, or its figures mean nothing."""
    blocks, slots = [1, 3, 0, 2], [5, 0, 9, 2]
    targets = [rig.cache.source_count + number for number in (2, 0, 3, 1)]
    staged.store(blocks, slots)
    staged.load(targets, slots)
    words = rig.cache._words  # type: ignore[attr-defined]
    for block, target in zip(blocks, targets, strict=True):
        assert torch.equal(words[:, block], words[:, target]), "the baseline moved other bytes"


def compare(path: Path, shape: Shape, seconds: float, rounds: int, **options: Any) -> list[Any]:
    """One row per direction: medians of both, and of their ratios."""
    random = np.random.default_rng(1)
    rows = []
    with open_rig(
        path,
        block_bytes=shape.block_bytes,
        slot_count=SLOTS_BYTES // shape.block_bytes,
        sources=_ROWS_QUEUED,
        targets=_ROWS_QUEUED,
        layers=shape.layers,
        device="cuda",
        **options,
    ) as rig:
        staged = Staged(rig.cache.layout, rig.file.data_fd, rig.file.slot_bytes)
        prove(rig, staged)
        for load in (False, True):
            rig.fill()
            ours, theirs = [], []
            for _ in range(rounds):
                theirs.append(
                    timed(
                        lambda load=load: staged_round(rig, staged, load, seconds, random),
                        shape.block_bytes,
                    )
                )
                ours.append(
                    timed(
                        lambda load=load: engine_round(rig, load, seconds, random),
                        shape.block_bytes,
                    )
                )
            rows.append(
                {"shape": shape.name, "direction": "load" if load else "store", **options}
                | _summary(ours, theirs)
            )
        facts = surroundings(path, rig) | {"copier": rig.engine.stats()["copier_note"]}
        staged.close()
    return [row | facts for row in rows]


def _summary(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, Any]:
    def median(rounds: list[dict[str, float]], what: str) -> float:
        return round(statistics.median(each[what] for each in rounds), 4)

    ratios = [a["gb_per_s"] / b["gb_per_s"] for a, b in zip(ours, theirs, strict=True)]
    return {
        "gb_per_s": median(ours, "gb_per_s"),
        "staged_gb_per_s": median(theirs, "gb_per_s"),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "cpu_s_per_gb": median(ours, "cpu_s_per_gb"),
        "engine_cpu_s_per_gb": median(ours, "engine_cpu_s_per_gb"),
        "staged_cpu_s_per_gb": median(theirs, "cpu_s_per_gb"),
    }
