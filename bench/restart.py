"""How long a tier with many blocks takes to open again, and what a slot costs in memory.

    python bench/restart.py --directory /nvme/scratch --slots 1000000

Blocks are small, so that a million of them are 4 GB. They are stored under random keys, then
``DiskTier.open`` is timed in fresh processes, the files out of the page cache. Prints one JSON
object, and keeps it in a file when one is named with ``--keep``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from kvdisk.bench.scratch import describe_place
from kvdisk.config import TierConfig
from kvdisk.identity import Identity
from kvdisk.layout import Layout
from kvdisk.placement import Placement
from kvdisk.rank_file import record_file_bytes
from kvdisk.tier import DiskTier
from kvdisk.transfer import RowStatus

BLOCK_BYTES = 4096
KEY_BYTES = 32
BATCH = 4096
BATCHES_AHEAD = 2


def open_tier(directory: Path, slots: int) -> DiskTier:
    layout = Layout.from_tensors(np.zeros((BATCH, BLOCK_BYTES), dtype=np.uint8))
    identity = Identity(
        model="bench",
        weights="1",
        dtype="bfloat16",
        block_tokens=16,
        layout=layout.fingerprint_fields(),
        key_hash="bench",
    )
    config = TierConfig(
        paths=(directory,),
        capacity_bytes=slots * BLOCK_BYTES + record_file_bytes(slots),
        ring_bytes=16 << 20,
        store_wait_ns=10**11,  # so that filling drops nothing
        store_deadline_ns=10**11,
    )
    assert Placement.of(config, BLOCK_BYTES, 1).slot_count == slots
    return DiskTier.open(layout, identity, config)


def fill(directory: Path, slots: int) -> None:
    """Store a block in every slot. All blocks are the same; keys are what counts here."""
    generator = np.random.default_rng(1)
    with open_tier(directory, slots) as tier:
        stored = ahead = 0
        left = slots
        while left or ahead:
            while left and ahead < BATCHES_AHEAD:
                count = min(BATCH, left)
                noise = generator.bytes(count * KEY_BYTES)
                keys = [noise[at : at + KEY_BYTES] for at in range(0, len(noise), KEY_BYTES)]
                tier.store(keys, np.arange(count))
                left -= count
                ahead += 1
            tier.wait(10.0)
            for result in tier.poll().finished:
                stored += int((result.statuses == RowStatus.OK).sum())
                ahead -= 1
        if stored != slots:
            raise SystemExit(f"only {stored} of {slots} blocks were stored")


def measure(directory: Path, slots: int) -> dict[str, float]:
    """Of this process: seconds to open, by the clock and of the processor, and what was found."""
    before_bytes = resident_bytes()
    began, cpu_began = time.perf_counter(), time.process_time()
    tier = open_tier(directory, slots)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    stats = tier.stats()
    ring_bytes = stats.engine_sum("pinned_bytes")
    grown_bytes = resident_bytes() - before_bytes - ring_bytes
    restored = stats.counters.restored
    tier.close()
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "restored": restored,
        "bytes_per_slot": grown_bytes / slots,
        "bytes_per_slot_peak": (peak_bytes() - before_bytes - ring_bytes) / slots,
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def forget_pages(directory: Path) -> None:
    """Take the files' pages out of the page cache."""
    for path in directory.rglob("rank-*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=Path("build"))
    parser.add_argument("--slots", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open is not None:
        print(json.dumps(measure(options.open, options.slots)))
        return
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="restart-", dir=options.directory.resolve()) as name:
        directory = Path(name)
        began = time.perf_counter()
        fill(directory, options.slots)
        fill_seconds = time.perf_counter() - began
        rounds = []
        for _ in range(options.rounds):
            forget_pages(directory)
            command = [sys.executable, __file__, "--open", name, "--slots", str(options.slots)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rounds.append(json.loads(done.stdout))
        result = {
            "what": "DiskTier.open in a fresh process",
            "place": asdict(describe_place(directory)),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "slots": options.slots,
            "slot_bytes": BLOCK_BYTES,
            "restored": {each["restored"] for each in rounds}.pop(),
            "open_seconds_median": round(statistics.median(r["seconds"] for r in rounds), 3),
            "open_cpu_seconds_median": round(
                statistics.median(each["cpu_seconds"] for each in rounds), 3
            ),
            "open_seconds": [round(each["seconds"], 3) for each in rounds],
            "bytes_per_slot": round(statistics.median(r["bytes_per_slot"] for r in rounds)),
            "bytes_per_slot_peak": round(
                statistics.median(r["bytes_per_slot_peak"] for r in rounds)
            ),
            "fill_seconds": round(fill_seconds, 1),
        }
    text = json.dumps(result, indent=2)
    print(text)
    if options.keep is not None:
        options.keep.write_text(text + "\n")


if __name__ == "__main__":
    main()
