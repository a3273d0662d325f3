"""``KVDiskTieringConnector``: vLLM's offloading connector above a ``KVDiskTier``.

It says whose blocks the tier keeps, how much of a prefix is worth bringing back from the disk, and
which rows of the RAM tier are still wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from kvdisk.serving.vllm.allowances import Parts
from kvdisk.serving.vllm.partial_loads import PartialLoads
from kvdisk.serving.vllm.secondary_tier import KVDiskTier, engine_config
from kvdisk.serving.vllm.spec import require_flush_before_zeroing
from kvdisk.serving.vllm.waiting import Waiting, count_first

_KEPT_BEHIND: Final = 16  # this share of the RAM tier may come before what waits is touched again
_TOUCHED_MAX: Final = 16384  # rows at a time, some milliseconds


class KVDiskTieringConnector(PartialLoads, OffloadingConnector):  # type: ignore[misc]
    """See docs/vllm.md for its configuration."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        require_flush_before_zeroing(vllm_config, kv_cache_config)
        engine_config[:] = [vllm_config]
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            engine_config.clear()
        self._tier: KVDiskTier | None = None
        self._kept_in_ram_at = 0
        if self.connector_scheduler is not None:
            tiers = self.connector_scheduler.manager.secondary_tiers
            self._tier = next((each for each in tiers if isinstance(each, KVDiskTier)), None)
        if self._tier is not None:
            self.plan_loads(self._tier.config, self._tier.token_bytes, self._tier.load_rate)
            self._tier.partial_loads = self

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
        if found is None and (not look.on_disk or allowances.must_wait(look)):
            return None, False  # else nothing was looked up, or something is on its way up already
        if found is None:
            parts = look.parts(num_computed_tokens, request.num_tokens, allowances.room_tokens)
        else:
            parts = Parts(0, found, 0, request.num_tokens - num_computed_tokens - found)
        wanted = self.worth_loading(
            request.request_id, parts.hit, parts.rest, free_tokens=parts.free
        )
        allowances.allow(request.request_id, look, wanted)
        self._ask_waiting(self._keep_in_ram)
        if found is None:
            # Else what is brought up takes the place of what is there of the prompt, which is as
            # old as what is not there any more.
            self.ask_planner(lambda it: self._touch_in_ram([request.request_id]), None)
            answer = find()
        return answer

    def found_tokens(self, request_id: str) -> int:
        """Also in the RAM tier, right behind what the device has."""
        on_device = super().found_tokens(request_id)
        half = self.connector_scheduler
        status = half._req_status[request_id]
        status.update_offload_keys()
        chunk_tokens: int = half.config.kv_group_configs[0].tokens_per_chunk
        keys = status.group_states[0].offload_keys[on_device // chunk_tokens :]
        ram, context = half.manager.primary_tier, status.req_context
        in_ram = count_first(
            len(keys), lambda i: ram.lookup(keys[i], context) is not LookupResult.MISS
        )
        return max(on_device, (on_device // chunk_tokens + in_ram) * chunk_tokens)

    def _keep_in_ram(self, waiting: Waiting) -> None:
        """What waits counts as used last there, the first of it as the very last; but what the
        device has too goes before the rest, and of that the first, which stays there the longest.

        Not for every row that comes and may push another out, but for so many of them.
        """
        assert self._tier is not None
        changed = self._tier.rows_moved + waiting.blocks
        if changed - self._kept_in_ram_at >= self._tier.rows // _KEPT_BEHIND:
            self._kept_in_ram_at = changed
            there = [each for each in waiting if waiting.on_device(each)]
            self._touch_in_ram(
                [*(each for each in waiting if not waiting.on_device(each)), *reversed(there)]
            )

    def _touch_in_ram(self, request_ids: Iterable[str]) -> None:
        half = self.connector_scheduler
        keys: list[OffloadKey] = []
        context = None
        for request_id in request_ids:
            status = half._req_status[request_id]
            status.update_offload_keys()
            keys += chain.from_iterable(group.offload_keys for group in status.group_states)
            context = status.req_context
            if len(keys) >= _TOUCHED_MAX:
                break
        if keys:
            half.manager.primary_tier.touch(keys, context)  # the last of them first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._tier is not None:
            self._tier.allowances.settled(request.request_id)  # preempted, it is looked at anew
        self.settled(request, num_external_tokens)
