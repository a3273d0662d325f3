"""What waiting requests will need is the last to be evicted.

vLLM evicts what was used longest ago. When more waits than its caches hold, in the order in which
it was computed, that is just what is wanted next: each request pushes out what the one after it
would have found. But the queue says what is wanted. So that goes behind everything else in vLLM's
own order of eviction; nothing is pinned, and no request finds less room than before.

(Scheduler-aware eviction, as in CachedAttention: Gao et al., USENIX ATC 2024.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import get_block_hash

_LOOK_AT_BLOCKS: Final = 8192  # of vLLM's queue at a time: some milliseconds

logger = init_logger("vllm.kvdisk")


class Waiting:
    """Requests that vLLM has not begun with, in the order in which they came."""

    def __init__(self) -> None:
        self._hashes: dict[str, Sequence[bytes]] = {}
        self._on_device: dict[str, int] = {}
        self._wanted: dict[bytes, int] = {}  # by how many of them
        self._turn: dict[bytes, int] = {}  # of the first of them
        self.count = 0  # of all that have come
        self.blocks = 0  # of those

    def arrived(self, request_id: str, hashes: Sequence[bytes], on_device_tokens: int) -> None:
        """With the hashes of its blocks, of whose tokens the device's cache has so many."""
        self.gone(request_id)
        self._hashes[request_id] = hashes = tuple(hashes)
        self._on_device[request_id] = on_device_tokens
        self.count += 1
        self.blocks += len(hashes)
        for block_hash in hashes:
            self._wanted[block_hash] = self._wanted.get(block_hash, 0) + 1
            self._turn.setdefault(block_hash, self.count)

    def gone(self, request_id: str) -> None:
        """vLLM has begun with it, or it has ended."""
        self._on_device.pop(request_id, None)
        for block_hash in self._hashes.pop(request_id, ()):
            self._wanted[block_hash] -= 1
            if not self._wanted[block_hash]:
                del self._wanted[block_hash], self._turn[block_hash]

    def turn(self, block_hash: bytes) -> int | None:
        """Whose turn it is that wants a block, in the order of coming; None: nobody wants it."""
        return self._turn.get(block_hash)

    def hashes(self, request_id: str) -> Sequence[bytes]:
        return self._hashes.get(request_id, ())

    def on_device(self, request_id: str) -> int:
        """How many of its first tokens the device's cache had when it came."""
        return self._on_device.get(request_id, 0)

    def __len__(self) -> int:
        return len(self._hashes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._hashes)


def count_first(count: int, there: Callable[[int], object]) -> int:
    """How many of the first of ``count`` are there, when none is behind one that is not."""
    return bisect_left(range(count), True, key=lambda number: not there(number))


class DeviceCache:
    """vLLM's pool of blocks on the device, as far as it is asked for here."""

    def __init__(self, pool: Any, block_tokens: Sequence[int], hash_tokens: int) -> None:
        """``block_tokens``: of a block of each KV cache group; ``hash_tokens``: of a hash."""
        self._pool = pool
        self._blocks_per_token = sum(1 / tokens for tokens in block_tokens)
        self._hash_tokens = hash_tokens
        self._ordered_for: int | None = None  # how many had come when all was put in order

    @property
    def free_tokens(self) -> float:
        """Room for so many, in all groups."""
        return float(self._pool.get_num_free_blocks() / self._blocks_per_token)

    def found_tokens(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's first tokens are there, of which the last go first."""
        found = count_first(len(hashes), lambda i: self._pool.get_cached_block(hashes[i], [0]))
        return found * self._hash_tokens

    def spare(self, waiting: Waiting, needed_tokens: float) -> None:
        """Let the next blocks that are taken, for so many tokens, be of use to nobody who waits;
        where there are no others, be those of who came last.
        """
        needed = int(needed_tokens * self._blocks_per_token) + 1
        queue = self._pool.free_block_queue
        block, end = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        wanted: list[tuple[int, Any]] = []
        others_behind = False
        for _ in range(_LOOK_AT_BLOCKS):
            if block is end or needed == 0:
                break
            hashed = block.block_hash
            turn = None if hashed is None else waiting.turn(get_block_hash(hashed))
            if turn is None:
                needed -= 1
                others_behind = bool(wanted)
            else:
                wanted.append((turn, block))
            block = block.next_free_block
        if not wanted or (not others_behind and self._ordered_for == waiting.count):
            return
        self._ordered_for = waiting.count if block is end else None
        wanted.sort(key=lambda each: -each[0])  # a request's blocks stay in vLLM's order
        blocks = [block for _, block in wanted]
        self._pool.touch(blocks)
        self._pool.free_blocks(blocks)  # to the end of the queue


class KeepWaiting:
    """For the scheduler's half of an offloading connector. Mixed in before vLLM's."""

    connector_scheduler: Any
    _vllm_config: Any
    waiting: Waiting | None = None
    _device: DeviceCache | None = None  # None also where it keeps nothing
    _step_tokens: int = 0  # at most

    def keep_waiting(self) -> None:
        """From now on."""
        self.waiting = Waiting()

    def found_tokens(self, request_id: str) -> int:
        """How many of the first tokens of one that waits need neither disk nor GPU."""
        if self.waiting is None or self._device is None:
            return 0
        return self._device.found_tokens(self.waiting.hashes(request_id))

    def room_tokens(self) -> float:
        """That the device's cache may be given now."""
        return float("inf") if self._device is None else self._device.free_tokens

    # --- what happens, as vLLM says it

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)  # type: ignore[misc]
        if self.waiting is not None and gpu_block_pool.enable_caching:
            self._step_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
            groups = self.connector_scheduler.config.kv_group_configs
            self._device = DeviceCache(
                gpu_block_pool,
                [group.tokens_per_block for group in groups],
                groups[0].tokens_per_chunk // groups[0].hashes_per_chunk,
            )

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)  # type: ignore[misc]
        self._ask_waiting(lambda it: self._arrived(it, request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """If vLLM goes on with the request, it takes blocks for it right after this."""
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(  # type: ignore[misc]
            request, num_computed_tokens
        )
        if answer[0] is not None:
            self._keep(request.num_tokens - num_computed_tokens)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(  # type: ignore[misc]
            request, blocks, num_external_tokens
        )
        self._ask_waiting(lambda it: it.gone(request.request_id))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        self._keep(self._step_tokens)  # for the next step's
        return meta

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._ask_waiting(lambda it: it.gone(request.request_id))
        return super().request_finished(request, block_ids)  # type: ignore[misc]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._ask_waiting(lambda it: it.gone(request.request_id))
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]

    # --- steps of the above

    def _arrived(self, waiting: Waiting, request: Any) -> None:
        hashes, device = request.block_hashes, self._device
        found = 0 if device is None else device.found_tokens(hashes)
        waiting.arrived(request.request_id, hashes, found)

    def _keep(self, needed_tokens: float) -> None:
        device = self._device
        if self.waiting and device is not None:
            self._ask_waiting(lambda it: device.spare(it, needed_tokens))

    def _ask_waiting(self, ask: Callable[[Waiting], None]) -> None:
        """A bug here must not end the engine: vLLM's order of eviction stays as it is from then."""
        if self.waiting is not None:
            try:
                ask(self.waiting)
            except Exception:
                self.waiting = self._device = None
                logger.exception("kvdisk: this is a bug, please report it; requests go on.")
