"""What waiting requests will need is the last to be evicted.

vLLM evicts what was used longest ago. When more waits than its caches hold, in the order in which
it was computed, that is just what is wanted next. But the queue says what is wanted, so that the
free blocks that nobody waits for are given away first. Nothing is pinned: only the order changes.

(Scheduler-aware eviction, as in CachedAttention: Gao et al., USENIX ATC 2024.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import get_block_hash

from kvdisk import TierConfig

Answer = TypeVar("Answer")

_WINDOW_BLOCKS: Final = 1024  # looked at, at each end of vLLM's queue: half a millisecond
_STEP_BLOCKS: Final = 4096  # and no more in a step of the engine, however many requests begin in it
_LOOKS_PER_REQUEST: Final = 16  # to find the end of what is there of it
_HASHES_MIN: Final = 65_536  # remembered of those that wait, and more for a device that holds more
_HASHES_PER_BLOCK: Final = 8
_COUNTED_AT_ONCE: Final = 2  # requests, when one comes or goes: else the queue is never caught up

logger = init_logger("vllm.kvdisk")


def count_first(count: int, there: Callable[[int], object]) -> int:
    """How long the prefix is for which ``there`` holds; it must not hold again behind that."""
    return bisect_left(range(count), True, key=lambda number: not there(number))


def group_of_heads(groups: Sequence[Any]) -> Any:
    """A KV cache group that says how much of a prompt's head is there: a window keeps its tail."""
    return next((each for each in groups if each.sliding_window_size_in_chunks is None), None)


