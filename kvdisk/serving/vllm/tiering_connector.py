"""``KVDiskTieringConnector``: vLLM's offloading connector above a ``KVDiskTier``.

It says whose blocks the tier keeps, how much of a prefix is worth bringing back from the disk,
which rows of the RAM tier are still wanted, and which new blocks are not worth their place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    get_offload_block_hash,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from kvdisk.serving.vllm.allowances import Parts
from kvdisk.serving.vllm.partial_loads import PartialLoads
from kvdisk.serving.vllm.secondary_tier import KVDiskTier, engine_config
from kvdisk.serving.vllm.spec import require_flush_before_zeroing
from kvdisk.serving.vllm.waiting import Waiting, count_first, group_of_heads

# After so many rows of the RAM tier were touched a quarter as many must change before it is done
# again, or so many steps must pass: what is aborted or reset changes nothing that is counted.
_TOUCHES_PER_CHANGE: Final = 4
_TOUCHED_LEAST: Final = 256
_TOUCHED_FOR_STEPS: Final = 64
_LOOKED_MAX: Final = 8192  # rows at a time: ten to thirty milliseconds, if all are to be touched
_KEPT: Final = 0.5  # of the RAM tier: a queue without end must not keep new blocks off the disk
_LOOKS_PER_TOUCH: Final = 4  # as long as it takes
_LOOKS_PER_REQUEST: Final = 8  # as long as finding out about one takes, were it never so short


class KVDiskTieringConnector(PartialLoads, OffloadingConnector):  # type: ignore[misc]
    """See docs/vllm.md for its configuration."""

    _rows_changed: int = 0
    _touch_at_change: int = 0
    _steps_since_touch: int = 1
    _rows_kept: int = 0  # of those that vLLM could evict, when they were touched last

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        require_flush_before_zeroing(vllm_config, kv_cache_config)
        engine_config[:] = [vllm_config]
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            engine_config.clear()
        self._tier: KVDiskTier | None = None
        if self.connector_scheduler is not None:
            tiers = self.connector_scheduler.manager.secondary_tiers
            self._tier = next((each for each in tiers if isinstance(each, KVDiskTier)), None)
        if self._tier is not None:
            self.plan_loads(
                self._tier.config,
                self._tier.token_bytes,
                self._tier.load_rate,
                loads_have_room=False,  # in the device's cache, until they are in the RAM tier
            )
            self._tier.partial_loads = self
            if len(tiers) == 1:  # others may want all of it
                self._admit_stores(self.connector_scheduler.manager)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How much the disk gives is settled when a request is first asked for."""
        find = partial(super().get_num_new_matched_tokens, request, num_computed_tokens)
        answer: tuple[int | None, bool]
        if self._tier is None or request.request_id in self._tier.allowances:
            answer = find()
            return answer
        allowances = self._tier.allowances
        with allowances.looking(request.request_id) as look:
            answer = find()
        found = answer[0]
        if found is None and (
            not look.on_disk or allowances.wait_for_room(request.request_id, look)
        ):
            return None, False  # else nothing was looked up, or something is on its way up already
        if found is None:
            parts = look.parts(num_computed_tokens, request.num_tokens, allowances.room_tokens)
        else:
            parts = Parts(0, found, 0, request.num_tokens - num_computed_tokens - found)
        wanted = self.worth_loading(request, parts.hit, parts.rest, free_tokens=parts.free)
        allowances.allow(request.request_id, look, wanted)
        self._ask_waiting(self._evict_waiting_last_from_ram, None)
        if found is None:
            # Else what is brought up takes the place of what is there of the prompt, which is as
            # old as what is not there any more.
            self._ask_waiting(
                lambda _: self._touch_in_ram(
                    self._keys(request.block_hashes, 0), request.request_id
                ),
                None,
            )
            answer = find()
        return answer

    def _admit_stores(self, manager: Any) -> None:
        """vLLM has no call for which blocks are stored: so the manager's own is replaced."""
        prepare_store = manager.prepare_store

        def prepare_what_fits(keys: Collection[OffloadKey], context: Any) -> Any:
            """What is left out is not asked for again by this request."""
            fitting = self._ask_waiting(lambda it: self._beside_what_waits(it, keys, context), keys)
            return prepare_store(fitting, context)

        manager.prepare_store = prepare_what_fits

    def waits_no_more(self) -> None:
        super().waits_no_more()
        self._touch_at_change = 0

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        self._steps_since_touch += 1
        return meta

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self._rows_changed += self._rows_of(request)

    def found_tokens(self, request_id: str) -> int:
        """Also in the RAM tier, right behind what the device has."""
        on_device = super().found_tokens(request_id)
        return self._ask_waiting(
            lambda it: self._found_in_ram(it, request_id, on_device), on_device
        )

    @property
    def _ram(self) -> Any:
        return self.connector_scheduler.manager.primary_tier

    @property
    def _groups(self) -> Sequence[Any]:
        groups: Sequence[Any] = self.connector_scheduler.config.kv_group_configs
        return groups

    def _rows_of(self, request: Any) -> int:
        hashes = len(request.block_hashes)
        return sum(hashes // group.hashes_per_chunk for group in self._groups)

    def _found_in_ram(self, waiting: Waiting, request_id: str, on_device: int) -> int:
        group = group_of_heads(self._groups)
        if group is None:
            return on_device
        half = self.connector_scheduler
        ram, context = self._ram, half._req_status[request_id].req_context
        before, chunk = on_device // group.tokens_per_chunk, group.hashes_per_chunk
        ends = waiting.hashes(request_id)[(before + 1) * chunk - 1 :: chunk]
        found = count_first(
            len(ends),
            lambda i: (
                ram.lookup(make_offload_key(ends[i], group.group_idx), context)
                is not LookupResult.MISS
            ),
        )
        return max(on_device, int((before + found) * group.tokens_per_chunk))

    def _evict_waiting_last_from_ram(self, waiting: Waiting) -> None:
        """What waits counts as used last there, the first of it as the very last; but what the
        device has too goes before the rest, and of that the first, which stays there the longest.

        Not for every row that comes and may push another out, but for so many of them, and once in
        a step. A policy that learns from each use is left alone.
        """
        assert self._tier is not None
        changed = self._tier.rows_moved + self._rows_changed
        steps, policy = self._steps_since_touch, self._ram._policy
        due = steps and (changed >= self._touch_at_change or steps >= _TOUCHED_FOR_STEPS)
        if not (self._reorders and due and isinstance(policy, LRUCachePolicy)):
            return
        keys: list[OffloadKey] = []
        heads: list[list[OffloadKey]] = []  # what the device has, request by request
        looked = 0
        hashes_per_chunk = max(group.hashes_per_chunk for group in self._groups)
        request_id = ""
        for request_id in islice(waiting, _LOOKED_MAX // _LOOKS_PER_REQUEST):
            found = self._found_on_device(waiting, request_id)
            hashes = waiting.hashes(request_id)[: (_LOOKED_MAX - looked) * hashes_per_chunk]
            rest, head = self._keys(hashes, found), self._keys(hashes, 0, found)
            looked += len(rest) + len(head)
            keys += filter(policy.get, rest)
            heads.append([*filter(policy.get, head)])
            if looked >= _LOOKED_MAX:
                break
        keys = [*dict.fromkeys(chain(keys, *reversed(heads)))]  # each once, as the first has it
        if keys:
            self._touch_in_ram(keys, request_id)
        evictable = sum(policy.get(key).ref_cnt == 0 for key in keys)
        self._rows_kept = min(evictable, int(self._tier.rows * _KEPT))
        self._steps_since_touch = 0
        between = max(len(keys), looked // _LOOKS_PER_TOUCH, self._tier.rows // 2, _TOUCHED_LEAST)
        self._touch_at_change = changed + between // _TOUCHES_PER_CHANGE

    def _beside_what_waits(
        self, waiting: Waiting, keys: Collection[OffloadKey], context: Any
    ) -> Collection[OffloadKey]:
        """Those of a request's ``keys`` for which nothing is given up that others wait for, and
        that leave room for what may still be brought up: up to the first that nobody waits for and
        that finds no other place. Nothing behind it either, now or later.
        """
        assert self._tier is not None
        ram, allowances = self._ram, self._tier.allowances
        request_id = context.req_id
        if not allowances.may_store(request_id):
            self._tier.left_out(len(keys))
            return []
        if not (self._reorders and waiting and isinstance(ram._policy, LRUCachePolicy)):
            return keys
        self._evict_waiting_last_from_ram(waiting)
        if not self._rows_kept:
            return keys
        free = ram._get_num_free_chunks()
        beside = ram._num_evictable_cache_chunks - self._rows_kept - allowances.rows_left
        room = free + max(0, beside)
        position = context.get_offload_key_position
        fitting: set[OffloadKey] = set()
        for key in sorted(keys, key=lambda key: position(key) or 0):
            if ram._policy.get(key) is None:
                room -= 1
                if room < 0 and not waiting.turn(get_offload_block_hash(key)):
                    allowances.cut(request_id)
                    self._tier.left_out(len(keys) - len(fitting))
                    break
            fitting.add(key)
        # In vLLM's order, which is that of the blocks they are copied from.
        return [key for key in keys if key in fitting]

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

    def _touch_in_ram(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """The first of them is evicted last."""
        self._ram.touch(keys, self.connector_scheduler._req_status[request_id].req_context)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._tier is not None:
            self._tier.allowances.settled(request.request_id)  # preempted, it is looked at anew
            self._rows_changed += self._rows_of(request)
        self.settled(request, num_external_tokens)
