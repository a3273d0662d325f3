"""``KVDiskTieringConnector``: vLLM's offloading connector above a ``KVDiskTier``.

It says whose blocks the tier keeps, how much of a prefix is worth bringing back from the disk,
which rows of the RAM tier are still wanted, and which new blocks are not worth their place.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvdisk.serving.vllm.allowances import Allowances, Look, Parts
from kvdisk.serving.vllm.partial_loads import PartialLoads
from kvdisk.serving.vllm.ram_tier import Fitting, RamTier
from kvdisk.serving.vllm.secondary_tier import KVDiskTier, engine_config
from kvdisk.serving.vllm.sessions import SessionsLeftOut
from kvdisk.serving.vllm.spec import require_flush_before_zeroing
from kvdisk.serving.vllm.waiting import Waiting


class KVDiskTieringConnector(PartialLoads, SessionsLeftOut, OffloadingConnector):  # type: ignore[misc]
    """See docs/vllm.md for its configuration."""

    _tier: KVDiskTier | None = None
    _ram: RamTier | None = None  # above it

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        require_flush_before_zeroing(vllm_config, kv_cache_config)
        engine_config[:] = [vllm_config]
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            engine_config.clear()
        if self.connector_scheduler is not None:
            self._bind_tier(self.connector_scheduler)

    def _bind_tier(self, scheduler: Any) -> None:
        manager = scheduler.manager
        tiers = manager.secondary_tiers
        tier = next((each for each in tiers if isinstance(each, KVDiskTier)), None)
        if tier is None:
            return
        self._tier = tier
        self._ram = tier.above = RamTier(
            manager.primary_tier,
            scheduler.config.kv_group_configs,
            tier.rows,
            lambda request_id: scheduler._req_status[request_id].req_context,
        )
        self.plan_loads(
            tier.config,
            tier.token_bytes,
            tier.disk_rate,
            loads_have_room=False,  # in the device's cache, until they are in the RAM tier
        )
        tier.load_listener = self
        if len(tiers) == 1:  # others may want all of it
            # vLLM has no call for which blocks are stored: so the manager's own is replaced.
            manager.prepare_store = partial(self._prepare_what_fits, manager.prepare_store)

    # --- what is brought up

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How much the disk gives is settled when a request is first asked for."""
        find = partial(super().get_num_new_matched_tokens, request, num_computed_tokens)
        answer: tuple[int | None, bool]
        tier = self._tier
        if tier is not None and tier.ask(lambda it: it.must_wait(request.request_id), False):
            return None, False
        if tier is None or request.request_id in tier.allowances:
            answer = find()
            return answer
        with tier.allowances.looking(request.request_id) as look:
            answer = find()
        found = answer[0]
        if found is None and not look.on_disk:  # something is on its way up already
            return answer
        waits = tier.ask(
            lambda it: self._settle(it, look, request, num_computed_tokens, found), False
        )
        if waits:
            return None, False
        if found is None:
            answer = find()
            if answer[0] is not None:  # the RAM tier has no place for what was promised
                self.load_ended(request.request_id)
        return answer

    def _settle(
        self,
        allowances: Allowances,
        look: Look,
        request: Any,
        computed_tokens: int,
        found_tokens: int | None,
    ) -> bool:
        """What a request may have of the disk; or whether it waits until there is room for that."""
        request_id = request.request_id
        if found_tokens is None:
            if allowances.wait_for_room(request_id, look):
                return True
            parts = look.parts(computed_tokens, request.num_tokens, allowances.room_tokens)
        else:
            rest = request.num_tokens - computed_tokens - found_tokens
            parts = Parts(0, found_tokens, 0, rest)
        wanted = self.worth_loading(request, parts.hit, parts.rest, free_tokens=parts.free)
        allowances.allow(request_id, look, wanted)
        self._before_rows_are_taken()
        if found_tokens is None and self._ram is not None:
            # Else what is brought up takes the place of what is there of the prompt, which is as
            # old as what is not there any more.
            self._ram.use(request_id, request.block_hashes)
        return False

    def found_tokens(self, request_id: str) -> int:
        """Also in the RAM tier, right behind what the device has."""
        on_device, ram = super().found_tokens(request_id), self._ram
        if ram is None:
            return on_device
        return self._ask_waiting(
            lambda it: ram.found_tokens(request_id, it.hashes(request_id), on_device), on_device
        )

    # --- what is stored

    def _prepare_what_fits(
        self, prepare_store: Any, keys: Collection[OffloadKey], context: ReqContext
    ) -> Any:
        """vLLM offers again what it cannot take, but not what is left out here."""
        fitting = self._ask_waiting(
            lambda it: self._beside_what_waits(it, keys, context), Fitting(keys)
        )
        answer = prepare_store(fitting.keys, context)
        if answer is not None and fitting.cut_token is not None and self._tier is not None:
            self._tier.left_out(context.req_id, fitting.cut_token, fitting.left_out)
        return answer

    def _beside_what_waits(
        self, waiting: Waiting, keys: Collection[OffloadKey], context: ReqContext
    ) -> Fitting:
        """Nothing either of what lies behind something that was left out before."""
        assert self._tier is not None
        assert self._ram is not None
        allowances = self._tier.allowances
        cut_token = allowances.cut_token(context.req_id)
        if cut_token is not None:
            return self._ram.before(cut_token, keys, context)
        if not (self._reorders and waiting):
            return Fitting(keys)
        self._before_rows_are_taken()
        return self._ram.fitting(waiting, keys, context, reserved=allowances.rows_left)

    def _before_rows_are_taken(self) -> None:
        ram = self._ram
        if self._reorders and ram is not None:
            self._ask_waiting(
                lambda it: ram.evict_waiting_last(it, partial(self._found_on_device, it)), None
            )

    # --- what happens, as vLLM says it

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self._rows_change_for(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._tier is not None:  # preempted, it is looked at anew
            self._tier.ask(lambda it: it.settled(request.request_id), None)
        self._rows_change_for(request)
        self.settled(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        if self._tier is not None and self._ram is not None:
            self._ram.step_ended()
            self._tier.ask(lambda it: it.step_ended(), None)
        return meta

    def waits_no_more(self) -> None:
        super().waits_no_more()
        if self._ram is not None:
            self._ram.look_afresh()

    def _rows_change_for(self, request: Any) -> None:
        if self._ram is not None:
            self._ram.changes_for(request.block_hashes)
