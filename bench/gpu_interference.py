"""What a saturated engine takes from compute beside it: the rate of a loop of matrix products."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_whole import SLOTS_BYTES, Shape, engine_round
from rig import open_rig

_SIZE = 8192
_QUEUED = 16


class Products:
    """bf16 products of 8192 x 8192, a few always queued, as a serving engine's forward pass is."""

    def __init__(self) -> None:
        self._left = torch.randn((_SIZE, _SIZE), device="cuda", dtype=torch.bfloat16)
        self._right = torch.randn((_SIZE, _SIZE), device="cuda", dtype=torch.bfloat16)
        self._out = torch.empty_like(self._left)

    def rate(self, seconds: float) -> float:
        """Products a second."""
        events = [torch.cuda.Event() for _ in range(_QUEUED)]
        done = 0
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            event = events[done % _QUEUED]
            if done >= _QUEUED:
                event.synchronize()
            torch.matmul(self._left, self._right, out=self._out)
            event.record()
            done += 1
        torch.cuda.synchronize()
        return done / (time.monotonic() - started)


def measure(path: Path, shape: Shape, seconds: float, rounds: int, **options: Any) -> list[Any]:
    """Phases alternate: products alone, then beside stores, alone, beside loads."""
    products = Products()
    products.rate(1.0)
    rows = []
    with open_rig(
        path,
        block_bytes=shape.block_bytes,
        slot_count=SLOTS_BYTES // shape.block_bytes,
        sources=256,
        targets=256,
        layers=shape.layers,
        device="cuda",
        **options,
    ) as rig:
        for load in (False, True):
            alone, beside, moved, kept = [], [], [], []
            for number in range(rounds):
                alone.append(products.rate(seconds))
                blocks: list[int] = []
                worker = threading.Thread(
                    target=lambda load=load, number=number, blocks=blocks: blocks.append(
                        engine_round(rig, load, seconds + 0.6, np.random.default_rng(number))
                    )
                )
                worker.start()
                time.sleep(0.3)
                beside.append(products.rate(seconds))
                worker.join()
                kept.append(beside[-1] / alone[-1])
                moved.append(blocks[0] * shape.block_bytes / (seconds + 0.6) / 1e9)
            rows.append(
                {
                    "shape": shape.name,
                    "direction": "load" if load else "store",
                    "products_per_s_alone": round(statistics.median(alone), 1),
                    "products_per_s_beside": round(statistics.median(beside), 1),
                    "kept": round(statistics.median(kept), 4),
                    "kept_each": [round(each, 4) for each in kept],
                    "gb_per_s_beside": round(statistics.median(moved), 2),
                }
            )
    return rows