class Waiting:
    """Requests that vLLM has not begun with, in the order in which they came.

    What is wanted is known of the first of them, as far as ``hashes_max`` hashes go: one that
    several want counts for each, so that what is counted, and a call's time, do not grow with
    the queue.
    """

    def __init__(self, hashes_max: int = _HASHES_MIN) -> None:
        self.hashes_max = hashes_max
        self._hashes: dict[str, Sequence[bytes]] = {}
        self._later: dict[str, None] = {}  # of whom nothing is counted yet
        self._counted: dict[str, tuple[int, Sequence[bytes]]] = {}  # first turn, what is wanted
        self._last_turn = 0
        self._turns: dict[bytes, list[int]] = {}  # of each that wants it, in their order
        self._hashes_counted = 0

    def arrived(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """``hashes``: vLLM's own list of its blocks', which is not copied until it is needed."""
        self.gone(request_id)
        self._hashes[request_id] = hashes
        self._later[request_id] = None
        self._count_more()

    def gone(self, request_id: str) -> None:
        """vLLM has begun with it, or it has ended."""
        self._hashes.pop(request_id, None)
        self._later.pop(request_id, None)
        first_turn, counted = self._counted.pop(request_id, (0, ()))
        self._hashes_counted -= len(counted)
        for turn, block_hash in enumerate(counted, first_turn):
            turns = self._turns[block_hash]
            del turns[bisect_left(turns, turn)]
            if not turns:
                del self._turns[block_hash]
        self._count_more()

    def turn(self, block_hash: bytes) -> int:
        """The greater, the longer until a block is needed, and behind all that come before it in
        its prompt; 0: by nobody who is known to wait.
        """
        turns = self._turns.get(block_hash)
        return turns[0] if turns else 0

    def last_first(self) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Of whom it is known what is wanted: its first turn, and that."""
        yield from reversed(self._counted.values())

    def hashes(self, request_id: str) -> Sequence[bytes]:
        return self._hashes.get(request_id, ())

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._hashes

    def __iter__(self) -> Iterator[str]:
        return iter(self._hashes)

    def _count_more(self) -> None:
        """A few at a time: one that makes room may make it for very many."""
        for request_id in [*islice(self._later, _COUNTED_AT_ONCE)]:
            if self._hashes_counted >= self.hashes_max and self._counted:
                return
            del self._later[request_id]
            hashes = tuple(self._hashes[request_id])
            first_turn = self._last_turn + 1
            self._last_turn += len(hashes)
            self._hashes_counted += len(hashes)
            self._counted[request_id] = first_turn, hashes
            for turn, block_hash in enumerate(hashes, first_turn):
                turns = self._turns.get(block_hash)
                if turns is None:
                    self._turns[block_hash] = [turn]
                else:
                    turns.append(turn)


class _Seen:
    """Free blocks at the head of vLLM's queue."""

    def __init__(self, head: list[tuple[int, Any]], whole: bool) -> None:
        self.head = head  # each with its turn
        self.whole = whole  # there are no others
        self.nobodys = [block for turn, block in head if not turn]
        self.wanted = [block for turn, block in head if turn]
        self.known = whole  # that little but what is wanted is free
        self.given_back: list[Any] | None = None  # at the tail, nobody's; None: not looked for


class DeviceCache:
    """vLLM's pool of blocks on the device, as far as it is asked for here."""

    def __init__(self, pool: Any, groups: Sequence[Any], *, served_as_they_come: bool) -> None:
        """``groups``: vLLM's offloading connector's, one for each KV cache group."""
        self._pool = pool
        self._served_as_they_come = served_as_they_come
        self._blocks_per_token = sum(1 / group.tokens_per_block for group in groups)
        group = group_of_heads(groups)
        self._group: int | None = None if group is None else group.group_idx
        self._block_tokens: int = 0 if group is None else group.tokens_per_block
        self._hashes_per_block = self._block_tokens // pool.hash_block_size
        self._wanted_in_a_row = 0  # seen, less the others: as many as are free once all were
        self._blocks_left = _STEP_BLOCKS

    @property
    def free_tokens(self) -> float:
        """Room for so many, in all groups."""
        return float(self._pool.get_num_free_blocks() / self._blocks_per_token)

    def found_tokens(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's first tokens are there, of which the last go first."""
        return self._found(hashes) * self._block_tokens

    def shared_tokens(self, hashes: Sequence[bytes], other: Sequence[bytes]) -> int:
        """How many of their first tokens two prompts have in common, and may have in one block."""
        if self._group is None:
            return 0
        count = min(len(hashes), len(other))
        shared = count_first(count, lambda number: hashes[number] == other[number])
        return int(shared // self._hashes_per_block * self._block_tokens)

    def evict_waiting_last(self, waiting: Waiting, needed_tokens: float) -> None:
        """Before blocks are taken for so many tokens: those that nobody waits for first, used
        longest ago, as far as the windows show them; then, of what is wanted, what came last, or
        if that may be served first, what vLLM would take.
        """
        if self._blocks_left <= 0:
            return
        needed = int(needed_tokens * self._blocks_per_token) + 1
        queue = self._pool.free_block_queue
        seen = self._look(waiting, needed)
        if seen.given_back is None:
            # What lies behind the window is as good as what is known not to be wanted.
            self._move(seen.wanted, queue.append_n)
            return
        first = self._chosen(waiting, seen, needed)
        if not seen.whole and self._wanted_in_a_row < queue.num_free_blocks:
            self._move(seen.wanted, queue.append_n)  # what nobody waits for may lie further behind
        self._put_first(first)

    def look_afresh(self) -> None:
        """Some of what was wanted is not any more, wherever it lies."""
        self._wanted_in_a_row = 0

    def step_ended(self) -> None:
        """So much may be looked at again."""
        self._blocks_left = _STEP_BLOCKS

    # --- steps of the above

    def _found(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks are there."""
        if self._group is None:
            return 0
        count = len(hashes) // self._hashes_per_block
        return count_first(count, lambda number: self._block(hashes, number))

    def _block(self, hashes: Sequence[bytes], number: int) -> Any:
        """A prompt's block of a number, if it is there."""
        block_hash = hashes[(number + 1) * self._hashes_per_block - 1]
        blocks = self._pool.get_cached_block(block_hash, [self._group])
        return blocks and blocks[0]

    def _look(self, waiting: Waiting, needed: int) -> _Seen:
        """At the head of the queue, and on behind windows of which all is wanted: these are put
        last.
        """
        queue = self._pool.free_block_queue
        given_back: list[Any] | None = None
        while True:
            seen = _Seen(*self._window(waiting, needed, forward=True))
            enough = len(seen.nobodys) == needed
            in_a_row = self._wanted_in_a_row + len(seen.wanted) - len(seen.nobodys)
            self._wanted_in_a_row = 0 if enough else max(0, min(in_a_row, queue.num_free_blocks))
            seen.known = seen.whole or 2 * self._wanted_in_a_row >= queue.num_free_blocks
            if enough or (seen.nobodys and not seen.known):
                return seen
            if given_back is None:  # before what is wanted is moved there
                short = needed - len(seen.nobodys)
                given_back = [] if seen.whole else self._given_back(waiting, short)
            seen.given_back = given_back
            if seen.known or self._blocks_left <= 0:
                return seen
            self._move(seen.wanted, queue.append_n)

    def _chosen(self, waiting: Waiting, seen: _Seen, needed: int) -> list[Any]:
        """What is to go first, so many blocks at most."""
        first = seen.nobodys
        there = {block.block_id for block in first}
        first += [block for block in seen.given_back or () if block.block_id not in there]
        if seen.known and self._served_as_they_come:
            last = seen.head if seen.whole else self._last_wanted(waiting, needed - len(first))
            last = sorted(last, key=lambda each: each[0], reverse=True)
            first += [block for turn, block in last if turn]
        return first[:needed]

    def _put_first(self, blocks: list[Any]) -> None:
        at = self._pool.free_block_queue.fake_free_list_head
        for block in blocks:
            at = at.next_free_block
            if at is not block:
                self._move(blocks, self._pool.free_block_queue.prepend_n)
                return

    def _window(
        self, waiting: Waiting, needed: int, *, forward: bool
    ) -> tuple[list[tuple[int, Any]], bool]:
        """The blocks at one end of the queue, each with its turn, until so many are seen that
        nobody waits for; and whether that is the whole queue.
        """
        queue = self._pool.free_block_queue
        ends = [queue.fake_free_list_head, queue.fake_free_list_tail]
        at, end = ends if forward else reversed(ends)
        seen: list[tuple[int, Any]] = []
        most = min(_WINDOW_BLOCKS, self._blocks_left)
        while len(seen) < most and needed > 0:
            at = at.next_free_block if forward else at.prev_free_block
            if at is end:
                break
            hashed = at.block_hash
            turn = 0 if hashed is None else waiting.turn(get_block_hash(hashed))
            seen.append((turn, at))
            needed -= turn == 0
        self._blocks_left -= len(seen)
        return seen, at is end

    def _given_back(self, waiting: Waiting, needed: int) -> list[Any]:
        """Of what was given back last, what nobody waits for, the oldest first."""
        tail, _ = self._window(waiting, needed, forward=False)
        return [block for turn, block in reversed(tail) if not turn]

    def _last_wanted(self, waiting: Waiting, needed: int) -> list[tuple[int, Any]]:
        """Free blocks of those that came last, each with its turn."""
        found: dict[int, tuple[int, Any]] = {}  # by their ids: none twice
        for turn, block in self._last_first(waiting):
            if len(found) >= needed or self._blocks_left <= 0:
                break
            if block.ref_cnt == 0:
                found[block.block_id] = turn, block
        return [*found.values()]

    def _last_first(self, waiting: Waiting) -> Iterator[tuple[int, Any]]:
        """The blocks of those that came last, of each its tail first, as far as none before it has
        wanted them.
        """
        for first_turn, hashes in waiting.last_first():
            if self._blocks_left <= 0:
                return
            self._blocks_left -= _LOOKS_PER_REQUEST
            for number in reversed(range(self._found(hashes))):
                self._blocks_left -= 1
                block = self._block(hashes, number)
                turn = waiting.turn(get_block_hash(block.block_hash)) if block else 0
                if turn < first_turn:
                    break
                yield turn, block

    def _move(self, blocks: list[Any], put: Callable[[list[Any]], None]) -> None:
        removed: list[Any] = []
        try:
            for block in blocks:
                self._pool.free_block_queue.remove(block)
                removed.append(block)
        finally:
            put(removed)  # none is lost, whatever happens


class KeepWaiting:
    """For the scheduler's half of an offloading connector. Mixed in before vLLM's."""

    connector_scheduler: Any
    _vllm_config: Any
    waiting: Waiting | None = None
    _device: DeviceCache | None = None  # None also where it keeps nothing
    _step_tokens: int = 0  # at most
    _reorders: bool = False

    def keep_waiting(self, config: TierConfig) -> None:
        """From now on."""
        self.waiting = Waiting()
        self._reorders = config.evict_waiting_last

    def found_tokens(self, request_id: str) -> int:
        """How many of the first tokens of one that waits need neither disk nor GPU."""
        return self._ask_waiting(lambda it: self._found_on_device(it, request_id), 0)

    def shared_tokens(self, request_id: str, others: Iterable[Sequence[bytes]]) -> int:
        """The longest head, in tokens, that one that waits has in common with any of these prompts
        (``others``: their hashes). The device's cache has it once it has theirs.
        """
        device = self._device
        if device is None:
            return 0
        return self._ask_waiting(
            lambda it: max(
                (device.shared_tokens(it.hashes(request_id), each) for each in others), default=0
            ),
            0,
        )

    def room_tokens(self) -> float:
        """That the device's cache may be given now."""
        nothing_known = float("inf")
        device = self._device
        if device is None:
            return nothing_known
        return self._ask_waiting(lambda it: device.free_tokens, nothing_known)

    # --- what happens, as vLLM says it

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)  # type: ignore[misc]
        if gpu_block_pool.enable_caching:
            self._ask_waiting(lambda it: self._bind(it, gpu_block_pool), None)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)  # type: ignore[misc]
        # One that may not read the device's cache wants nothing of it.
        hashes = () if request.skip_reading_prefix_cache else request.block_hashes
        self._ask_waiting(lambda it: it.arrived(request.request_id, hashes), None)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """If vLLM goes on with the request, it takes blocks for it right after this."""
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(  # type: ignore[misc]
            request, num_computed_tokens
        )
        if answer[0] is not None:
            self._before_blocks_are_taken(request.num_tokens - num_computed_tokens)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(  # type: ignore[misc]
            request, blocks, num_external_tokens
        )
        self._ask_waiting(lambda it: it.gone(request.request_id), None)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        if self._device is not None:
            self._device.step_ended()
        self._before_blocks_are_taken(self._step_tokens)  # for the next step
        return meta

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._ended(request.request_id)
        return super().request_finished(request, block_ids)  # type: ignore[misc]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._ended(request.request_id)
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]

    def waits_no_more(self) -> None:
        """Somebody has ended who waited: what was found of the caches may be so no more."""
        if self._device is not None:
            self._device.look_afresh()

    # --- steps of the above

    def _ended(self, request_id: str) -> None:
        if self.waiting is not None and request_id in self.waiting:
            self.waits_no_more()
        self._ask_waiting(lambda it: it.gone(request_id), None)

    def _bind(self, waiting: Waiting, pool: Any) -> None:
        scheduling = self._vllm_config.scheduler_config
        self._step_tokens = scheduling.max_num_batched_tokens
        waiting.hashes_max = max(_HASHES_MIN, _HASHES_PER_BLOCK * pool.num_gpu_blocks)
        self._device = DeviceCache(
            pool,
            self.connector_scheduler.config.kv_group_configs,
            served_as_they_come=scheduling.policy == "fcfs",
        )

    def _found_on_device(self, waiting: Waiting, request_id: str) -> int:
        device = self._device
        return 0 if device is None else device.found_tokens(waiting.hashes(request_id))

    def _before_blocks_are_taken(self, tokens: float) -> None:
        device = self._device
        if self._reorders and self.waiting and device is not None:
            self._ask_waiting(lambda it: device.evict_waiting_last(it, tokens), None)

    def _ask_waiting(self, ask: Callable[[Waiting], Answer], otherwise: Answer) -> Answer:
        """What reads vLLM's state may fail; that must not end the engine. Then vLLM's order of
        eviction stays as it is, and nobody who waits is known to the planner.
        """
        if self.waiting is not None:
            try:
                return ask(self.waiting)
            except Exception:
                self.waiting = self._device = None
                logger.exception("kvdisk: this is a bug, please report it; requests go on.")
        return otherwise
