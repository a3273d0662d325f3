"""The model behind every time to first token here, plain enough to be checked by hand.

One server computes prompts, one request after another, at a constant number of tokens a second. A
request joins its queue when it has arrived and what it loads is there; requests load beside one
another and beside computing. Its first token comes when the tokens that were not loaded, at least
one, are computed. So

    ready = arrival + load            start = max(ready, end of the one served before)
    end = start + computed / rate     time to first token = end - arrival

and requests are served in the order in which they are ready. The model leaves out decoding that
shares the server, batching, and that a token late in a long prompt costs more than an early one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdisk.replay.trace import Numbers

_NS_PER_S: Final = 10**9


@dataclass(frozen=True)
class Ttft:
    """Seconds over all requests. ``busy`` is computing time over the trace's time.

    From 1 on the queue grows for as long as the trace lasts, and the figures with it.
    """

    mean_s: float
    p50_s: float
    p99_s: float
    busy: float


def model_ttft(
    arrivals_ns: Numbers, loads_ns: Numbers, computed_tokens: Numbers, prefill_rate: float
) -> Ttft:
    """``loads_ns`` and ``computed_tokens`` of each request; ``prefill_rate`` in tokens a second."""
    services = np.rint(np.maximum(computed_tokens, 1) * (_NS_PER_S / prefill_rate))
    ends = queue_ends(arrivals_ns + loads_ns, services.astype(np.int64))
    waits_s = (ends - arrivals_ns) / _NS_PER_S
    span = max(int(arrivals_ns[-1] - arrivals_ns[0]), 1)
    return Ttft(
        mean_s=float(waits_s.mean()),
        p50_s=float(np.percentile(waits_s, 50)),
        p99_s=float(np.percentile(waits_s, 99)),
        busy=float(services.sum()) / span,
    )


def queue_ends(ready_ns: Numbers, services_ns: Numbers) -> Numbers:
    """When a single server has served each, in the order in which they are ready."""
    ends = np.zeros(len(ready_ns), dtype=np.int64)
    free = 0
    order = np.argsort(ready_ns, kind="stable").tolist()
    ready, services = ready_ns.tolist(), services_ns.tolist()
    for number in order:
        free = max(free, ready[number]) + services[number]
        ends[number] = free
    return ends


def disk_delays(arrivals_ns: Numbers, load_bytes: Numbers, load_rate: int) -> Numbers:
    """How long loads take, in nanoseconds, from a disk that does one after another at its rate.

    ``load_rate`` in bytes a second; 0 for requests that load nothing.
    """
    delays = np.zeros(len(arrivals_ns), dtype=np.int64)
    loading = np.flatnonzero(load_bytes)
    services = np.rint(load_bytes[loading] * (_NS_PER_S / load_rate)).astype(np.int64)
    delays[loading] = queue_ends(arrivals_ns[loading], services) - arrivals_ns[loading]
    return delays
