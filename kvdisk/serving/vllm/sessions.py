"""Requests whose prompt grows while they live (vLLM's streaming input) take no part in the tier.

To a connector vLLM tells of each of their turns as of a new request, with all of its blocks. Its
offloading connector adds those to what it has of the turn before, so that one block's bytes would
be stored as another's; and among its keys is that of a block that ended in a token which vLLM takes
back. (Read in vLLM 0.32 and 0.33: ``OffloadingConnectorScheduler._update_req_states`` and
``Scheduler._update_request_as_session``.)
"""

from __future__ import annotations

from typing import Any


class SessionsLeftOut:
    """For the scheduler's half of an offloading connector. Mixed in before vLLM's."""

    connector_scheduler: Any

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)  # type: ignore[misc]
        if request.resumable:
            state = self.connector_scheduler._req_status[request.request_id]
            state.max_load_tokens = state.max_offload_tokens = 0

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What vLLM calls new comes with all of its blocks."""
        for new in scheduler_output.scheduled_new_reqs:
            for group in self.connector_scheduler._req_status[new.req_id].group_states:
                group.block_ids.clear()
        return super().build_connector_meta(scheduler_output)  # type: ignore[misc]
