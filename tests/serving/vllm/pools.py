"""vLLM's own pool of blocks, and who waits for them: for tests and a benchmark with no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvdisk.serving.vllm.waiting import DeviceCache, Waiting

BLOCK_TOKENS = 16


def hashes(name: str, count: int) -> list[bytes]:
    return [f"{name}{number}".encode().ljust(32, b".") for number in range(count)]


def group(index: int, tokens: int, window: int | None = None) -> Any:
    return SimpleNamespace(
        group_idx=index, tokens_per_block=tokens, sliding_window_size_in_chunks=window
    )


def cache(pool: BlockPool, blocks: list[Any], prompt: list[bytes], group: int = 0) -> None:
    for block_hash, block in zip(prompt, blocks, strict=True):
        key = make_block_hash_with_group_id(BlockHash(block_hash), group)
        pool._insert_block_hash(key, block, None)


def pool_of(*prompts: list[bytes]) -> tuple[BlockPool, DeviceCache]:
    """A device's cache that is full of these prompts, the first of them used longest ago."""
    count = sum(map(len, prompts))
    pool = BlockPool((count or 9) + 1, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    taken = pool.get_new_blocks(count)
    for prompt in prompts:
        blocks, taken = taken[: len(prompt)], taken[len(prompt) :]
        cache(pool, blocks, prompt)
        pool.free_blocks(reversed(blocks))
    return pool, DeviceCache(pool, [group(0, BLOCK_TOKENS)], served_as_they_come=True)


def waiting_for(**prompts: list[bytes]) -> Waiting:
    waiting = Waiting()
    for name, prompt in prompts.items():
        waiting.arrived(name, prompt)
    return waiting
