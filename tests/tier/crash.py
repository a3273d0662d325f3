"""Kills a process that stores blocks, at a random moment, again and again, and verifies each time.

    python -m tests.tier.crash --crashes 300 --seed 1

A child fills, evicts, drops, overwrites and clears a tier on real files, and says through a pipe
what it is about to do; it is killed with SIGKILL. Then another process opens the files, loads every
key and compares every byte. Options (block size, paths, backend, shards, size) change every ten
crashes, files stay in between. The last line is what counts:

    crashes=300 wrong_bytes=0 survived=99.9%

``survived`` is the share of the blocks that were readable when the child was last heard of. What
is chosen follows from the seed; where in the disk's work the kill falls is the machine's business.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.tier.tier_rig import KIB, Block, TierRig, WrongBytes, key_of

CRASHES_PER_WORLD = 10
LANES, LANE_BLOCKS = 8, 16
GENERATIONS_PER_LIFE = 1_000_000


@dataclass
class World:
    """Files, how they are opened, and what the parent knows that may be in them."""

    paths: list[Path]
    slots: int
    options: dict[str, Any]
    keys: list[bytes]
    legal: dict[bytes, set[int]] = field(default_factory=lambda: defaultdict(set))
    expected: set[int] = field(default_factory=set)  # numbers of keys that should be there
    life: int = 0

    @classmethod
    def choose(cls, chooser: random.Random, directory: Path) -> World:
        paths = [directory / f"path-{n}" for n in range(chooser.choice([1, 1, 1, 2]))]
        slots = chooser.choice([32, 64, 128])
        options = {
            "block_bytes": chooser.choice([32 * KIB, 36 * KIB + 64, 64 * KIB, 256 * KIB]),
            "backend": chooser.choice(["uring", "uring", "threads"]),
            "shards": chooser.choice([1, 1, 2]),
            "eviction": chooser.choice(["lru", "s3fifo"]),
            "merge_bytes": chooser.choice([4 * KIB, 1024 * KIB]),
            "iodepth": chooser.choice([2, 8, 32]),
            "direct": chooser.choice(["auto", "auto", "off"]),
        }
        keys = [key_of(number) for number in range(2 * slots * len(paths))]
        return cls(paths, slots, options, keys)

    def open(self, rig: type[TierRig] = TierRig) -> TierRig:
        return rig(
            *self.paths,
            slots=self.slots,
            blocks=LANES * LANE_BLOCKS,
            legal=self.legal,
            ring_bytes=len(self.paths) * 8 << 20,
            **self.options,
        )


# --- the process that is killed


class Writer:
    """Works for ever, and says what it does before it does it."""

    def __init__(self, world: World, seed: int, report: Callable[[str], None]) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._report = report
        self._generation = world.life * GENERATIONS_PER_LIFE
        self._lanes: dict[int, int] = {}  # lanes in use, by transfer
        self._rig = world.open()
        self._rig.missed_rows_are_untouched = False  # there are clears

    def run(self, steps: int | None = None) -> TierRig:
        """``steps`` of it, or endlessly."""
        self._report("opened")
        self._report_readable()
        done = 0
        while steps is None or done < steps:
            done += 1
            self._step()
        return self._rig

    def _step(self) -> None:
        rig, chosen = self._rig, self._random.random()
        if chosen < 0.004:
            self._clear()
        elif chosen < 0.06:
            numbers = self._some_keys()
            self._report(f"drop {_join(numbers)}")
            rig.tier.drop([self._world.keys[n] for n in numbers])
        else:
            lane = next((n for n in range(LANES) if n not in self._lanes.values()), None)
            if lane is None:
                rig.tier.wait(1.0)
            else:
                self._lanes[self._move(lane, store=chosen < 0.75)] = lane
        rig.poll()
        for transfer_id in [each for each in self._lanes if each in rig.results]:
            del self._lanes[transfer_id], rig.results[transfer_id]
        self._report_readable()

    def _move(self, lane: int, *, store: bool) -> int:
        numbers = self._some_keys()
        keys = [self._world.keys[n] for n in numbers]
        if not store:
            return self._rig.submit_load(keys, lane * LANE_BLOCKS)
        self._generation += 1
        self._report(f"store {self._generation} {_join(numbers)}")
        return self._rig.submit_store(keys, self._generation, lane * LANE_BLOCKS)

    def _clear(self) -> None:
        self._report("clear")
        durable = self._rig.tier.clear(60.0)
        assert durable, "a healthy disk takes a clear"
        self._report("cleared")
        self._rig.finish_all()  # what was loaded before the clear is legal
        self._world.legal.clear()

    def _some_keys(self) -> list[int]:
        count = self._random.randrange(1, LANE_BLOCKS + 1)
        first = self._random.randrange(len(self._world.keys) - count + 1)
        if self._random.random() < 0.5:
            return list(range(first, first + count))
        return self._random.sample(range(len(self._world.keys)), count)

    def _report_readable(self) -> None:
        mask = self._rig.tier.readable(self._world.keys)
        self._report(f"readable {np.packbits(mask).tobytes().hex()}")


def _join(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


# --- the parent


def understand(world: World, lines: list[str]) -> None:
    """Bring ``legal`` and ``expected`` up to date with what a dead writer said."""
    for line in lines:
        word, *rest = line.split(" ")
        if word == "store":
            for number in rest[1].split(","):
                world.legal[world.keys[int(number)]].add(int(rest[0]))
        elif word == "readable":
            bits = np.unpackbits(np.frombuffer(bytes.fromhex(rest[0]), np.uint8))
            world.expected = set(np.flatnonzero(bits[: len(world.keys)]).tolist())
        elif word == "drop":
            world.expected -= set(map(int, rest[0].split(",")))
        elif word == "clear":
            world.expected = set()
        elif word == "cleared":
            world.legal.clear()
        elif word == "failed":
            raise SystemExit(f"the writer failed: {line}")


class CountingRig(TierRig):
    """Counts wrong bytes instead of stopping at them."""

    wrong = 0

    def delivered(self, key: bytes, block: Block) -> None:
        try:
            super().delivered(key, block)
        except WrongBytes as error:
            self.wrong += 1
            print(f"WRONG BYTES: {error}", file=sys.stderr, flush=True)


def verify(world: World) -> dict[str, Any]:
    """Open, load every key, compare every byte, recount."""
    rig = world.open(CountingRig)
    assert isinstance(rig, CountingRig)
    found: list[int] = []
    for first in range(0, len(world.keys), LANES * LANE_BLOCKS):
        keys = world.keys[first : first + LANES * LANE_BLOCKS]
        statuses = rig.load(keys)
        found += [first + n for n, status in enumerate(statuses) if status == 1]
    rig.tier.check()
    misses = rig.tier.stats().counters.misses
    rig.close()
    return {"wrong": rig.wrong, "found": found, "corrupt": misses["corrupt"]}


def in_child(work: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    """Fork; the child's process id and the descriptor from which its lines can be read."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    status = 1
    try:
        os.close(reader)
        work(lambda line: _write_whole(writer, line))
        status = 0
    except BaseException as error:
        _write_whole(writer, f"failed {type(error).__name__}: {error}".replace("\n", " "))
    finally:
        os._exit(status)


