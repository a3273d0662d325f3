"""How fast and how large the slot allocator is: keys a second, longest call, bytes a slot.

The serving engine's own thread runs this code, so a call's longest time counts as much as its mean.
Keys are 36 bytes, fresh objects in every call (their hashes are not cached), and found in batches.
Beside it runs what most engines have: an OrderedDict of key to slot and a list of free slots, one
key at a time, without states, pins, tickets or runs.

    python bench/allocator.py --slots 1000000 --output bench/results/allocator.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvdisk.free_slots import run_count
from kvdisk.key_index import KEY_BYTES_MAX, KeyBatch
from kvdisk.policy import EVICTION_POLICIES, make_eviction_policy
from kvdisk.slots import SlotAllocator

KEY_BYTES = 36  # a sha256 block hash and a 4-byte group index
KEYS_PER_ROUND = 1 << 15


class Subject(Protocol):
    """What is measured."""

    runs: int

    def lookup(self, keys: list[bytes]) -> int: ...

    def store(self, keys: list[bytes]) -> Any: ...

    def commit(self, allocation: Any) -> None: ...

    def load(self, keys: list[bytes]) -> None: ...

    def contains(self, key: bytes) -> bool: ...


class Ours:
    def __init__(self, slots: int, policy: str) -> None:
        self.allocator = SlotAllocator(slots, make_eviction_policy(policy, slots))
        self.contains = self.allocator.__contains__
        self.runs = 0

    def lookup(self, keys: list[bytes]) -> int:
        return self.allocator.lookup(keys)

    def store(self, keys: list[bytes]) -> Any:
        batch = KeyBatch(keys)  # encoded once for both calls
        self.allocator.lookup(batch)
        return self.allocator.allocate(batch)

    def commit(self, allocation: Any) -> None:
        self.runs += run_count(allocation.slots)
        ok = np.ones(len(allocation.slots), dtype=np.bool_)
        self.allocator.commit(allocation.slots, allocation.tickets, ok)

    def load(self, keys: list[bytes]) -> None:
        self.allocator.unpin(*self.allocator.pin(keys))


class PlainOrderedDict:
    def __init__(self, slots: int) -> None:
        self.slot_of: OrderedDict[bytes, int] = OrderedDict()
        self.free = list(range(slots - 1, -1, -1))
        self.runs = 0

    def lookup(self, keys: list[bytes]) -> int:
        for hits, key in enumerate(keys):
            if key not in self.slot_of:
                return hits
        return len(keys)

    def store(self, keys: list[bytes]) -> list[int]:
        self.lookup(keys)
        slots = []
        for key in keys:
            if key in self.slot_of:
                continue
            if not self.free:
                self.free.append(self.slot_of.popitem(last=False)[1])
            slot = self.slot_of[key] = self.free.pop()
            slots.append(slot)
        return slots

    def commit(self, slots: list[int]) -> None:
        self.runs += run_count(np.sort(np.array(slots)))

    def load(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self.slot_of:
                self.slot_of.move_to_end(key)

    def contains(self, key: bytes) -> bool:
        return key in self.slot_of


class KeySource:
    """Keys by number, the same in every run: ``batch`` makes new objects each time."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def round(self, first: int) -> bytes:
        generator = np.random.default_rng([self.seed, first])
        return generator.bytes(KEYS_PER_ROUND * KEY_BYTES)

    @staticmethod
    def split(data: bytes, batch: int) -> list[list[bytes]]:
        keys = [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
        return [keys[at : at + batch] for at in range(0, len(keys), batch)]


class Timing:
    """Of every call the seconds that passed, of every round the seconds of processor time.

    On a shared machine the rate follows from processor time: what others take does not count, what
    they do to the caches still does.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.rounds: list[tuple[float, list[float]]] = []

    def figures(self) -> dict[str, float]:
        rates = [len(times) * self.batch / processor for processor, times in self.rounds]
        calls = sorted(seconds for _, times in self.rounds for seconds in times)
        return {
            "keys_per_second_median": round(statistics.median(rates)),
            "keys_per_second_best": round(max(rates)),
            "call_us_median": round(statistics.median(calls) * 1e6, 1),
            "call_us_p99": round(calls[int(len(calls) * 0.99)] * 1e6, 1),
            "call_us_max": round(calls[-1] * 1e6, 1),
        }


def timed(timing: Timing, batches: list[list[bytes]], call: Callable[[list[bytes]], Any]) -> None:
    times = []
    processor = time.thread_time()
    for batch in batches:
        start = time.perf_counter()
        call(batch)
        times.append(time.perf_counter() - start)
    timing.rounds.append((time.thread_time() - processor, times))


def measure(subject: Subject, slots: int, batch: int, rounds: int) -> dict[str, Any]:
    """Fill ``subject``, then store new keys while old ones are evicted, then load some."""
    source = KeySource(1)
    timings = {
        name: Timing(batch)
        for name in ("lookup + allocate, filling", "lookup + allocate, evicting", "commit")
    }
    timings |= {name: Timing(batch) for name in ("lookup, all resident", "pin + unpin")}
    timings["contains, one key"] = Timing(1)
    allocations: list[Any] = []

    def store(keys: list[bytes]) -> None:
        allocations.append(subject.store(keys))

    fills = -(-slots // KEYS_PER_ROUND)
    for number in range(fills + rounds):
        evicting = number >= fills
        if number == fills:
            subject.runs = 0
        batches = source.split(source.round(number), batch)
        gc.collect()
        name = "lookup + allocate, evicting" if evicting else "lookup + allocate, filling"
        timed(timings[name], batches, store)
        last = iter(allocations)
        timed(timings["commit"], batches, lambda _, last=last: subject.commit(next(last)))
        allocations.clear()
        if evicting:
            # Load what was stored some rounds ago, in another order, so that runs get mixed.
            old = fills + rounds - 1 - (number - fills) - max(2, fills // 2)
            batches = source.split(source.round(max(0, min(old, number))), batch)
            timed(timings["lookup, all resident"], batches, subject.lookup)
            batches = source.split(source.round(max(0, min(old, number))), batch)
            timed(timings["pin + unpin"], batches[::3], subject.load)
            ones = [[keys[0]] for keys in batches[::3]]
            timed(timings["contains, one key"], ones, lambda keys: subject.contains(keys[0]))
    figures: dict[str, Any] = {name: timing.figures() for name, timing in timings.items()}
    figures["keys per run of slots, evicting"] = round(rounds * KEYS_PER_ROUND / subject.runs, 1)
    return figures


def fill(subject: Subject, slots: int, batch: int) -> None:
    source = KeySource(2)
    for number in range(-(-slots // KEYS_PER_ROUND)):
        for keys in source.split(source.round(number), batch):
            subject.commit(subject.store(keys))


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a process of its own, so that memory is not shared or left over."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(work(), pipe)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit("a measuring process failed; its error is above")
    return json.loads(text)


def memory(make: Callable[[], Subject], slots: int, batch: int, traced: bool) -> float:
    """Bytes a slot of a full subject; by tracemalloc, or as growth of the resident set."""
    gc.collect()
    if traced:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
    else:
        before = rss_bytes()
    subject = make()
    fill(subject, slots, batch)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0] if traced else rss_bytes()
    del subject
    return round((after - before) / slots, 1)


def restart(slots: int, policy: str) -> dict[str, float]:
    """Seconds to rebuild an allocator from slot records of a full tier."""
    generator = np.random.default_rng(3)
    rows = np.zeros((slots, KEY_BYTES_MAX), dtype=np.uint8)
    rows[:, :KEY_BYTES] = generator.integers(0, 256, (slots, KEY_BYTES), dtype=np.uint8)
    lengths = np.full(slots, KEY_BYTES, dtype=np.uint8)
    sequences = generator.permutation(slots) + 1
    start = time.perf_counter()
    allocator = SlotAllocator(slots, make_eviction_policy(policy, slots))
    taken = allocator.restore(KeyBatch.from_rows(rows, lengths), np.arange(slots), sequences)
    seconds = time.perf_counter() - start
    assert taken.all()
    return {"restore_seconds": round(seconds, 3)}


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else "unknown",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def subjects(slots: int) -> Iterator[tuple[str, Callable[[], Subject]]]:
    for policy in EVICTION_POLICIES:
        yield f"kvdisk {policy}", lambda policy=policy: Ours(slots, policy)
    yield "OrderedDict", lambda: PlainOrderedDict(slots)


def report(name: str, figures: dict[str, Any]) -> None:
    print(f"\n{name}")
    for what, value in figures.items():
        if isinstance(value, dict):
            print(
                f"  {what:<32}{value['keys_per_second_median'] / 1e3:8.0f} k keys/s"
                f" (best {value['keys_per_second_best'] / 1e3:.0f});"
                f" call {value['call_us_median']:.0f} µs, p99 {value['call_us_p99']:.0f},"
                f" max {value['call_us_max']:.0f}"
            )
        else:
            print(f"  {what:<32}{value:8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--slots", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=64, help="keys in a call")
    parser.add_argument("--rounds", type=int, default=16, help=f"of {KEYS_PER_ROUND} keys each")
    parser.add_argument("--output", type=Path, help="also write the figures there, as JSON")
    options = parser.parse_args()
    slots, batch = options.slots, options.batch
    result: dict[str, Any] = {
        "machine": machine(),
        "slots": slots,
        "key_bytes": KEY_BYTES,
        "batch_keys": batch,
        "subjects": {},
    }
    print(json.dumps({k: v for k, v in result.items() if k != "subjects"}))
    for name, make in subjects(slots):
        figures = in_child(lambda make=make: measure(make(), slots, batch, options.rounds))
        for how, traced in (("tracemalloc", True), ("resident set", False)):
            key = f"bytes a slot, {how}"
            figures[key] = in_child(lambda make=make, t=traced: memory(make, slots, batch, t))
        if name.startswith("kvdisk "):
            figures |= in_child(lambda name=name: restart(slots, name.split()[1]))
        result["subjects"][name] = figures
        report(name, figures)
    result["machine"]["load_average_after"] = round(os.getloadavg()[0], 2)
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    print("\n" + json.dumps(result["subjects"]))


if __name__ == "__main__":
    main()
