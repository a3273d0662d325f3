"""What kvdisk costs vLLM's scheduler: microseconds a call, with a million blocks resident.

vLLM asks on the thread that schedules, key by key for lookups and once a request for the rest.
``KVDiskManager`` and ``KVDiskTier`` are asked here as it asks them, with 36-byte keys that are
new objects each time (their hashes are not cached), in a tier that is full, so that each store
evicts. There is no disk: what the ranks report is made up, and the report's own cost counts as
"complete". Beside it runs the manager of vLLM's own RAM tier, as large.

What waiting requests cost is measured on vLLM's own pool of as many blocks as a device may have,
and on its own RAM tier, half full of what waits.

Times are the thread's processor time, so that what else runs on the machine counts only as far as
it disturbs the caches. A single lookup is too short for that clock: 64 are timed in a row, as many
as the blocks of one prompt, and the figures are of one of them.

    .venv-vllm/bin/python bench/vllm_scheduler.py --output bench/results/vllm-scheduler.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vllm
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvdisk.key_index import KEY_BYTES_MAX
from kvdisk.messages import PathState, RankOpened, RankReport, RankResult
from kvdisk.serving.vllm.manager import KVDiskManager
from kvdisk.serving.vllm.waiting import Waiting
from kvdisk.testing import SimulatedDisk, SimulatedWorker, simulated_config
from kvdisk.tier import DiskTier
from kvdisk.transfer import RowStatus
from tests.serving.vllm.below_ram import Setting, engine_of
from tests.serving.vllm.chunks import secondary_tier
from tests.serving.vllm.pools import BLOCK_TOKENS, hashes, pool_of

KEY_BYTES = 36  # a sha256 block hash and a 4-byte group index
BLOCK_BYTES = 4096
BURST = 64
REQUEST = ReqContext("request")


class Keys:
    """Keys by number, the same in every run, new objects at each call."""

    def __init__(self, resident: int) -> None:
        generator = np.random.default_rng(7)
        self.rows = np.zeros((resident, KEY_BYTES_MAX), dtype=np.uint8)
        self.rows[:, : KEY_BYTES - 4] = generator.integers(0, 256, (resident, 32), dtype=np.uint8)
        self._generator = generator

    def resident(self, count: int) -> list[OffloadKey]:
        """Neighbours, as the blocks of one prompt are; none of the oldest, which stores evict."""
        first = int(self._generator.integers(len(self.rows) // 4, len(self.rows) - count))
        return [OffloadKey(row[:KEY_BYTES].tobytes()) for row in self.rows[first : first + count]]

    def new(self, count: int) -> list[OffloadKey]:
        return [OffloadKey(self._generator.bytes(32) + bytes(4)) for _ in range(count)]


def opened(keys: Keys, slots: int) -> RankOpened:
    """A rank that has found every slot filled."""
    return RankOpened(
        rank=0,
        world_size=1,
        slot_bytes=BLOCK_BYTES,
        slot_count=slots,
        restored_slots=np.arange(slots, dtype=np.int64),
        restored_sequences=np.arange(1, slots + 1, dtype=np.uint64),
        restored_keys=keys.rows,
        restored_key_lengths=np.full(slots, KEY_BYTES, dtype=np.uint8),
        clears=0,
        paths=(PathState(),),
        facts={},
    )


def success(transfer: Any) -> list[RankReport]:
    rows = len(transfer)
    ok = np.full(rows, RowStatus.OK, np.uint8)
    nothing = np.zeros(rows, np.int32), np.zeros(rows, np.bool_)
    free = [transfer.id] if transfer.direction.name == "STORE" else []
    return [RankReport(0, free, [RankResult(transfer.id, ok, *nothing)])]


class OurManager:
    def __init__(self, keys: Keys, slots: int) -> None:
        config = simulated_config(slots, BLOCK_BYTES)
        self.manager = KVDiskManager(config, BLOCK_BYTES, world_size=1, blocks_per_chunk=1)
        self.manager.attach(opened(keys, slots))
        self.lookup, self.touch = self.manager.lookup, self.manager.touch

    def load(self, keys: list[OffloadKey]) -> Callable[[], None]:
        reports = success(self.manager.prepare_load(keys, REQUEST).transfer)
        return lambda: self.manager.apply(reports)

    def store(self, keys: list[OffloadKey]) -> Callable[[], None]:
        prepared = self.manager.prepare_store(keys, REQUEST)
        assert prepared is not None
        assert len(prepared.keys_to_store) == len(keys)
        reports = success(prepared.store_spec.transfer)
        return lambda: self.manager.apply(reports)


class RamManager:
    """vLLM's own, of its RAM tier. It keeps what it has seen of each request, so each is new."""

    def __init__(self, keys: Keys, slots: int) -> None:
        self.manager = CPUOffloadingManager(slots)
        for first in range(0, slots, 1000):
            rows = keys.rows[first : first + 1000, :KEY_BYTES]
            self.store([OffloadKey(row.tobytes()) for row in rows])()
        self.lookup, self.touch = self.manager.lookup, self.manager.touch

    def load(self, keys: list[OffloadKey]) -> Callable[[], None]:
        self.manager.prepare_load(keys, ReqContext("request"))
        return lambda: self.manager.complete_load(keys, REQUEST)

    def store(self, keys: list[OffloadKey]) -> Callable[[], None]:
        assert self.manager.prepare_store(keys, ReqContext("request")) is not None
        return lambda: self.manager.complete_store(keys, REQUEST)


