"""Which blocks vLLM's pool gives away first, also where its queue is longer than is looked at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    make_block_hash_with_group_id,
)

from kvdisk.serving.vllm.waiting import DeviceCache, Waiting
from tests.serving.vllm.chunks import broken
from tests.serving.vllm.pools import BLOCK_TOKENS, cache, group, hashes, pool_of, waiting_for

pytestmark = pytest.mark.quick


@pytest.fixture
def _windows_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._WINDOW_BLOCKS", 8)


windows_of_eight = pytest.mark.usefixtures("_windows_of_eight")


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


@windows_of_eight
def test_who_waits_no_more_is_looked_for_wherever_his_blocks_lie() -> None:
    rig = Rig("abcdef", **SIX)
    rig.make_room(4, times=9)
    assert rig.next_evicted(4) == "f5 f4 f3 f2"
    rig.waiting.gone("c")
    rig.device.look_afresh()
    rig.make_room(4)
    assert rig.next_to_lose(4) == "cccc"


@windows_of_eight
def test_what_nobody_waits_for_goes_first_and_what_is_wanted_after_it() -> None:
    """First what was used longest ago, then what was given back, the oldest first."""
    rig = Rig("abcdef", x=1, **SIX, y=3)
    rig.use("y")
    rig.make_room(6, times=9)
    assert rig.next_evicted(3) == "x0 f5 f4"
    rig.give_back("y")
    rig.make_room(6)
    assert rig.next_evicted(6) == "x0 y2 y1 y0 f5 f4"


@windows_of_eight
def test_what_was_found_enough_says_that_there_is_more() -> None:
    """The blocks that nobody waits for had a few of what is wanted before each of them."""
    rig = Rig("abcd", a=6, x=2, b=6, y=2, c=6, z=2, d=7, u=10)
    for name in "xyz":
        rig.make_room(2)
        assert rig.next_evicted(2) == f"{name}1 {name}0"
        rig.pool.get_new_blocks(2)
    rig.make_room(9)
    assert rig.next_to_lose(9) == "uuuuuuuuu"


@windows_of_eight
def test_a_little_that_was_all_wanted_says_nothing_of_what_comes_back() -> None:
    rig = Rig("wv", w=12, u=30, v=10)
    rig.use("uv")
    rig.make_room(5, times=9)
    rig.give_back("uv")
    rig.make_room(5)
    assert rig.next_to_lose(5) == "uuuuu"


@windows_of_eight
def test_what_was_given_back_goes_first_where_no_more_may_be_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._STEP_BLOCKS", 10)
    rig = Rig("abcdef", **SIX, x=2)
    rig.make_room(3)
    assert rig.next_evicted(3) == "x1 x0 b3"


@windows_of_eight
def test_what_lies_within_reach_of_both_ends_is_moved_once() -> None:
    """All was wanted, and somebody begins who leaves some of his blocks where they are."""
    rig = Rig("acb", a=4, c=2, b=4)
    rig.make_room(4, times=9)
    assert rig.next_to_lose(10) == "bbbbaaaacc"
    rig.waiting.gone("a")
    rig.make_room(6)
    assert rig.next_evicted(6) == "a3 a2 a1 a0 b3 b2"


@windows_of_eight
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


# --- without a rig


def next_evicted(pool: BlockPool) -> list[str]:
    """The blocks that are free, in the order in which they will be taken."""
    free = pool.free_block_queue.get_all_free_blocks()
    assert len(free) == pool.get_num_free_blocks()
    assert all(block.ref_cnt == 0 for block in free)
    return [get_block_hash(block.block_hash).rstrip(b".").decode() for block in free]


def test_what_nobody_waits_for_goes_first() -> None:
    first, second, third = hashes("a", 2), hashes("b", 2), hashes("c", 2)
    pool, device = pool_of(first, second, third)
    device.evict_waiting_last(waiting_for(one=first, two=third), BLOCK_TOKENS)
    assert next_evicted(pool) == ["b1", "b0", "c1", "c0", "a1", "a0"]


def test_where_all_is_wanted_the_last_to_come_is_the_first_to_lose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = {name: hashes(name, 2) for name in "abc"}
    pool, device = pool_of(*prompts.values())
    waiting = waiting_for(**prompts)
    device.evict_waiting_last(waiting, 99 * BLOCK_TOKENS)
    assert next_evicted(pool) == ["c1", "c0", "b1", "b0", "a1", "a0"]
    monkeypatch.setattr(device, "_move", broken)
    device.evict_waiting_last(waiting, 99 * BLOCK_TOKENS)  # nothing is moved for nothing


def test_where_the_last_may_be_served_first_vllms_order_stays_among_them() -> None:
    prompts = {name: hashes(name, 2) for name in "abcd"}
    pool, _ = pool_of(*prompts.values())
    device = DeviceCache(pool, [group(0, BLOCK_TOKENS)], served_as_they_come=False)
    del prompts["c"]
    device.evict_waiting_last(waiting_for(**prompts), 99 * BLOCK_TOKENS)
    assert next_evicted(pool) == ["c1", "c0", "a1", "a0", "b1", "b0", "d1", "d0"]


def test_what_is_given_back_meanwhile_goes_first_although_it_was_used_last() -> None:
    prompts = {name: hashes(name, 2) for name in "abc"}
    pool, device = pool_of(*prompts.values())
    waiting = waiting_for(**prompts)
    device.evict_waiting_last(waiting, 2 * BLOCK_TOKENS)
    waiting.gone("a")  # vLLM begins with it, and ends it
    blocks = [pool.get_cached_block(BlockHash(each), [0])[0] for each in prompts["a"]]
    pool.touch(blocks)
    pool.free_blocks(reversed(blocks))
    device.evict_waiting_last(waiting, 3 * BLOCK_TOKENS)
    assert next_evicted(pool) == ["a1", "a0", "c1", "c0", "b1", "b0"]


def test_vllms_order_stays_where_nothing_that_is_wanted_would_be_taken() -> None:
    prompts = [hashes(name, 2) for name in "abc"]
    pool, device = pool_of(*prompts)
    before = next_evicted(pool)
    device.evict_waiting_last(waiting_for(three=prompts[2]), 2 * BLOCK_TOKENS)
    assert next_evicted(pool) == before


@windows_of_eight
@pytest.mark.parametrize("place", [0, 3, 7, 10])
def test_a_queue_longer_than_is_looked_at(place: int) -> None:
    """What nobody waits for is found after some calls, each of which looks at a part alone."""
    wanted = {name: hashes(name, 6) for name in "abcdefghij"}
    prompts = [*wanted.values()]
    prompts.insert(place, hashes("x", 6))
    pool, device = pool_of(*prompts)
    waiting = waiting_for(**wanted)
    for _ in range(20):
        device.step_ended()
        device.evict_waiting_last(waiting, 4 * BLOCK_TOKENS)
    assert {each[0] for each in next_evicted(pool)[:5]} == {"x"}
    assert len(next_evicted(pool)) == 11 * 6


@windows_of_eight
def test_of_those_that_share_a_document_each_one_s_own_goes_first() -> None:
    document, own = hashes("s", 30), {name: hashes(name, 1) for name in "abcdef"}
    pool, device = pool_of(document, *own.values())
    device.evict_waiting_last(
        waiting_for(**{name: document + mine for name, mine in own.items()}), 9 * BLOCK_TOKENS
    )
    assert next_evicted(pool)[:8] == ["f0", "e0", "d0", "c0", "b0", "a0", "s29", "s28"]


@windows_of_eight
def test_of_a_long_queue_of_which_all_is_wanted_the_last_goes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four documents were lost while the rest of the queue was looked at, one for each look."""
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._STEP_BLOCKS", 44)  # half of it, and some
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._LOOKS_PER_REQUEST", 1)
    wanted = {name: hashes(name, 6) for name in "abcdefgh"}
    pool, device = pool_of(*wanted.values())
    waiting = waiting_for(**wanted)
    for last in ("h5h4h3h2h1h0", "g5g4g3g2g1g0"):
        device.evict_waiting_last(waiting, 5 * BLOCK_TOKENS)
        assert "".join(next_evicted(pool)[:6]) == last
        pool.get_new_blocks(6)
        device.step_ended()


