"""How long loads take while stores saturate the disk, beside loads on an idle disk.

Loads come as requests do: a prefix of some blocks at a time, then a pause. Phases alternate: loads
alone, loads while stores keep the store queue full. The promise is a p99 of at most twice the idle
one (docs/design.md, "Numbers to reach").

    python bench/load_latency.py --output bench/results/load-latency.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from rig import Rig, open_rig, report, surroundings

ROOT = Path(__file__).resolve().parent.parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--block", type=int, default=2 * 1024 * 1024, help="bytes")
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8, help="of one load")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between loads")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a phase")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--iodepth", type=int, default=32)
    parser.add_argument("--store-depth-beside-loads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


class Driver:
    """One thread, as a scheduler: submits loads and, when asked to, keeps stores queued."""

    def __init__(self, rig: Rig, arguments: argparse.Namespace) -> None:
        self._rig = rig
        self._arguments = arguments
        self._random = random.Random(1)
        self._half = rig.slot_count // 2  # loads come from below, stores go above
        self._next_store = self._half
        self._stores: set[int] = set()
        self.stored_blocks = 0

    def phase(self, with_stores: bool) -> list[int]:
        """Nanoseconds of each load, from submit until all its blocks are there."""
        latencies = []
        until = time.monotonic() + self._arguments.seconds
        while time.monotonic() < until:
            self._turn(time.monotonic() + self._arguments.pause, with_stores, None)
            first = self._random.randrange(self._half - self._arguments.blocks)
            started = time.monotonic_ns()
            load = self._rig.load(list(range(first, first + self._arguments.blocks)))
            self._turn(None, with_stores, load)
            latencies.append(time.monotonic_ns() - started)
        while self._stores:
            self._turn(time.monotonic() + 0.1, False, None)
        return latencies

    def _turn(self, until: float | None, with_stores: bool, load: int | None) -> None:
        """Until the time comes or the load has ended, whichever is asked for."""
        while True:
            while with_stores and len(self._stores) < 4:
                self._store()
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            self._rig.engine.wait(left)
            for result in self._rig.engine.poll().finished:
                assert result.ok, result.statuses
                if result.transfer_id == load:
                    load = None
                else:
                    self._stores.discard(result.transfer_id)
                    self.stored_blocks += len(result.statuses)
            if until is None and load is None:
                return

    def _store(self) -> None:
        batch = self._rig.cache.source_count // 4
        slots = []
        for _ in range(batch):
            slots.append(self._next_store)
            self._next_store += 1
            if self._next_store == self._rig.slot_count:
                self._next_store = self._half
        self._stores.add(self._rig.store(slots))


def percentile(values: list[int], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] / 1e6


def summary(values: list[int]) -> dict[str, float]:
    return {
        "loads": len(values),
        "p50_ms": percentile(values, 0.5),
        "p90_ms": percentile(values, 0.9),
        "p99_ms": percentile(values, 0.99),
    }


def measure(rig: Rig, arguments: argparse.Namespace) -> dict[str, Any]:
    driver = Driver(rig, arguments)
    idle: list[int] = []
    busy: list[int] = []
    ratios = []
    busy_s = 0.0
    for _ in range(arguments.rounds):
        alone = driver.phase(with_stores=False)
        started = time.monotonic()
        beside = driver.phase(with_stores=True)
        busy_s += time.monotonic() - started
        ratios.append(percentile(beside, 0.99) / percentile(alone, 0.99))
        idle += alone
        busy += beside
    return {
        "idle": summary(idle),
        "stores_saturating": summary(busy),
        "store_mb_per_s_beside": driver.stored_blocks * arguments.block / busy_s / 1e6,
        "p99_ratio_all": percentile(busy, 0.99) / percentile(idle, 0.99),
        "p99_ratio_median_of_rounds": statistics.median(ratios),
        "p99_ratios": ratios,
        "p50_ratio_all": percentile(busy, 0.5) / percentile(idle, 0.5),
    }


def main() -> None:
    arguments = parse_arguments()
    with open_rig(
        arguments.path,
        block_bytes=arguments.block,
        slot_count=arguments.slots,
        sources=128,
        targets=arguments.blocks,
        iodepth=arguments.iodepth,
        store_depth_beside_loads=arguments.store_depth_beside_loads,
    ) as rig:
        document = {
            **surroundings(arguments.path, rig),
            "block_bytes": arguments.block,
            "blocks_per_load": arguments.blocks,
            "iodepth": arguments.iodepth,
            "store_depth_beside_loads": arguments.store_depth_beside_loads,
            **measure(rig, arguments),
        }
    report(document, arguments.output)


if __name__ == "__main__":
    main()
