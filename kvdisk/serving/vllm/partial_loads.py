"""Lets a ``LoadPlanner`` see what vLLM's scheduler does, and decide how much of a hit is loaded.

Mixed into both of our connectors, before vLLM's: each call is vLLM's own, and passed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvdisk import TierConfig
from kvdisk.load_plan import LoadPlanner


class PartialLoads:
    """For the scheduler's half of an offloading connector; the workers' has no planner."""

    connector_scheduler: Any
    planner: LoadPlanner | None = None
    _load_rate: Callable[[], float | None]
    _load_rate_seen: float | None = None

    def plan_loads(
        self, config: TierConfig, token_bytes: float, load_rate: Callable[[], float | None]
    ) -> None:
        """From now on. ``token_bytes``: a token's on one disk, whose ``load_rate`` is measured."""
        self.planner = LoadPlanner(
            config.partial_loads,
            token_bytes=token_bytes,
            queue_limit_s=config.load_deadline_ns / 2e9,
        )
        self._load_rate = load_rate

    # --- what happens

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)  # type: ignore[misc]
        if self.planner is not None:
            self.planner.arrived(request.request_id, request.num_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if self.planner is not None:
            self.planner.step_began(scheduler_output.num_scheduled_tokens, time.monotonic())
        return super().build_connector_meta(scheduler_output)  # type: ignore[misc]

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)  # type: ignore[misc]
        if self.planner is None:
            return
        now_s = time.monotonic()
        self.planner.step_ended(now_s)
        for request_id in connector_output.finished_recving or ():
            self.planner.load_ended(request_id)
        rate = self._load_rate()
        if rate is not None and rate != self._load_rate_seen:
            self._load_rate_seen = rate
            self.planner.measured_loads(rate, now_s)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        if self.planner is not None:
            self.planner.gone(request.request_id)
        return super().request_finished(request, block_ids)  # type: ignore[misc]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if self.planner is not None:
            self.planner.gone(request.request_id)
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]
