"""What the engine takes from a server's Python thread (scenario A33).

A thread counts in pure Python: alone, beside an idle engine and beside a saturated one, in turns.
Pinned to processors, so that the question is about the GIL and not about who gets a core:

* one core free: the counter has a processor of its own, everything of the engine runs elsewhere;
* both busy: the counter shares its processor with the engine.

On shared or virtual machines a busy neighbour costs speed by itself, so the counter also runs
beside another process that keeps the engine's processors busy: what the engine takes beyond that
is its own.

A second Python thread feeds the engine with large batches, as a scheduler does with a few calls a
step. Also: CPU and wake-ups of the engine's threads over ten idle seconds.

    python bench/gil.py --output bench/results/gil.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rig import Rig, open_rig, report, surroundings

ROOT = Path(__file__).resolve().parent.parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--block", type=int, default=512 * 1024, help="bytes")
    parser.add_argument("--batch", type=int, default=128, help="blocks of a transfer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def count_for(seconds: float) -> float:
    """Steps of a counting loop per second of wall time."""
    steps = 0
    started = time.perf_counter()
    until = started + seconds
    while time.perf_counter() < until:
        for _ in range(1000):
            steps += 1
    return steps / (time.perf_counter() - started)


class Feeder:
    """Keeps two transfers in flight, alternately loads and stores."""

    def __init__(self, rig: Rig, batch: int, processors: set[int]) -> None:
        self._rig = rig
        self._batch = batch
        self._processors = processors
        self._stop = threading.Event()
        self.blocks = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        os.sched_setaffinity(0, self._processors)
        half = self._rig.slot_count // 2
        self._rig.load(list(range(self._batch)))
        self._rig.store(list(range(half, half + self._batch)))
        while not self._stop.is_set():
            self._rig.engine.wait(1.0)
            for result in self._rig.engine.poll().finished:
                assert result.ok
                self.blocks += len(result.statuses)
                if result.direction == 1:
                    self._rig.load(list(range(self._batch)))
                else:
                    self._rig.store(list(range(half, half + self._batch)))
        self._rig.drain(2)


def engine_threads() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("kvdisk"):
            found.append(int(task.name))
    return found


def pin_others(processors: set[int]) -> None:
    """Everything but this thread: the engine's threads and the kernel's workers for them."""
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            try:
                os.sched_setaffinity(int(task.name), processors)
            except OSError:
                continue  # a kernel worker that is about to go, or takes no affinity


def idle_cost(seconds: float) -> dict[str, float]:
    """Share of a core and wake-ups per second of the engine's threads while nothing is asked."""

    def read() -> tuple[int, int]:
        cpu = switches = 0
        for thread in engine_threads():
            task = Path(f"/proc/self/task/{thread}")
            cpu += int((task / "schedstat").read_text().split()[0])
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    switches += int(line.split()[1])
        return cpu, switches

    cpu_before, switches_before = read()
    time.sleep(seconds)
    cpu_after, switches_after = read()
    return {
        "share_of_a_core": (cpu_after - cpu_before) / 1e9 / seconds,
        "wakeups_per_second": (switches_after - switches_before) / seconds,
    }


@contextmanager
def burning(processors: set[int]) -> Iterator[None]:
    """Another process that moves memory on those processors, about as the engine does."""
    program = (
        f"import os; os.sched_setaffinity(0, {sorted(processors)}); a = bytearray(1 << 26)\n"
        "while True: a[:] = bytes(a)"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            time.sleep(0.3)
            yield
        finally:
            process.kill()


def measure(rig: Rig, arguments: argparse.Namespace) -> dict[str, Any]:
    available = sorted(os.sched_getaffinity(0))
    mine = {available[0]}
    places = {"one core free": set(available[1:]) or mine, "both busy": mine}
    result: dict[str, Any] = {"processors": len(available)}
    os.sched_setaffinity(0, mine)
    for name, theirs in places.items():
        pin_others(theirs)
        shares: dict[str, list[float]] = {
            each: [] for each in ("idle engine", "busy engine", "busy process")
        }
        speeds = []
        for _ in range(arguments.rounds):
            before = count_for(arguments.seconds)
            with Feeder(rig, arguments.batch, theirs) as feeder:
                time.sleep(0.2)
                started, blocks = time.perf_counter(), feeder.blocks
                beside = count_for(arguments.seconds)
                elapsed = time.perf_counter() - started
                speeds.append((feeder.blocks - blocks) * arguments.block / elapsed / 1e6)
            after = count_for(arguments.seconds)
            with burning(theirs):
                control = count_for(arguments.seconds)
            last = count_for(arguments.seconds)
            shares["busy process"].append(2 * control / (after + last))
            shares["busy engine"].append(2 * beside / (before + after))
            shares["idle engine"].append(after / before)
        result[name] = {
            "engine_mb_per_s": statistics.median(speeds),
            **{
                f"kept beside {engine}": {
                    "median": statistics.median(each),
                    "least": min(each),
                    "most": max(each),
                }
                for engine, each in shares.items()
            },
        }
    os.sched_setaffinity(0, set(available))
    return result


def main() -> None:
    arguments = parse_arguments()
    with open_rig(
        arguments.path,
        block_bytes=arguments.block,
        slot_count=max(1024, 4 * arguments.batch),
        sources=arguments.batch,
        targets=arguments.batch,
    ) as rig:
        document = {
            **surroundings(arguments.path, rig),
            "block_bytes": arguments.block,
            "batch": arguments.batch,
            "idle": idle_cost(arguments.idle_seconds),
            **measure(rig, arguments),
        }
    report(document, arguments.output)


if __name__ == "__main__":
    main()
