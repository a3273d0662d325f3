"""vLLM's RAM tier, as far as it is asked for here: what waits is evicted last there, too, and new
chunks that nobody waits for take no place of what does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from kvdisk.serving.vllm.waiting import Waiting, count_first, group_of_heads

# After so many rows were touched a quarter as many must change before it is done again, or so many
# steps must pass: what is aborted or reset changes nothing that is counted.
_TOUCHES_PER_CHANGE: Final = 4
_TOUCHED_LEAST: Final = 256
_TOUCHED_FOR_STEPS: Final = 64
_NOT_TOUCHED_FOR_STEPS: Final = 8  # if somebody ends in each
_LOOKED_MAX: Final = 8192  # rows at a time: ten milliseconds, if all are to be touched
_KEPT: Final = 0.5  # of the rows: a queue without end must not keep new chunks off the disk
_LOOKS_PER_TOUCH: Final = 4  # as long as it takes
_LOOKS_PER_REQUEST: Final = 8  # as long as finding out about one takes, were it never so short


@dataclass(frozen=True)
class Fitting:
    """What of an offer of new chunks has a place."""

    keys: Collection[OffloadKey]  # in vLLM's order, which is that of the blocks they come from
    cut_token: int | None = None  # where the first ends that has none
    left_out: int = 0  # chunks that are not there and have none


class RamTier:
    """The primary tier of vLLM's tiering manager. Not thread-safe: the scheduler's thread calls."""

    def __init__(
        self,
        primary: Any,
        groups: Sequence[Any],
        rows: int,
        context_of: Callable[[str], ReqContext],
    ) -> None:
        """``groups``: vLLM's offloading connector's, one for each KV cache group. ``context_of`` a
        request, as vLLM's calls ask for it.
        """
        self._primary = primary
        self._groups = groups
        self._rows = rows
        self._context_of = context_of
        self._rows_changed = 0  # that came, or may soon
        self._touch_at_change = 0
        self._touch_at_step = _TOUCHED_FOR_STEPS
        self._steps_since_touch = 1
        self._rows_kept = 0  # of those that vLLM could evict, when they were touched last

    def found_tokens(self, request_id: str, hashes: Sequence[bytes], on_device: int) -> int:
        """How many of a prompt's first tokens the disk is not needed for, nor the GPU."""
        group = group_of_heads(self._groups)
        if group is None:
            return on_device
        context = self._context_of(request_id)
        before, chunk = on_device // group.tokens_per_chunk, group.hashes_per_chunk
        ends = hashes[(before + 1) * chunk - 1 :: chunk]
        found = count_first(
            len(ends),
            lambda i: (
                self._primary.lookup(make_offload_key(ends[i], group.group_idx), context)
                is not LookupResult.MISS
            ),
        )
        return max(on_device, int((before + found) * group.tokens_per_chunk))

    def fitting(
        self, waiting: Waiting, keys: Collection[OffloadKey], context: ReqContext, reserved: int
    ) -> Fitting:
        """Those of a request's ``keys`` for which nothing is given up that others wait for, and
        that leave ``reserved`` rows for what may still be brought up: up to the first that nobody
        waits for and that finds no other place.
        """
        if not self._rows_kept:  # nor where the policy is left alone
            return Fitting(keys)
        free = self._primary._get_num_free_chunks()
        own = sum(self._is_nobodys(key, waiting) for key in keys)  # vLLM gives up none of these
        evictable = self._primary._num_evictable_cache_chunks - own
        room = free + max(0, evictable - self._rows_kept - reserved)
        position = context.get_offload_key_position
        for key in sorted(keys, key=lambda key: position(key) or 0):
            if not self._has(key):
                room -= 1
                if room < 0 and not waiting.turn(get_offload_block_hash(key)):
                    return self.before(position(key) or 0, keys, context)
        return Fitting(keys)

    def before(self, cut_token: int, keys: Collection[OffloadKey], context: ReqContext) -> Fitting:
        """Those of a request's ``keys`` that end before."""
        position = context.get_offload_key_position
        fitting = [key for key in keys if (position(key) or 0) < cut_token]
        left_out = sum(not self._has(key) for key in {*keys}.difference(fitting))
        return Fitting(fitting, cut_token, left_out)

    def evict_waiting_last(self, waiting: Waiting, on_device: Callable[[str], int]) -> None:
        """What waits counts as used last, the first of it as the very last; but what is
        ``on_device`` too, so many tokens of each prompt, goes before the rest, and of that the
        first, which stays there the longest.

        Not for every row that comes and may push another out, but for so many of them, and once in
        a step.
        """
        steps = self._steps_since_touch
        due = self._rows_changed >= self._touch_at_change or steps >= self._touch_at_step
        if not (steps and due and self._is_lru):
            return
        keys: list[OffloadKey] = []
        heads: list[list[OffloadKey]] = []  # what the device has, request by request
        looked = 0
        hashes_per_chunk = max(group.hashes_per_chunk for group in self._groups)
        request_id = ""
        for request_id in islice(waiting, _LOOKED_MAX // _LOOKS_PER_REQUEST):
            found = on_device(request_id)
            hashes = waiting.hashes(request_id)[: (_LOOKED_MAX - looked) * hashes_per_chunk]
            rest, head = self._keys(hashes, found), self._keys(hashes, 0, found)
            looked += len(rest) + len(head)
            keys += filter(self._has, rest)
            heads.append([*filter(self._has, head)])
            if looked >= _LOOKED_MAX:
                break
        keys = [*dict.fromkeys(chain(keys, *reversed(heads)))]  # each once, as the first has it
        self._touch(keys, request_id)
        evictable = sum(self._primary._policy.get(key).ref_cnt == 0 for key in keys)
        self._rows_kept = min(evictable, int(self._rows * _KEPT))
        self._steps_since_touch, self._touch_at_step = 0, _TOUCHED_FOR_STEPS
        between = max(len(keys), looked // _LOOKS_PER_TOUCH, self._rows // 2, _TOUCHED_LEAST)
        self._touch_at_change = self._rows_changed + between // _TOUCHES_PER_CHANGE

    def use(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """What is there of a prompt: what is brought up for it is to take another's place."""
        if self._is_lru:
            self._touch([*filter(self._has, self._keys(hashes, 0))], request_id)

    def changes(self, rows: int) -> None:
        """So many come, or may soon."""
        self._rows_changed += rows

    def changes_for(self, hashes: Sequence[bytes]) -> None:
        """Those of a prompt."""
        self.changes(sum(len(hashes) // group.hashes_per_chunk for group in self._groups))

    def look_afresh(self) -> None:
        """Some of what was wanted is not any more."""
        self._touch_at_step = _NOT_TOUCHED_FOR_STEPS

    def step_ended(self) -> None:
        self._steps_since_touch += 1

    # --- steps of the above

    @property
    def _is_lru(self) -> bool:
        """A policy that learns from each use is left alone."""
        return isinstance(self._primary._policy, LRUCachePolicy)

    def _has(self, key: OffloadKey) -> bool:
        return self._primary._policy.get(key) is not None

    def _is_nobodys(self, key: OffloadKey, waiting: Waiting) -> bool:
        """Whether it is there, could be given up, and nobody waits for it."""
        row = self._primary._policy.get(key)
        return (
            row is not None and row.ref_cnt == 0 and not waiting.turn(get_offload_block_hash(key))
        )

    def _touch(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """The first of them is evicted last."""
        if keys:
            self._primary.touch(keys, self._context_of(request_id))

    def _keys(
        self, hashes: Sequence[bytes], first_token: int, end_token: int | None = None
    ) -> list[OffloadKey]:
        """Of the chunks that end behind the one and not behind the other, in their order."""
        keys = []
        for group in self._groups:
            tokens, chunk = group.tokens_per_chunk, group.hashes_per_chunk
            end = None if end_token is None else end_token // tokens * chunk
            ends = hashes[(first_token // tokens + 1) * chunk - 1 : end : chunk]
            first_end = (first_token // tokens + 1) * tokens
            keys += [
                (first_end + number * tokens, make_offload_key(each, group.group_idx))
                for number, each in enumerate(ends)
            ]
        if len(self._groups) > 1:
            keys.sort(key=lambda each: each[0])
        return [key for _, key in keys]
