"""``KVDiskTieringConnector``: vLLM's offloading connector above a ``KVDiskTier``.

It says whose blocks the tier keeps, how much of a prefix is worth bringing back from the disk, and
which rows of the RAM tier are still wanted.
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

# What waits is touched again when rows have come, begun or been moved: a change for so many.
_TOUCHES_PER_CHANGE: Final = 4
_TOUCHED_LEAST: Final = 256
_LOOKED_MAX: Final = 8192  # rows at a time: ten milliseconds, if all are there to be touched
_LOOKS_PER_TOUCH: Final = 4  # as long as it takes
_LOOKS_PER_REQUEST: Final = 8  # as long as finding out about one takes, were it never so short


class KVDiskTieringConnector(PartialLoads, OffloadingConnector):  # type: ignore[misc]
    """See docs/vllm.md for its configuration."""

    _touch_again_at: int = 0  # so many changes
    _touched: bool = False  # in this step
    _rows_changed: int = 0
    _rows_kept: int = 0  # of the RAM tier, for those that wait

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
            manager = self.connector_scheduler.manager
            self._store_in_ram = manager.prepare_store
            manager.prepare_store = self._prepare_store

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
        if found is None and (not look.on_disk or allowances.must_wait(request.request_id, look)):
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

    def _prepare_store(self, keys: Collection[OffloadKey], context: Any) -> Any:
        """In place of the manager's. What is left out is not asked for again by this request."""
        admitted = self._ask_waiting(lambda it: self._beside_what_waits(it, keys), keys)
        return self._store_in_ram(admitted, context)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        self._touched = False
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
        policy = self._ram._policy
        due = changed >= self._touch_again_at and not self._touched
        if not (self._reorders and due and isinstance(policy, LRUCachePolicy)):
            return
        keys: list[OffloadKey] = []
        heads: list[list[OffloadKey]] = []  # what the device has, request by request
        looked = kept = 0
        hashes_per_chunk = max(group.hashes_per_chunk for group in self._groups)
        request_id = None
        for request_id in islice(waiting, _LOOKED_MAX // _LOOKS_PER_REQUEST):
            found = self._found_on_device(waiting, request_id)
            hashes = waiting.hashes(request_id)[: (_LOOKED_MAX - looked) * hashes_per_chunk]
            rest, head = self._keys(hashes, found), self._keys(hashes, 0, found)
            looked += len(rest) + len(head)
            rest, head = [*filter(policy.get, rest)], [*filter(policy.get, head)]
            keys += rest
            heads.append(head)
            if request_id not in self._tier.allowances:  # else it has its room beside
                kept += len(rest) + len(head)
            if looked >= _LOOKED_MAX:
                break
        keys += chain.from_iterable(reversed(heads))
        if request_id:
            self._touch_in_ram(keys, request_id)
        self._rows_kept, self._touched = kept, True
        between = max(len(keys), looked // _LOOKS_PER_TOUCH, self._tier.rows // 2, _TOUCHED_LEAST)
        self._touch_again_at = changed + between // _TOUCHES_PER_CHANGE

    def _beside_what_waits(
        self, waiting: Waiting, keys: Collection[OffloadKey]
    ) -> Collection[OffloadKey]:
        """Those of ``keys`` for which nothing is given up that waits, as far as that is kept, and
        that leave room for what will be brought up.
        """
        assert self._tier is not None
        ram = self._ram
        if not (self._reorders and waiting and isinstance(ram._policy, LRUCachePolicy)):
            return keys
        self._evict_waiting_last_from_ram(waiting)
        kept = self._rows_kept and self._rows_kept + self._tier.allowances.room_rows
        room = ram._get_num_free_chunks() + ram._num_evictable_cache_chunks - kept
        if not kept or len(keys) <= room:
            return keys
        admitted = []
        for key in keys:
            if ram._policy.get(key) is None and not waiting.turn(get_offload_block_hash(key)):
                room -= 1
                if room < 0:
                    continue
            admitted.append(key)
        return admitted

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
