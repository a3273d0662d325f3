"""What waiting requests will need is evicted last: vLLM's own pool of blocks, and its scheduler."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    make_block_hash_with_group_id,
)

from kvdisk.serving.vllm.waiting import DeviceCache, Waiting
from tests.serving.vllm.below_ram import BLOCK_TOKENS, Engine, Setting, engine_of
from tests.serving.vllm.chunks import broken

pytestmark = pytest.mark.quick


def hashes(name: str, count: int) -> list[bytes]:
    return [f"{name}{number}".encode().ljust(32, b".") for number in range(count)]


def pool_of(*prompts: list[bytes]) -> tuple[BlockPool, DeviceCache]:
    """A device's cache that is full of these prompts, the first of them used longest ago."""
    count = sum(map(len, prompts))
    pool = BlockPool(count + 1, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    taken = pool.get_new_blocks(count)
    for prompt in prompts:
        blocks, taken = taken[: len(prompt)], taken[len(prompt) :]
        for block_hash, block in zip(prompt, blocks, strict=True):
            key = make_block_hash_with_group_id(BlockHash(block_hash), 0)
            pool._insert_block_hash(key, block, None)
        pool.free_blocks(reversed(blocks))
    return pool, DeviceCache(pool, [BLOCK_TOKENS], BLOCK_TOKENS)


def next_evicted(pool: BlockPool) -> list[str]:
    """The blocks that are free, in the order in which they will be taken."""
    free = pool.free_block_queue.get_all_free_blocks()
    assert len(free) == pool.get_num_free_blocks()
    assert all(block.ref_cnt == 0 for block in free)
    return [get_block_hash(block.block_hash).rstrip(b".").decode() for block in free]


def test_what_nobody_waits_for_goes_first() -> None:
    first, second, third = hashes("a", 2), hashes("b", 2), hashes("c", 2)
    pool, device = pool_of(first, second, third)
    waiting = Waiting()
    waiting.arrived("one", first, 0)
    waiting.arrived("two", third, 0)
    device.spare(waiting, BLOCK_TOKENS)
    assert next_evicted(pool) == ["b1", "b0", "c1", "c0", "a1", "a0"]


def test_where_all_is_wanted_the_last_to_come_is_the_first_to_lose() -> None:
    prompts = [hashes(name, 2) for name in "abc"]
    pool, device = pool_of(*prompts)
    waiting = Waiting()
    for prompt in prompts:
        waiting.arrived(str(prompt[0]), prompt, 0)
    for _ in range(2):
        device.spare(waiting, 99 * BLOCK_TOKENS)
        assert next_evicted(pool) == ["c1", "c0", "b1", "b0", "a1", "a0"]


def test_what_is_given_back_meanwhile_goes_first_although_it_was_used_last() -> None:
    prompts = [hashes(name, 2) for name in "abc"]
    pool, device = pool_of(*prompts)
    waiting = Waiting()
    for name, prompt in zip("abc", prompts, strict=True):
        waiting.arrived(name, prompt, 0)
    device.spare(waiting, 2 * BLOCK_TOKENS)
    waiting.gone("a")  # vLLM begins with it, and ends it
    blocks = [pool.get_cached_block(BlockHash(each), [0])[0] for each in prompts[0]]
    pool.touch(blocks)
    pool.free_blocks(reversed(blocks))
    device.spare(waiting, 4 * BLOCK_TOKENS)
    assert next_evicted(pool) == ["a1", "a0", "c1", "c0", "b1", "b0"]


def test_vllms_order_stays_where_nothing_that_is_wanted_would_be_taken() -> None:
    prompts = [hashes(name, 2) for name in "abc"]
    pool, device = pool_of(*prompts)
    waiting = Waiting()
    waiting.arrived("three", prompts[2], 0)
    before = next_evicted(pool)
    device.spare(waiting, 2 * BLOCK_TOKENS)
    assert next_evicted(pool) == before


def test_what_two_wait_for_is_kept_until_both_have_it() -> None:
    shared = hashes("s", 3)
    waiting = Waiting()
    waiting.arrived("one", shared, 16)
    waiting.arrived("two", shared[:2], 0)
    assert [waiting.turn(each) for each in shared] == [1, 1, 1]
    assert (waiting.on_device("one"), waiting.on_device("two")) == (16, 0)
    waiting.gone("one")
    assert [waiting.turn(each) for each in shared] == [1, 1, None]
    waiting.arrived("two", shared, 0)  # the same once more: it counts once
    waiting.gone("two")
    waiting.gone("unknown")
    assert [waiting.turn(each) for each in shared] == [None, None, None]
    assert not waiting
    assert not waiting._wanted
    assert not waiting._turn


def test_how_much_of_a_prompt_the_device_has() -> None:
    prompt = hashes("a", 4)
    pool, device = pool_of(prompt[:2])
    assert device.found_tokens(prompt) == 2 * BLOCK_TOKENS
    assert device.found_tokens(hashes("b", 4)) == 0
    assert device.free_tokens == 2 * BLOCK_TOKENS
    pool.get_new_blocks(1)
    assert device.found_tokens(prompt) == BLOCK_TOKENS  # its tail goes first


# --- vLLM's scheduler above a RAM tier and a disk

PROMPTS, CHUNKS = 8, 8


def drain(engine: Engine) -> None:
    for _ in range(500):
        if engine.idle:
            break
        engine.step(moves_end=2.0)
    assert engine.idle


def scan_twice(engine: Engine) -> int:
    """Prompts one after the other, then all of them at once: how many tokens the GPU had then."""
    tokens = CHUNKS * BLOCK_TOKENS
    engine.chance.random = lambda: 1.0  # type: ignore[method-assign]  # no prompt of its own
    for prefix in range(PROMPTS):
        engine.ask(prefix, tokens, 1)
        drain(engine)
    on_device: dict[str, int] = {}
    find = engine.ours.get_num_new_matched_tokens

    def asked(request: Any, computed: int) -> Any:
        on_device[request.request_id] = computed
        return find(request, computed)

    engine.ours.get_num_new_matched_tokens = asked
    for prefix in range(PROMPTS):
        engine.ask(prefix, tokens, 1)
    drain(engine)
    return sum(on_device.values())


@pytest.mark.parametrize("keep", [True, False])
def test_more_waits_than_the_device_holds(keep: bool, tmp_path: Path) -> None:
    """In the order in which it was computed: by LRU each pushes out what the next would find."""
    setting = Setting(
        gpu_blocks=4 * CHUNKS + 4, ram_rows=16, step_tokens=CHUNKS * BLOCK_TOKENS, keep_waiting=keep
    )
    with engine_of(tmp_path, setting) as engine:
        found = scan_twice(engine)
    assert (found >= 2 * CHUNKS * BLOCK_TOKENS) is keep
    assert keep or found == 0


def test_a_bug_here_leaves_vllms_order_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(DeviceCache, "spare", broken)
    with engine_of(tmp_path, Setting(gpu_blocks=4 * CHUNKS + 4)) as engine:
        scan_twice(engine)
        ours: Any = engine.ours
        assert ours.waiting is None
        assert ours.planner is not None
    assert len([text for text in caplog.messages if "please report it" in text]) == 1
