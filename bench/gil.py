"""What the engine takes from a server's Python thread (scenario A33).

A thread counts in pure Python: alone, and beside an engine that is kept busy in three ways:

* ahead: loads for the whole measurement were submitted before it, and nobody polls. What is lost is
  the engine's own doing: it never takes the GIL between submit and completion.
* stepping: the counting thread is the scheduler, too; every 10 ms it polls and submits what ended.
  What those calls take is lost, as in a serving engine's scheduler.
* feeding: a second Python thread waits for events and submits at once. Most of what is lost then is
  Python's: two threads that want the GIL hand it over in switch intervals of 5 ms.

Pinned to processors, so that the question is about the GIL and not about who gets a core:

* one core free: the counter has a processor of its own, everything of the engine runs elsewhere;
* both busy: the counter shares its processor with the engine.

On shared or virtual machines a busy neighbour costs speed by itself, so the counter also runs
beside another process that keeps the engine's processors busy: what is kept is told as a share of
that, too. And interrupts of the disk may land on the counter's processor: so the counter also runs
beside fio, another process that reads the same disk and has no GIL to take (``of_fio``), and its
speed for each second of its own CPU time is told as well.

Also: CPU and wake-ups of the engine's threads over ten idle seconds.

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rig import Rig, open_rig, report, surroundings

from kvdisk.bench.fio import require_fio
from kvdisk.transfer import Direction, TransferResult

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("ahead", "stepping", "feeding")
STEP_S = 0.01  # of a serving engine's scheduler
AHEAD_BYTES_PER_SECOND = 8e9  # more than the engine will load


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


@dataclass
class Speed:
    """Steps of the counting loop, by the clock and by the CPU time that the thread got."""

    per_second: float
    per_cpu_second: float


def count_for(seconds: float, step: Callable[[], None] | None = None) -> Speed:
    """Count; ``step`` is called every 10 ms and its time counts as lost."""
    steps = 0
    cpu_started, started = time.thread_time(), time.perf_counter()
    until = started + seconds
    tick = started + STEP_S if step is not None else until
    now = started
    while now < until:
        for _ in range(1000):
            steps += 1
        now = time.perf_counter()
        if step is not None and now >= tick:
            step()
            tick = now + STEP_S
    elapsed, cpu = time.perf_counter() - started, time.thread_time() - cpu_started
    return Speed(steps / elapsed, steps / cpu)


class Load:
    """Work for the engine: batches of loads and stores, alternately."""

    def __init__(self, rig: Rig, batch: int) -> None:
        self._rig = rig
        self._batch = batch
        self._half = rig.slot_count // 2
        self._open = 0
        self.blocks = 0

    def begin(self) -> None:
        self._submit(load=True)
        self._submit(load=False)

    def go_on(self) -> None:
        """Take what has ended and submit as much again."""
        for result in self._rig.engine.poll().finished:
            self._take(result)
            self._submit(load=result.direction == 1)

    def end(self) -> None:
        while self._open > 0:
            assert self._rig.engine.wait(30.0), "the disk hangs"
            for result in self._rig.engine.poll().finished:
                self._take(result)

    def _submit(self, load: bool) -> None:
        self._open += 1
        if load:
            self._rig.load(list(range(self._batch)))
        else:
            self._rig.store(list(range(self._half, self._half + self._batch)))

    def _take(self, result: TransferResult) -> None:
        assert result.ok
        self._open -= 1
        self.blocks += len(result.statuses)


@contextmanager
def ahead(rig: Rig, arguments: argparse.Namespace) -> Iterator[None]:
    """One transfer that keeps the engine busy for longer than the measurement."""
    rows = int(AHEAD_BYTES_PER_SECOND * (arguments.seconds + 1.0)) // arguments.block
    slots = [row % rig.slot_count for row in range(rows)]
    base = rig.cache.source_count
    targets = np.array([base + row % arguments.batch for row in range(rows)])
    rig.engine.submit_load(rig.keys(slots), slots, targets, timeout_s=arguments.seconds + 1)
    time.sleep(0.2)
    yield
    while not rig.engine.poll().finished:  # what is left times out
        assert rig.engine.wait(30.0), "the disk hangs"


@contextmanager
def feeding(load: Load, rig: Rig, processors: set[int]) -> Iterator[None]:
    stop = threading.Event()

    def run() -> None:
        os.sched_setaffinity(0, processors)
        load.begin()
        while not stop.is_set():
            rig.engine.wait(1.0)
            load.go_on()
        load.end()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        time.sleep(0.2)
        yield
    finally:
        stop.set()
        thread.join()


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


@contextmanager
def reading(processors: set[int], arguments: argparse.Namespace) -> Iterator[None]:
    """fio on those processors, reading with the engine's block size and depth."""
    file = arguments.path / "gil-fio"
    command = [require_fio(), "--name=neighbour", f"--filename={file}", "--size=512m"]
    command += [f"--bs={arguments.block}", "--iodepth=32", "--ioengine=io_uring", "--direct=1"]
    command += ["--rw=read", "--time_based", f"--runtime={arguments.seconds + 30}"]
    command.append(f"--cpus_allowed={','.join(map(str, sorted(processors)))}")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            time.sleep(1.0 if file.exists() else 5.0)  # it lays its file out first
            yield
        finally:
            process.kill()


