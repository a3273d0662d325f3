"""Everything at once, at random, on the real worker: two disks that fail, hang, lie and go away.

    python -m tests.tier.storm --steps 20000 --seed 1

Each step is one call of a serving engine or one change of what a disk does (``fuse_disk``). Clears,
restarts and starts without one of the disks are among them. What is judged: a load that is OK has
right bytes of the present generation, every transfer ends, nothing raises, slots add up; and once
both disks are well again all of it is in service. The last line says how many wrong bytes there
were; needs root and /dev/fuse.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvdisk.transfer import Direction, RowStatus
from tests.faults.fuse_disk import FuseDisk, fuse_disk
from tests.tier.tier_rig import KIB, MIB, PATIENCE_S, TierRig, WrongBytes, keys_of, ok
from tests.tier.waiting import Clock, rounds_until

LANES, LANE_BLOCKS = 8, 16
KEYS = 160
CLEAR_S = 0.02
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EAGAIN)
TROUBLES = ("errors", "hang", "lies", "stop")


@dataclass
class Totals:
    """What was done, and how loads and stores ended."""

    steps: int = 0
    restarts: int = 0
    clears: int = 0
    wrong: int = 0
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)

    def of(self, direction: Direction, status: RowStatus) -> int:
        return self.statuses[direction.name, status.name]


class Storm:
    """A tier on two such disks. ``generation`` counts clears: what is older must not be found.

    A disk that is left out at a start learns of clears at the next start beside one that saw them.
    """

    def __init__(self, disks: list[FuseDisk], seed: int) -> None:
        self.chance = random.Random(seed)
        self.disks = disks
        self.clock = Clock()
        self.generation = 0
        self.totals = Totals()
        self.stored: dict[bytes, set[int]] = {}  # generations of each key, up to the last start
        self.seen = [0] * len(disks)  # the generation whose clear each disk's files saw last
        self.lanes: dict[int, int] = {}  # by transfer
        self.rig = self.open()

    def open(self) -> TierRig:
        rig = TierRig(
            *(disk.mount / "kv" for disk in self.disks),
            slots=64,
            block_bytes=16 * KIB,
            blocks=LANES * LANE_BLOCKS,
            ring_bytes=2 * MIB,
            clock=self.clock,
            load_deadline_ns=150_000_000,
            store_deadline_ns=300_000_000,
            store_wait_ns=100_000_000,
        )
        rig.missed_rows_are_untouched = False  # a clear makes misses of what was loaded
        there = list(rig.tier._worker._paths)
        floor = max(self.seen[index] for index in there)
        for index in there:
            self.seen[index] = floor
        for key, generations in self.stored.items():
            rig.legal[key] = {each for each in generations if each >= floor}
        return rig

    # --- what an engine does

    def step(self) -> None:
        self.totals.steps += 1
        calls = (self.store, self.load, self.look, self.drop, self.trouble, self.heal, self.clear)
        weights = (30, 30, 20, 3, 6, 4, 0.7)
        self.chance.choices((*calls, self.restart), (*weights, 0.7))[0]()
        self.take(self.chance.choice((0, 0, 0.01, 0.05)))
        if self.totals.steps % 50 == 0:
            self.rig.tier.check()

    def some_keys(self) -> list[bytes]:
        first = self.chance.randrange(KEYS)
        return keys_of(range(first, first + self.chance.randrange(1, LANE_BLOCKS)))

    def free_lane(self) -> int | None:
        free = set(range(LANES)) - set(self.lanes.values())
        return self.chance.choice(sorted(free)) if free else None

    def store(self) -> None:
        lane = self.free_lane()
        if lane is not None:
            first = lane * LANE_BLOCKS
            transfer_id = self.rig.submit_store(self.some_keys(), self.generation, first)
            self.lanes[transfer_id] = lane

    def load(self) -> None:
        lane = self.free_lane()
        if lane is not None:
            transfer_id = self.rig.submit_load(self.some_keys(), lane * LANE_BLOCKS)
            self.lanes[transfer_id] = lane

    def look(self) -> None:
        keys = self.some_keys()
        assert 0 <= self.rig.tier.lookup(keys) <= len(keys)
        self.rig.tier.touch(keys)
        self.clock.ahead_s += self.chance.choice((0, 0.1, 1.0))

    def drop(self) -> None:
        keys = self.some_keys()
        self.rig.tier.drop(keys)
        assert not self.rig.tier.readable(keys).any()

    def clear(self) -> None:
        self.totals.clears += 1
        self.generation += 1
        self.remember()
        self.rig.legal.clear()
        self.rig.tier.clear(timeout_s=CLEAR_S)
        for index in self.rig.tier._worker._paths:
            self.seen[index] = self.generation
        assert self.rig.tier.lookup(keys_of(0)) == 0

    def remember(self) -> None:
        for key, generations in self.rig.legal.items():
            self.stored.setdefault(key, set()).update(generations)

    def take(self, wait_s: float) -> None:
        self.rig.tier.wait(wait_s)
        self.rig.poll()
        for transfer_id in [each for each in self.lanes if each in self.rig.results]:
            del self.lanes[transfer_id]
            result = self.rig.results.pop(transfer_id)
            names = [RowStatus(status).name for status in result.statuses.tolist()]
            self.totals.statuses.update((result.direction.name, name) for name in names)

    # --- what disks do

    def trouble(self) -> None:
        disk, what = self.chance.choice(self.disks), self.chance.choice(TROUBLES)
        if what == "errors":
            kind = self.chance.choice(("read_error", "write_error", "flush_error"))
            often = self.chance.choice((1, 4, 20))
            disk.faults.set(**{kind: self.chance.choice(ERRORS)}, error_every=often)
        elif what == "hang":
            disk.faults.set(**{self.chance.choice(("read", "write", "flush")) + "_hangs": 1})
        elif what == "lies":
            disk.faults.set(**{self.chance.choice(("flips", "losses", "shorts")): 5})
        else:
            disk.stop()

    def heal(self) -> None:
        disk = self.chance.choice(self.disks)
        disk.go_on()
        disk.faults.clear()

    def all_well(self) -> None:
        """The disks answer, and so all that was held comes back into service."""
        for disk in self.disks:
            disk.go_on()
            disk.faults.clear()
        rig = self.rig

        def in_service() -> bool:
            self.take(0)
            return at_rest(rig) and all(self.is_well(index) for index in range(len(self.disks)))

        rounds_until(rig, self.clock, in_service)
        rig.tier.check()

    def is_well(self, index: int) -> bool:
        state = self.rig.tier.health().paths[index]
        left_out = index not in self.rig.tier._worker._paths  # since the start: for good
        return left_out or (state.loads and state.stores)

    def restart(self) -> None:
        self.totals.restarts += 1
        self.all_well()  # so every clear is durable
        assert self.rig.close() == 0, "a disk that is well held up the end"
        self.remember()
        away = self.chance.choice((None, None, *self.disks))
        if away is not None:
            away.faults.set(write_error=errno.EIO)
        self.rig = self.open()
        self.take(0)

    def meet(self, direction: Direction, **faults: int) -> None:
        """A transfer while both disks have ``faults``, however chance and the machine were."""
        self.all_well()
        keys = keys_of(range(6000, 6004))
        if direction is Direction.LOAD:
            assert self.rig.store(keys, self.generation) == ok(4)
        for disk in self.disks:
            disk.faults.set(**faults)
        submit = self.rig.submit_load if direction is Direction.LOAD else self.rig.submit_store
        transfer_id = submit(keys)
        self.lanes[transfer_id] = 0
        until = time.monotonic() + PATIENCE_S
        while transfer_id in self.lanes:
            assert time.monotonic() < until, "a transfer did not end"
            self.take(0.05)

    def end(self) -> Totals:
        self.all_well()
        self.rig.tier.clear(timeout_s=PATIENCE_S)
        self.rig.legal.clear()
        last = keys_of(range(5000, 5016))
        assert self.rig.store(last, self.generation + 1) == ok(16)
        assert self.rig.load(last) == ok(16)
        self.rig.close()
        return self.totals


def at_rest(rig: TierRig) -> bool:
    """Nothing is under way or held; for ever false when a buffer or a slot was lost."""
    stats, slots = rig.tier.stats(), rig.tier.stats().slots
    held = slots.pinned + slots.storing + slots.abandoned + slots.retired + slots.quarantined
    buffers = stats.engine_sum("ring_used") + stats.engine_sum("ring_quarantined")
    return held == buffers == stats.open_transfers == 0


def campaign(steps: int, seed: int, directory: Path, *, progress: bool = False) -> Totals:
    """``steps`` steps from ``seed``; raises where an invariant breaks, counts wrong bytes."""
    with contextlib.ExitStack() as undo:
        disks = [undo.enter_context(fuse_disk(directory, name)) for name in ("one", "two")]
        storm = Storm(disks, seed)
        undo.callback(lambda: storm.rig.close(0))
        for step in range(steps):
            try:
                storm.step()
            except WrongBytes as error:
                storm.totals.wrong += 1
                print(f"seed={seed} step={step}: {error}", file=sys.stderr)
            if progress and (step + 1) % 1000 == 0:
                print(f"{step + 1} steps, {storm.totals.wrong} wrong", flush=True)
        storm.meet(Direction.STORE, write_hangs=1)
        storm.meet(Direction.LOAD, read_hangs=1)
        storm.meet(Direction.LOAD, flips=1)
        return storm.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="build") as directory:
        totals = campaign(arguments.steps, arguments.seed, Path(directory), progress=True)
    for (direction, status), count in sorted(totals.statuses.items()):
        print(f"{direction.lower()} {status.lower()}: {count}")
    print(
        f"seed={arguments.seed} steps={totals.steps} restarts={totals.restarts} "
        f"clears={totals.clears} wrong_bytes={totals.wrong} "
        f"seconds={time.monotonic() - began:.0f}"
    )
    return 1 if totals.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
