"""Millions of operations of the tier on simulated disks, from a seed.

    python -m tests.model.tier_soak --ops 10000000 --seed 1

An operation is one block of one store or load, over all ranks. The last line says how many there
were and how many gave wrong bytes; the exit status is 1 if any did.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from dataclasses import dataclass

from kvdisk.testing import Faults
from tests.model.tier_world import TierWorld

KEYS = 600
WORLDS_OPS = 200_000  # then a new world, with other faults


@dataclass(frozen=True)
class Outcome:
    ops: int
    hits: int
    wrong: int
    restarts: int
    trace: str


def soak(ops: int, seed: int, *, progress: bool = False) -> Outcome:
    """Run until ``ops`` operations; every invariant is asserted on the way."""
    chance = random.Random(seed)
    trace = hashlib.blake2b(digest_size=8)
    done = hits = wrong = restarts = 0
    while done < ops:
        world = _new_world(chance)
        while world.ops < min(WORLDS_OPS, ops - done):
            restarts += _one_call(world, chance)
            trace.update(b"%d %d" % (world.ops, world.hits))
        world.disk.faults.delay = 0
        world.settle()
        done, hits, wrong = done + world.ops, hits + world.hits, wrong + world.wrong
        if progress:
            print(f"{done} ops, {hits} hits, {wrong} wrong", flush=True)
    return Outcome(done, hits, wrong, restarts, trace.hexdigest())


def _new_world(chance: random.Random) -> TierWorld:
    def one_of() -> float:
        return chance.choice([0.0, 0.0, 0.001, 0.01, 0.05])

    faults = Faults(*(one_of() for _ in range(7)))
    return TierWorld(chance.getrandbits(32), ranks=chance.choice([1, 2, 3]), faults=faults)


def _one_call(world: TierWorld, chance: random.Random) -> int:
    first = chance.randrange(KEYS) if chance.random() < 0.3 else chance.randrange(150)
    keys = list(range(first, min(KEYS, first + chance.randrange(1, 64))))
    what = chance.random()
    if what < 0.25:
        world.store(keys)
    elif what < 0.55:
        world.load(keys)
    elif what < 0.95:
        world.step(chance.randrange(world.ranks))
    elif what < 0.97:
        world.lookup(keys)
    elif what < 0.99:
        world.drop(keys[:3])
    elif what < 0.996:
        world.clear()
    else:
        world.restart(crash=chance.random() < 0.5)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.monotonic()
    outcome = soak(arguments.ops, arguments.seed, progress=True)
    minutes = (time.monotonic() - started) / 60
    print(
        f"seed={arguments.seed} ops={outcome.ops} hits={outcome.hits} "
        f"restarts={outcome.restarts} wrong_bytes={outcome.wrong} trace={outcome.trace} "
        f"ops_per_minute={outcome.ops / minutes:.0f}"
    )
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
