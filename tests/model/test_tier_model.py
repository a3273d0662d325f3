"""The tier against a plain dict, in any order of calls, faults, crashes and restarts."""

from __future__ import annotations

import os

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvdisk.messages import PathState
from kvdisk.testing import Faults
from tests.model.tier_soak import soak
from tests.model.tier_world import TierWorld

KEYS = st.integers(0, 399)
PREFIX = st.tuples(KEYS, st.integers(1, 60)).map(lambda p: list(range(p[0], min(p[0] + p[1], 400))))
CHANCE = st.sampled_from([0.0, 0.0, 0.05, 0.3])


class TierMachine(RuleBasedStateMachine):
    """Two ranks. Each rule is one call of a serving engine, or one thing that goes wrong."""

    @initialize(seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 2))
    def open(self, seed: int, ranks: int) -> None:
        self.world = TierWorld(seed, ranks=ranks, slots=253, faults=Faults())

    @rule(
        delay=CHANCE,
        load_error=CHANCE,
        store_error=CHANCE,
        timeout=CHANCE,
        bit_flip=CHANCE,
        lost=CHANCE,
        misdirected=CHANCE,
    )
    def change_faults(self, **chances: float) -> None:
        for what, chance in chances.items():
            setattr(self.world.disk.faults, what, chance)

    @rule(keys=PREFIX)
    def store(self, keys: list[int]) -> None:
        self.world.store(keys)

    @rule(keys=PREFIX)
    def load(self, keys: list[int]) -> None:
        self.world.load(keys)

    @rule(keys=PREFIX)
    def lookup(self, keys: list[int]) -> None:
        self.world.lookup(keys)

    @rule(keys=PREFIX)
    def touch(self, keys: list[int]) -> None:
        self.world.scheduler.touch([b"key-%d" % key for key in keys])

    @rule(keys=PREFIX)
    def drop(self, keys: list[int]) -> None:
        self.world.drop(keys)

    @rule()
    def clear(self) -> None:
        self.world.clear()

    @rule(rank=st.integers(0, 1))
    def step(self, rank: int) -> None:
        self.world.step(rank % self.world.ranks)

    @rule()
    def settle(self) -> None:
        self.world.disk.faults.delay = 0
        self.world.settle()

    @rule(crash=st.booleans())
    def restart(self, crash: bool) -> None:
        self.world.restart(crash=crash)

    @rule(rank=st.integers(0, 1), loads=st.booleans(), stores=st.booleans())
    def path_changes(self, rank: int, loads: bool, stores: bool) -> None:
        state = PathState(loads, stores and loads, "test")
        self.world.workers[rank % self.world.ranks].set_paths(state)

    @invariant()
    def nothing_wrong(self) -> None:
        if hasattr(self, "world"):
            assert self.world.wrong == 0
            self.world.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for worker in self.world.workers:
                worker.set_paths(PathState())
            self.world.disk.faults.delay = 0
            self.world.settle()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    max_examples=int(os.environ.get("KVDISK_MODEL_EXAMPLES", "60")),
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
)


def test_a_short_soak_finds_nothing_wrong_and_hits_often() -> None:
    outcome = soak(ops=60_000, seed=11)
    assert outcome.wrong == 0
    assert outcome.hits > 2_000  # or it would prove nothing


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = soak(ops=5_000, seed=3), soak(ops=5_000, seed=3)
    assert (first.ops, first.hits, first.trace) == (second.ops, second.hits, second.trace)
