"""Lets a ``LoadPlanner`` see what vLLM's scheduler does, and decide how much of a hit is loaded.

Mixed into both of our connectors, before vLLM's: each call is vLLM's own, and passed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from vllm.logger import init_logger

from kvdisk import TierConfig
from kvdisk.load_plan import LOOK_AHEAD, LoadPlanner
from kvdisk.serving.vllm.waiting import KeepWaiting
from kvdisk.transfer import Direction

Answer = TypeVar("Answer")


logger = init_logger("vllm.kvdisk")


class PartialLoads(KeepWaiting):
    """For the scheduler's half of an offloading connector; the workers' has no planner."""

    connector_scheduler: Any
    planner: LoadPlanner | None = None
    _disk_rate: Callable[[Direction], float | None]
    _load_rate_seen: float | None = None
    _on_gpu: int = 0  # tokens that the GPU has already of the request asked for last

    def plan_loads(
        self,
        config: TierConfig,
        token_bytes: float,
        disk_rate: Callable[[Direction], float | None],
        *,
        loads_have_room: bool = True,
    ) -> None:
        """From now on. ``token_bytes``: a token's on one disk, whose ``disk_rate`` is measured."""
        self.planner = LoadPlanner(
            config.partial_loads,
            token_bytes=token_bytes,
            deadline_s=config.load_deadline_ns / 1e9,
            loads_have_room=loads_have_room,
        )
        self._disk_rate = disk_rate
        self._requests: dict[str, Any] = {}  # vLLM's own, of those that have not ended
        self.keep_waiting(config)

    def ask_planner(self, ask: Callable[[LoadPlanner], Answer], otherwise: Answer) -> Answer:
        """A bug in the planner must not end the engine: every hit is loaded whole from then on."""
        if self.planner is not None:
            try:
                return ask(self.planner)
            except Exception:
                self.planner, self._requests = None, {}
                logger.exception("kvdisk: this is a bug, please report it; hits are loaded whole.")
        return otherwise

    def worth_loading(
        self, request: Any, hit_tokens: int, rest_tokens: int, *, free_tokens: int = 0
    ) -> int:
        """As ``LoadPlanner.tokens_to_load`` says, by what the caches now have of those behind."""

        def ask(planner: LoadPlanner) -> int:
            return planner.tokens_to_load(
                request.request_id,
                hit_tokens,
                rest_tokens,
                time.monotonic(),
                free_tokens=free_tokens,
                behind=self._work_behind(planner, request),
                room_tokens=self.room_tokens() - request.num_tokens,
            )

        return self.ask_planner(ask, hit_tokens)

    def load_within_s(self) -> float | None:
        """How long a load that begins now may take; None: as configured."""
        return self.ask_planner(lambda it: it.load_within_s(), None)

    # --- what happens, as our own halves know it

    def load_began(self, request_id: str, tokens: int) -> None:
        self.ask_planner(lambda it: it.load_began(request_id, tokens), None)

    def load_ended(self, request_id: str) -> None:
        self.ask_planner(lambda it: it.load_ended(request_id), None)

    def settled(self, request: Any, found_tokens: int) -> None:
        """As ``update_state_after_alloc`` says it: first what is found, then what came of it."""
        done = request.num_computed_tokens or self._on_gpu + found_tokens
        left = max(0, request.num_tokens - done)
        self.ask_planner(lambda it: it.settled(request.request_id, left), None)

    # --- what happens, as vLLM says it

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self.ask_planner(lambda it: self._arrived(it, request), None)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """If vLLM goes on with the request, then right after this, and from these tokens on."""
        self._on_gpu = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        tokens, now_s = scheduler_output.num_scheduled_tokens, time.monotonic()
        self.ask_planner(lambda it: it.step_began(tokens, now_s), None)
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)  # type: ignore[misc]
        loaded = connector_output.finished_recving or ()
        self.ask_planner(lambda it: self._progressed(it, loaded, time.monotonic()), None)

    def take_events(self) -> Iterable[Any]:
        """The only call of vLLM's for every step whose output is there."""
        now_s = time.monotonic()
        self.ask_planner(lambda it: it.step_ended(now_s), None)
        events: Iterable[Any] = super().take_events()  # type: ignore[misc]
        return events

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self.ask_planner(lambda it: self._gone(it, request), None)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.ask_planner(lambda it: self._gone(it, request), None)
        return super().request_finished_all_groups(request, block_ids)

    # --- steps of the above

    def _work_behind(self, planner: LoadPlanner, request: Any) -> Iterator[int]:
        """Tokens of each of the next that wait: what no cache has and is computed for none before.

        What several want is computed, or loaded, for the first of them; the others wait for that.
        Of those that have begun only the last are compared: a step may ask for hundreds.
        """
        begun = (
            self._requests[each] for each in reversed(planner.unfinished) if each in self._requests
        )
        last_begun = islice(begun, LOOK_AHEAD)
        before = [request.block_hashes, *(each.block_hashes for each in last_begun)]
        waiting = (
            self._requests[each]
            for each in self.waiting or ()
            if each in self._requests and each not in planner.unfinished
        )
        others = (each for each in waiting if each.request_id != request.request_id)
        for other in islice(others, LOOK_AHEAD):
            name = other.request_id
            done = max(self.found_tokens(name), self.shared_tokens(name, before))
            yield max(1, other.num_tokens - done)
            before.append(other.block_hashes)

    def _arrived(self, planner: LoadPlanner, request: Any) -> None:
        self._requests[request.request_id] = request
        planner.arrived(request.request_id)

    def _gone(self, planner: LoadPlanner, request: Any) -> None:
        self._requests.pop(request.request_id, None)
        planner.gone(request.request_id)

    def _progressed(self, planner: LoadPlanner, loaded: Iterable[str], now_s: float) -> None:
        for request_id in loaded:
            planner.load_ended(request_id)
        rate = self._disk_rate(Direction.LOAD)
        if rate is not None and rate != self._load_rate_seen:
            self._load_rate_seen = rate
            planner.measured_loads(rate, now_s)
        planner.measured_stores(self._disk_rate(Direction.STORE) or 0.0)
