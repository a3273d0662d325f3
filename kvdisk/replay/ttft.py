"""The model behind every time to first token here, plain enough to be checked by hand.

One server computes prompts, one request after another, at a constant number of tokens a second.
Whenever it is free, ``LoadPlanner`` says how much of their hits those load that have arrived, by
what it is told of each load and each prompt, one step of the server. A part of a hit takes that
part of its time, and the rest is computed. A request is ready for the server when what it loads is
there, and its first token comes when the tokens that were not loaded, at least one, are computed:

    ready = end of its load                     start = max(ready, end of the one served before)
    end = start + computed / prefill rate       time to first token = end - arrival

Of those that are ready the one that came first is served, as by vLLM's scheduler; who loads nothing
is ready at once. The model leaves out decoding that shares the server, batching, that a token late
in a long prompt costs more than an early one, deadlines of loads, and that prompts which wait may
have something in common.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from kvdisk.config import PartialLoads, TierConfig
from kvdisk.load_plan import LOOK_AHEAD, LoadPlanner
from kvdisk.replay.trace import Numbers

_NS_PER_S: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What each request brings; the arrays have an entry for each.

    ``hit_tokens`` could be loaded, ``load_ns`` is how long all of them take, and ``rest_tokens``
    are computed in any case.
    """

    arrivals_ns: Numbers
    hit_tokens: Numbers
    load_ns: Numbers
    rest_tokens: Numbers


@dataclass(frozen=True, kw_only=True)
class Server:
    """``prefill_rate`` in tokens a second, ``token_bytes`` on the disk.

    ``loads_queue``: the disk does one load after another; otherwise their times hold as they are,
    side by side.
    """

    prefill_rate: float
    token_bytes: float
    partial_loads: PartialLoads
    loads_queue: bool


@dataclass(frozen=True)
class Ttft:
    """Seconds over all requests. ``busy`` is computing time over the trace's time.

    From 1 on the queue grows for as long as the trace lasts, and the figures with it.
    """

    mean_s: float
    p50_s: float
    p99_s: float
    busy: float
    loaded_tokens: int  # of what could have been


def model_ttft(demand: Demand, server: Server) -> Ttft:
    """Play ``demand`` against ``server``, in virtual time."""
    served = _Served(demand, server)
    served.play()
    waits_s = (served.ends_ns - demand.arrivals_ns) / _NS_PER_S
    span = max(int(demand.arrivals_ns[-1] - demand.arrivals_ns[0]), 1)
    return Ttft(
        mean_s=float(waits_s.mean()),
        p50_s=float(np.percentile(waits_s, 50)),
        p99_s=float(np.percentile(waits_s, 99)),
        busy=served.computing_ns / span,
        loaded_tokens=served.loaded_tokens,
    )


_ARRIVED, _LOADED, _COMPUTED = range(3)


class _Served:
    """The requests of one trace, on their way through disk and server."""

    def __init__(self, demand: Demand, server: Server) -> None:
        self._server = server
        self._hits = demand.hit_tokens.tolist()
        self._whole_load_ns = demand.load_ns.tolist()
        self._rest = demand.rest_tokens.tolist()
        self._planner = LoadPlanner(
            server.partial_loads,
            token_bytes=server.token_bytes,
            deadline_s=TierConfig.load_deadline_ns / _NS_PER_S,
        )
        arrivals = enumerate(demand.arrivals_ns.tolist())
        self._events = [(at_ns, number, _ARRIVED) for number, at_ns in arrivals]
        self._arrived: deque[int] = deque()  # and not yet asked what to load
        self._loads: dict[int, tuple[int, int]] = {}  # tokens and nanoseconds of those under way
        self._ready: list[int] = []  # a heap: the first to come is the first
        self._to_compute: dict[int, int] = {}  # tokens of those that were asked
        self._computing = False
        self._disk_free_ns = 0
        self.ends_ns = np.zeros(len(self._hits), dtype=np.int64)
        self.computing_ns = 0
        self.loaded_tokens = 0

    def play(self) -> None:
        heapq.heapify(self._events)
        happens = {_ARRIVED: self._arrive, _LOADED: self._end_load, _COMPUTED: self._end_computing}
        while self._events:
            now_ns, number, what = heapq.heappop(self._events)
            happens[what](number, now_ns)
            if self._computing or self._more_at(now_ns):
                continue
            while self._arrived:
                self._split(self._arrived.popleft(), now_ns)
            if self._ready and not self._more_at(now_ns):
                self._compute(heapq.heappop(self._ready), now_ns)

    def _more_at(self, now_ns: int) -> bool:
        return bool(self._events) and self._events[0][0] == now_ns

    def _arrive(self, number: int, now_ns: int) -> None:
        self._arrived.append(number)
        self._planner.arrived(str(number))

    def _split(self, number: int, now_ns: int) -> None:
        name, hit, rest = str(number), self._hits[number], self._rest[number]
        loaded = self._planner.tokens_to_load(
            name,
            hit,
            rest,
            now_ns / _NS_PER_S,
            behind=[
                self._hits[each] + self._rest[each] for each in islice(self._arrived, LOOK_AHEAD)
            ],
        )
        self._to_compute[number] = max(1, hit + rest - loaded)
        if loaded:
            self._planner.load_began(name, loaded)
            self._begin_load(number, loaded, now_ns)
        else:
            heapq.heappush(self._ready, number)
        self._planner.settled(name, self._to_compute[number])

    def _begin_load(self, number: int, tokens: int, now_ns: int) -> None:
        takes_ns = round(self._whole_load_ns[number] * tokens / self._hits[number])
        began_ns = max(now_ns, self._disk_free_ns) if self._server.loads_queue else now_ns
        self._disk_free_ns = began_ns + takes_ns
        self._loads[number] = tokens, takes_ns
        self.loaded_tokens += tokens
        heapq.heappush(self._events, (began_ns + takes_ns, number, _LOADED))

    def _end_load(self, number: int, now_ns: int) -> None:
        tokens, took_ns = self._loads.pop(number)
        bytes_per_s = tokens * self._server.token_bytes * _NS_PER_S / max(1, took_ns)
        self._planner.load_ended(str(number))
        self._planner.measured_loads(bytes_per_s, now_ns / _NS_PER_S)
        heapq.heappush(self._ready, number)

    def _compute(self, number: int, now_ns: int) -> None:
        tokens = self._to_compute.pop(number)
        takes_ns = round(tokens * _NS_PER_S / self._server.prefill_rate)
        self._computing = True
        self.computing_ns += takes_ns
        self._planner.step_began({str(number): tokens}, now_ns / _NS_PER_S)
        heapq.heappush(self._events, (now_ns + takes_ns, number, _COMPUTED))

    def _end_computing(self, number: int, now_ns: int) -> None:
        self._computing = False
        self._planner.step_ended(now_ns / _NS_PER_S)
        self._planner.gone(str(number))
        self.ends_ns[number] = now_ns