def beside_engine(
    rig: Rig, way: str, arguments: argparse.Namespace, processors: set[int]
) -> tuple[Speed, float]:
    """The counter's speed, and the engine's bytes per second meanwhile."""
    load = Load(rig, arguments.batch)
    if way == "stepping":
        load.begin()
        context: AbstractContextManager[None] = nullcontext()
    elif way == "feeding":
        context = feeding(load, rig, processors)
    else:
        context = ahead(rig, arguments)

    def moved_bytes() -> int:  # the engine's statistics may be old while it is busy
        return (
            rig.engine.progress(Direction.LOAD).bytes
            if way == "ahead"
            else load.blocks * arguments.block
        )

    with context:
        started, before = time.perf_counter(), moved_bytes()
        speed = count_for(arguments.seconds, load.go_on if way == "stepping" else None)
        moved = (moved_bytes() - before) / (time.perf_counter() - started)
    load.end()
    return speed, moved


def measure(rig: Rig, arguments: argparse.Namespace) -> dict[str, Any]:
    available = sorted(os.sched_getaffinity(0))
    mine = {available[0]}
    places = {"one core free": set(available[1:]) or mine, "both busy": mine}
    result: dict[str, Any] = {"processors": len(available)}
    os.sched_setaffinity(0, mine)
    for name, theirs in places.items():
        pin_others(theirs)
        kept: dict[str, list[tuple[float, float]]] = {}
        moved: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):
            before = count_for(arguments.seconds)
            for way in (*WAYS, "busy process", "fio", "nothing"):
                if way in WAYS:
                    beside, speed = beside_engine(rig, way, arguments, theirs)
                    moved[way].append(speed)
                elif way == "busy process":
                    with burning(theirs):
                        beside = count_for(arguments.seconds)
                elif way == "fio":
                    with reading(theirs, arguments):
                        beside = count_for(arguments.seconds)
                else:
                    beside = count_for(arguments.seconds)
                after = count_for(arguments.seconds)
                kept.setdefault(way, []).append(
                    (
                        2 * beside.per_second / (before.per_second + after.per_second),
                        2 * beside.per_cpu_second / (before.per_cpu_second + after.per_cpu_second),
                    )
                )
                before = after
        neighbour = statistics.median(share for share, _ in kept["busy process"])
        reader = statistics.median(share for share, _ in kept["fio"])
        result[name] = {
            way: {
                "kept": statistics.median(share for share, _ in each),
                "kept_least": min(share for share, _ in each),
                "kept_most": max(share for share, _ in each),
                "kept_per_cpu_second": statistics.median(share for _, share in each),
                "of_busy_process": statistics.median(share for share, _ in each) / neighbour,
                "of_fio": statistics.median(share for share, _ in each) / reader,
                **({"engine_mb_per_s": statistics.median(moved[way]) / 1e6} if way in WAYS else {}),
            }
            for way, each in kept.items()
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
    (arguments.path / "gil-fio").unlink(missing_ok=True)
    report(document, arguments.output)


if __name__ == "__main__":
    main()
