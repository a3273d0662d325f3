"""Which blocks are given away where vLLM's queue of free ones is longer than is looked at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, get_block_hash

from kvdisk.serving.vllm.waiting import DeviceCache, Waiting
from tests.serving.vllm.pools import BLOCK_TOKENS, hashes, pool_of

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _windows_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._WINDOW_BLOCKS", 8)


class Rig:
    """A device's cache that is full of prompts, used in the order of their names."""

    def __init__(self, waiting: str, **counts: int) -> None:
        self.prompts = {name: hashes(name, count) for name, count in counts.items()}
        self.pool: BlockPool
        self.device: DeviceCache
        self.pool, self.device = pool_of(*self.prompts.values())
        self.waiting = Waiting()
        for name in waiting:
            self.waiting.arrived(name, self.prompts[name])

    def make_room(self, blocks: int, times: int = 1) -> None:
        for _ in range(times):
            self.device.step_ended()
            self.device.evict_waiting_last(self.waiting, (blocks - 1) * BLOCK_TOKENS)

    def use(self, names: Iterable[str]) -> None:
        for name in names:
            self.pool.touch(self._blocks(name))

    def give_back(self, names: Iterable[str]) -> None:
        for name in names:
            self.pool.free_blocks(reversed(self._blocks(name)))

    def _blocks(self, name: str) -> list[Any]:
        return [self.pool.get_cached_block(BlockHash(h), [0])[0] for h in self.prompts[name]]

    def next_evicted(self, blocks: int) -> str:
        free = self.pool.free_block_queue.get_all_free_blocks()[:blocks]
        return " ".join(get_block_hash(b.block_hash).rstrip(b".").decode() for b in free)

    def next_to_lose(self, blocks: int) -> str:
        """Whose they are."""
        return "".join(each[0] for each in self.next_evicted(blocks).split())


SIX = dict.fromkeys("abcdef", 6)


def test_who_waits_no_more_is_looked_for_wherever_his_blocks_lie() -> None:
    rig = Rig("abcdef", **SIX)
    rig.make_room(4, times=9)
    assert rig.next_evicted(4) == "f5 f4 f3 f2"
    rig.waiting.gone("c")
    rig.device.look_afresh()
    rig.make_room(4)
    assert rig.next_to_lose(4) == "cccc"


def test_what_nobody_waits_for_goes_first_and_what_is_wanted_after_it() -> None:
    """First what was used longest ago, then what was given back, the oldest first."""
    rig = Rig("abcdef", x=1, **SIX, y=3)
    rig.use("y")
    rig.make_room(6, times=9)
    assert rig.next_evicted(3) == "x0 f5 f4"
    rig.give_back("y")
    rig.make_room(6)
    assert rig.next_evicted(6) == "x0 y2 y1 y0 f5 f4"


def test_what_was_found_enough_says_that_there_is_more() -> None:
    """The blocks that nobody waits for had a few of what is wanted before each of them."""
    rig = Rig("abcd", a=6, x=2, b=6, y=2, c=6, z=2, d=7, u=10)
    for name in "xyz":
        rig.make_room(2)
        assert rig.next_evicted(2) == f"{name}1 {name}0"
        rig.pool.get_new_blocks(2)
    rig.make_room(9)
    assert rig.next_to_lose(9) == "uuuuuuuuu"


def test_a_little_that_was_all_wanted_says_nothing_of_what_comes_back() -> None:
    rig = Rig("wv", w=12, u=30, v=10)
    rig.use("uv")
    rig.make_room(5, times=9)
    rig.give_back("uv")
    rig.make_room(5)
    assert rig.next_to_lose(5) == "uuuuu"


def test_what_was_given_back_goes_first_where_no_more_may_be_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._STEP_BLOCKS", 10)
    rig = Rig("abcdef", **SIX, x=2)
    rig.make_room(3)
    assert rig.next_evicted(3) == "x1 x0 b3"


def test_what_lies_within_reach_of_both_ends_is_moved_once() -> None:
    """All was wanted, and somebody begins who leaves some of his blocks where they are."""
    rig = Rig("acb", a=4, c=2, b=4)
    rig.make_room(4, times=9)
    assert rig.next_to_lose(10) == "bbbbaaaacc"
    rig.waiting.gone("a")
    rig.make_room(6)
    assert rig.next_evicted(6) == "a3 a2 a1 a0 b3 b2"


@pytest.mark.parametrize(("requests", "blocks"), [(1, 300), (300, 1)])
def test_however_the_blocks_are_shared_out_no_more_is_looked_at_than_in_a_step(
    requests: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One very long prompt, and very many short ones of which no block is left."""
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._STEP_BLOCKS", 100)
    rig = Rig("a", a=300)
    if requests > 1:
        for number in range(requests):
            rig.waiting.arrived(str(number), hashes(f"{number}-", blocks))
    rig.make_room(200, times=50)
    looked: list[bytes] = []
    get = rig.pool.get_cached_block
    monkeypatch.setattr(rig.pool, "get_cached_block", lambda *of: looked.append(of[0]) or get(*of))
    rig.make_room(200)
    assert 0 < len(looked) <= 100