def tier_lookup(keys: Keys, slots: int) -> Callable[[OffloadKey, ReqContext], LookupResult]:
    """``KVDiskTier.lookup``; what else it does is what the manager's calls do."""
    ours = OurManager(keys, slots)
    blocks = np.zeros((1, BLOCK_BYTES), np.uint8)
    worker = SimulatedWorker(SimulatedDisk(), blocks, simulated_config(slots, BLOCK_BYTES))
    with tempfile.TemporaryDirectory() as directory:
        tier = secondary_tier(Path(directory), blocks)
        tier._tier.close()
    tier._tier = DiskTier(ours.manager.scheduler, worker, len(blocks))
    tier.on_new_request(REQUEST)
    return tier.lookup


def timed(calls: Iterable[Callable[[], Any]], keys: int, per_call: int = 1) -> dict[str, float]:
    """Of calls that are made ready one by one; each does ``per_call`` calls of ``keys`` keys."""
    seconds = []
    for call in calls:
        start = time.thread_time()
        call()
        seconds.append((time.thread_time() - start) / per_call)
    ordered = sorted(seconds)
    median = ordered[len(ordered) // 2] * 1e6
    return {
        "keys": keys,
        "timed": len(ordered),
        "us_median": round(median, 2),
        "us_p99": round(ordered[int(len(ordered) * 0.99)] * 1e6, 2),
        "us_per_key_median": round(median / keys, 3),
    }


def lookups(lookup: Any, keys: Keys, calls: int) -> dict[str, Any]:
    def burst(batch: list[OffloadKey], answer: LookupResult) -> None:
        for key in batch:
            assert lookup(key, REQUEST) is answer

    times = calls // BURST
    hits = (partial(burst, keys.resident(BURST), LookupResult.HIT) for _ in range(times))
    misses = (partial(burst, keys.new(BURST), LookupResult.MISS) for _ in range(times))
    return {"lookup, hit": timed(hits, 1, BURST), "lookup, miss": timed(misses, 1, BURST)}


def batches(subject: Any, keys: Keys, count: int, calls: int) -> dict[str, Any]:
    """Loads and touches of resident blocks, stores of new ones, ``count`` at a time."""
    ends: list[Callable[[], None]] = []

    def load(batch: list[OffloadKey]) -> None:
        ends.append(subject.load(batch))

    def store(batch: list[OffloadKey]) -> None:
        ends.append(subject.store(batch))

    old = (keys.resident(count) for _ in range(calls))
    found = {"touch": timed((partial(subject.touch, batch, REQUEST) for batch in old), count)}
    old = (keys.resident(count) for _ in range(calls))
    found["prepare_load"] = timed((partial(load, batch) for batch in old), count)
    found["complete, load"] = timed(ends, count)
    ends.clear()
    new = (keys.new(count) for _ in range(calls))
    found["prepare_store, evicting"] = timed((partial(store, batch) for batch in new), count)
    found["complete, store"] = timed(ends, count)
    return found


def waiting_requests(calls: int, prompts: int = 100, blocks: int = 512) -> list[dict[str, Any]]:
    """A request that comes and goes, and a step's look at the device's cache."""
    there = [hashes(f"{number}-", blocks) for number in range(prompts)]
    _, device = pool_of(*there)
    waiting = Waiting(hashes_max=prompts * blocks)
    arrive = (partial(waiting.arrived, f"new {n}", hashes(f"new {n}-", blocks)) for n in range(99))
    found = {"arrived": timed(arrive, blocks)}
    found["gone"] = timed((partial(waiting.gone, f"new {number}") for number in range(99)), blocks)

    def step() -> None:
        device.step_ended()
        device.evict_waiting_last(waiting, blocks * BLOCK_TOKENS)

    waiting.arrived("most recent", there[-1])
    found["step, what waits is far from eviction"] = timed((step for _ in range(calls)), blocks)
    for number, prompt in enumerate(there):
        waiting.arrived(str(number), prompt)
    found["step, all waits"] = timed((step for _ in range(calls)), blocks)
    look = partial(device.found_tokens, there[0])
    found["found_tokens"] = timed((look for _ in range(calls)), blocks)
    return [{"call": name, **row} for name, row in found.items()]


def waiting_in_ram(calls: int, prompts: int = 32, chunks: int = 240) -> list[dict[str, Any]]:
    """A touch of all that waits in vLLM's RAM tier, and what is left of a store beside it."""
    setting = Setting(ram_rows=2 * prompts * chunks, gpu_blocks=2 * chunks)
    with tempfile.TemporaryDirectory() as scratch, engine_of(Path(scratch), setting) as engine:
        ours, ram = engine.ours, engine.manager.primary_tier
        for number in range(prompts):
            request = engine.ask_for([3 + number] * chunks * BLOCK_TOKENS)
            keys = [make_offload_key(each, 0) for each in request.block_hashes]
            ram.prepare_store(keys, REQUEST)
            ram.complete_store(keys, REQUEST)
        new = [make_offload_key(each, 0) for each in hashes("new", 512)]

        def touch() -> None:
            ours._ram._touch_at_change = 0
            ours._ram.step_ended()
            ours._before_rows_are_taken()

        found = {
            "touch in the RAM tier": timed((touch for _ in range(calls)), prompts * chunks),
            "store beside what waits": timed(
                (
                    partial(ours._beside_what_waits, ours.waiting, new, REQUEST)
                    for _ in range(calls)
                ),
                len(new),
            ),
        }
    return [{"call": name, **row} for name, row in found.items()]


def measure(subject: Any, keys: Keys, calls: int) -> list[dict[str, Any]]:
    gc.collect()
    rows = [{"call": name, **row} for name, row in lookups(subject.lookup, keys, calls).items()]
    for count in (1, 64, 512):
        gc.collect()
        found = batches(subject, keys, count, max(50, calls // (20 * count)))
        rows += [{"call": name, **row} for name, row in found.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000, help="resident blocks")
    parser.add_argument("--calls", type=int, default=50_000, help="lookups to time")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    slots = options.blocks
    keys = Keys(slots)
    load_before = os.getloadavg()[0]
    results = {"KVDiskManager": measure(OurManager(keys, slots), keys, options.calls)}
    lookup = tier_lookup(keys, slots)
    results["KVDiskTier"] = [
        {"call": name, **row} for name, row in lookups(lookup, keys, options.calls).items()
    ]
    results["vLLM's RAM tier"] = measure(RamManager(keys, slots), keys, options.calls)
    gc.collect()
    few = max(50, options.calls // 500)
    results["waiting requests"] = waiting_requests(few) + waiting_in_ram(few)
    report = {
        "what": "calls of vLLM's scheduler, each timed; no disk, no rank",
        "resident_blocks": slots,
        "key_bytes": KEY_BYTES,
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "load_average_before": load_before,
        "results": results,
    }
    for name, rows in results.items():
        for row in rows:
            print(
                f"{name:16} {row['call']:24} {row['keys']:4} keys: median {row['us_median']:9.2f} "
                f"us, p99 {row['us_p99']:9.2f} us, {row['us_per_key_median']:7.3f} us a key"
            )
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


if __name__ == "__main__":
    main()