def _write_whole(descriptor: int, line: str) -> None:
    rest = line.encode() + b"\n"
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class Lines:
    """What a child says, line by line; a line cut off by its death is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""
        self.all: list[str] = []
        self.ended = False

    def read(self, until_s: float | None = None) -> None:
        """Wait for more, no longer than ``until_s`` (monotonic)."""
        left = None if until_s is None else max(0.0, until_s - time.monotonic())
        if not select.select([self._descriptor], [], [], left)[0]:
            return
        more = os.read(self._descriptor, 1 << 16)
        self.ended = not more
        *whole, self._buffer = (self._buffer + more).split(b"\n")
        self.all += [line.decode() for line in whole]

    def rest(self) -> None:
        while not self.ended:
            self.read()
        os.close(self._descriptor)


def crash_once(world: World, chooser: random.Random) -> list[str]:
    """Let a writer live for a while; what it said before it was killed."""
    world.life += 1
    seed = chooser.randrange(1 << 30)
    child, descriptor = in_child(lambda report: Writer(world, seed, report).run() and None)
    lines = Lines(descriptor)
    kind = chooser.random()
    if kind < 0.1:  # most likely while it opens
        time.sleep(chooser.uniform(0, 0.1))
    elif kind < 0.5:  # just after it said what it is about to do
        count = chooser.randrange(2, 300)
        while len(lines.all) < count and not lines.ended:
            lines.read()
    else:
        while not lines.all and not lines.ended:
            lines.read()
        until_s = time.monotonic() + chooser.uniform(0, 0.4)
        while time.monotonic() < until_s and not lines.ended:
            lines.read(until_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lines.rest()
    return lines.all


def verify_in_child(world: World) -> dict[str, Any]:
    child, descriptor = in_child(lambda report: report(json.dumps(verify(world))))
    lines = Lines(descriptor)
    lines.rest()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status or not lines.all:
        raise SystemExit(f"opening or verifying failed ({status}): {lines.all}")
    answer: dict[str, Any] = json.loads(lines.all[-1])
    return answer


@dataclass
class Totals:
    crashes: int = 0
    wrong: int = 0
    expected: int = 0
    survived: int = 0
    found: int = 0
    corrupt: int = 0
    stores: int = 0
    clears: int = 0

    def add(self, world: World, lines: list[str], answer: dict[str, Any]) -> None:
        self.crashes += 1
        self.wrong += answer["wrong"]
        self.expected += len(world.expected)
        self.survived += len(world.expected & set(answer["found"]))
        self.found += len(answer["found"])
        self.corrupt += answer["corrupt"]
        self.stores += sum(line.startswith("store ") for line in lines)
        self.clears += sum(line == "cleared" for line in lines)

    @property
    def survived_percent(self) -> float:
        return 100 * self.survived / max(1, self.expected)


def campaign(crashes: int, seed: int, directory: Path) -> Totals:
    totals, chooser = Totals(), random.Random(seed)
    while totals.crashes < crashes:
        files = Path(tempfile.mkdtemp(prefix="world-", dir=directory))
        world = World.choose(chooser, files)
        print(f"world {totals.crashes // CRASHES_PER_WORLD}: {world.slots} slots {world.options}")
        for _ in range(min(CRASHES_PER_WORLD, crashes - totals.crashes)):
            lines = crash_once(world, chooser)
            understand(world, lines)
            answer = verify_in_child(world)
            totals.add(world, lines, answer)
            world.expected = set(answer["found"])
            if chooser.random() < 0.2:  # the limit changes at the next start
                world.slots = chooser.choice([32, 48, 64, 128])
                world.expected = set()
        shutil.rmtree(files)
        print(f"  {totals}", flush=True)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--crashes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path("build/crash"))
    options = parser.parse_args()
    logging.getLogger("kvdisk").setLevel(logging.ERROR)  # what is damaged is told by us
    options.directory.mkdir(parents=True, exist_ok=True)
    print(f"crash: crashes={options.crashes} seed={options.seed}", flush=True)
    totals = campaign(options.crashes, options.seed, options.directory)
    print(f"blocks found={totals.found} overwritten when killed={totals.corrupt}")
    print(
        f"crashes={totals.crashes} wrong_bytes={totals.wrong} "
        f"survived={totals.survived_percent:.1f}%"
    )
    sys.exit(totals.wrong > 0)


if __name__ == "__main__":
    main()