@windows_of_eight
def test_a_long_queue_of_which_all_is_wanted_comes_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {name: hashes(name, 6) for name in "abcdef"}
    pool, device = pool_of(*wanted.values())
    waiting = waiting_for(**wanted)
    for _ in range(9):
        device.evict_waiting_last(waiting, 3 * BLOCK_TOKENS)
    assert {each[0] for each in next_evicted(pool)[:4]} == {"f"}
    monkeypatch.setattr(device, "_move", broken)
    device.evict_waiting_last(waiting, 3 * BLOCK_TOKENS)


@windows_of_eight
@pytest.mark.parametrize("steps_blocks", [4096, 12])
def test_a_need_beyond_what_is_looked_at_takes_nothing_that_is_wanted(
    steps_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by an attack: a load of more blocks than a window took what was wanted."""
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._STEP_BLOCKS", steps_blocks)
    wanted = {name: hashes(name, 4) for name in "ab"}
    pool, device = pool_of(wanted["a"], *(hashes(name, 10) for name in "uvwxyz"), wanted["b"])
    for _ in range(30):
        device.step_ended()
        device.evict_waiting_last(waiting_for(**wanted), 40 * BLOCK_TOKENS)
    unwanted = [name for name in "uvwxyz" for _ in range(10)]
    assert [each[0] for each in next_evicted(pool)[:41]] == unwanted[:41]


@windows_of_eight
def test_what_lies_behind_a_window_that_is_in_order_is_put_first_too() -> None:
    wanted = {name: hashes(name, 6) for name in "abcdef"}
    pool, device = pool_of(*(wanted[name] for name in "feabcd"))
    heads = [pool.get_cached_block(BlockHash(each), [0])[0] for each in wanted["e"][:4]]
    pool.touch(heads)
    pool.free_blocks(reversed(heads))
    device._wanted_in_a_row = pool.get_num_free_blocks()  # all were looked at before
    device.evict_waiting_last(waiting_for(**wanted), 11 * BLOCK_TOKENS)
    assert "".join(next_evicted(pool)[:12]) == "f5f4f3f2f1f0e5e4e3e2e1e0"


def test_what_is_in_use_costs_no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many questions on a document that one decodes on, and a device that is full otherwise."""
    document = hashes("d", 200)
    pool, device = pool_of(document, hashes("x", 20))
    pool.touch([pool.get_cached_block(BlockHash(each), [0])[0] for each in document])
    waiting = Waiting()
    for number in range(64):
        waiting.arrived(f"r{number}", [*document, *hashes(f"q{number}", 2)])
    looked: list[bytes] = []
    get = pool.get_cached_block
    monkeypatch.setattr(pool, "get_cached_block", lambda *of: looked.append(of[0]) or get(*of))
    device.evict_waiting_last(waiting, 150 * BLOCK_TOKENS)
    assert not looked


@windows_of_eight
def test_of_those_that_came_last_no_more_is_looked_at_than_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._STEP_BLOCKS", 100)
    wanted = {name: hashes(name, 50) for name in "abcdef"}
    pool, device = pool_of(*wanted.values())
    waiting = waiting_for(**wanted)
    looked: list[bytes] = []
    for _ in range(60):
        device.step_ended()
        device.evict_waiting_last(waiting, 290 * BLOCK_TOKENS)
    get = pool.get_cached_block
    monkeypatch.setattr(pool, "get_cached_block", lambda *of: looked.append(of[0]) or get(*of))
    device.step_ended()
    device.evict_waiting_last(waiting, 290 * BLOCK_TOKENS)
    assert 50 < len(looked) <= 100 + 6 * 8  # and a few to find each one's end


def test_a_block_of_two_hashes_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._WINDOW_BLOCKS", 2)
    prompt = hashes("a", 6)
    pool, device = pool_of(prompt[:5])
    (last,) = pool.get_cached_block(BlockHash(prompt[4]), [0])
    key = make_block_hash_with_group_id(BlockHash(prompt[5]), 0)
    pool.cached_block_hash_to_block.insert(key, last)
    for _ in range(9):
        device.step_ended()
        device.evict_waiting_last(waiting_for(one=prompt), 3 * BLOCK_TOKENS)
    assert next_evicted(pool)[:2] == ["a4", "a3"]


def test_an_exception_amid_a_move_loses_no_block() -> None:
    prompts = {name: hashes(name, 6) for name in "abc"}
    pool, device = pool_of(*prompts.values())
    (odd,) = pool.get_cached_block(BlockHash(prompts["c"][2]), [0])
    pool.free_block_queue.remove(odd)  # somebody holds it without a reference
    free = pool.get_num_free_blocks()
    with pytest.raises(RuntimeError):
        device._move([odd.prev_free_block or pool.blocks[1], odd], pool.free_block_queue.append_n)
    assert len(next_evicted(pool)) == pool.get_num_free_blocks() == free


def test_however_many_requests_begin_in_a_step_no_more_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._STEP_BLOCKS", 20)
    wanted = {name: hashes(name, 6) for name in "abc"}
    _, device = pool_of(*wanted.values())
    waiting = waiting_for(**wanted)
    looked: list[bytes] = []
    turn = waiting.turn
    monkeypatch.setattr(waiting, "turn", lambda each: looked.append(each) or turn(each))
    monkeypatch.setattr(device, "_last_wanted", lambda *_: [])
    for _ in range(2):
        device.step_ended()
        for _ in range(50):
            device.evict_waiting_last(waiting, BLOCK_TOKENS)
    assert len(looked) == 2 * 20


def test_of_what_came_last_the_tail_goes_first_wherever_it_lies() -> None:
    first, last = hashes("a", 3), hashes("b", 6)
    pool, device = pool_of(last, first)
    heads = [pool.get_cached_block(BlockHash(each), [0])[0] for each in last[:3]]
    pool.touch(heads)
    pool.free_blocks(reversed(heads))
    assert next_evicted(pool) == ["b5", "b4", "b3", "a2", "a1", "a0", "b2", "b1", "b0"]
    device.evict_waiting_last(waiting_for(one=first, two=last), 4 * BLOCK_TOKENS)
    assert next_evicted(pool) == ["b5", "b4", "b3", "b2", "b1", "a2", "a1", "a0", "b0"]


def test_what_one_asked_for_before_and_the_last_asks_for_again_goes_first() -> None:
    """Two questions on one document, and one on another between them."""
    first, second = hashes("a", 3), hashes("b", 3)
    pool, device = pool_of(first, second)
    waiting = waiting_for(one=first, two=second, three=first)
    waiting.gone("one")
    device.evict_waiting_last(waiting, 2 * BLOCK_TOKENS)
    assert next_evicted(pool) == ["a2", "a1", "a0", "b2", "b1", "b0"]


def test_how_much_of_a_prompt_the_device_has() -> None:
    prompt = hashes("a", 4)
    pool, device = pool_of(prompt[:2])
    assert device.found_tokens(prompt) == 2 * BLOCK_TOKENS
    assert device.found_tokens(hashes("b", 4)) == 0
    assert device.free_tokens == 2 * BLOCK_TOKENS
    pool.get_new_blocks(1)
    assert device.found_tokens(prompt) == BLOCK_TOKENS  # its tail goes first


def test_how_much_where_a_block_has_several_hashes_and_a_window_keeps_tails() -> None:
    prompt = hashes("a", 8)
    window, whole = group(0, BLOCK_TOKENS, window=2), group(3, 2 * BLOCK_TOKENS)
    pool, _ = pool_of()
    for number in (1, 3, 5):
        cache(pool, pool.get_new_blocks(1), [prompt[number]], group=3)
    cache(pool, pool.get_new_blocks(1), [prompt[7]], group=0)
    both = DeviceCache(pool, [window, whole], served_as_they_come=True)
    assert both.found_tokens(prompt) == 6 * BLOCK_TOKENS
    assert DeviceCache(pool, [window], served_as_they_come=True).found_tokens(prompt) == 0
    free = pool.get_num_free_blocks()
    assert both.free_tokens == pytest.approx(free * BLOCK_TOKENS / 1.5)


def test_what_is_in_use_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._WINDOW_BLOCKS", 4)
    wanted = {name: hashes(name, 6) for name in "abc"}
    pool, device = pool_of(*wanted.values())
    pool.touch([pool.get_cached_block(BlockHash(each), [0])[0] for each in wanted["c"][:3]])
    for _ in range(9):
        device.step_ended()
        device.evict_waiting_last(waiting_for(**wanted), 4 * BLOCK_TOKENS)
    assert next_evicted(pool)[:5] == ["c5", "c4", "c3", "b5", "b4"]
