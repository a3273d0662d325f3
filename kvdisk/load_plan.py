"""How much of a hit to load and how much to compute again, so that disk and GPU finish together.

A disk may be slower than the GPU at making the same blocks. Then loading every hit makes requests
wait longer than having no tier at all; computing everything leaves the disk idle. So each hit
prefix is split: its head is loaded while the GPU works for other requests, its tail is computed.
How long either takes follows from rates that are measured all the time, and from what is still to
be done for the others.

No I/O, no clock of its own, no serving engine: times are passed in, in seconds, amounts in tokens
and bytes. A serving engine's adapter tells it what happens, request by request, and asks.

Requests that wait and have not been asked for yet are work for the GPU too: while it does that, the
disk loads for the one that is asked for now.

What always holds:
    * No amount is negative, the sums are those of the requests, and zero when all have gone.
    * A disk whose rate is not known is asked for little, until it has shown what it can do. A rate
      is believed for a minute; then it counts for less and less, until it is measured again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvdisk.config import PartialLoads, TierConfig
from kvdisk.rate_meter import RateMeter

_BELIEVED_S: Final = 60.0  # a rate, without new evidence; then it halves in every such time
_HALVINGS_MAX: Final = 10
_LOADS_PER_STORES: Final = 0.5  # of the rates: a guess, as long as no load has been measured
_PROBE_S: Final = 0.05  # what finding a rate out may cost, by the last one known
_FIRST_GUESS_BYTES_S: Final = 1e9
_WORTH_IT: Final = 0.05  # of the time: "auto" leaves a hit whole for less than this
_FULL_STEP: Final = 0.5  # of the largest step: smaller ones say little about the GPU's rate
_HELD_UP: Final = 3.0  # times as long as expected: what a step takes beyond that was not the GPU
_FORGETTING: Final = 0.99  # of the largest step, at each one that has prompts in it
# Both were chosen in the model of tests/unit/overlapping_server.py: with more steps or less of a
# hit a request may end a step later than without a tier, with fewer the disk lies idle.
_STEPS_BEHIND: Final = 3  # of the GPU: as much of what waits behind counts as work for it
_LEAST: Final = 0.1  # of a hit: less is not loaded, since a load's end is seen a step later
# As much may be asked of the disk as takes so many steps of the GPU: with fewer it lies idle where
# they are long, with more a request waits for what was computed meanwhile.
_STEPS_QUEUED: Final = 4
_DEADLINES_MAX: Final = 5  # no load is waited for longer than so many times its deadline
_DEVICE_PATIENCE_S: Final = 30.0  # of the engine: beyond a load's deadline, with its device
_STEPS_AHEAD: Final = 64  # many more than are ever given to a GPU before the output of the first


def longest_transfer_s(config: TierConfig) -> float:
    """By then a transfer has ended, unless a copy of it hangs in the device: until the device is
    done with its blocks, and in its own time from then on.
    """
    longest_ns = max(_DEADLINES_MAX * config.load_deadline_ns, config.store_deadline_ns)
    return 2 * longest_ns / 1e9 + _DEVICE_PATIENCE_S


class PrefillMeter:
    """How many tokens a second the GPU computes, from when its steps begin and end.

    Steps may overlap: the next one is given to the GPU before the output of the last one is here.
    """

    def __init__(self) -> None:
        self._meter = RateMeter()
        self._under_way: deque[tuple[int, float]] = deque(maxlen=_STEPS_AHEAD)
        self._largest = 0.0
        self._ended_s = -math.inf

    @property
    def rate(self) -> float | None:
        """None: nothing was measured yet."""
        return self._meter.rate

    @property
    def largest(self) -> float:
        """How many tokens of prompts a step takes at the most."""
        return self._largest

    @property
    def step_s(self) -> float:
        """How long its largest step takes; 0: not yet known."""
        return self._largest / self._meter.rate if self._meter.rate else 0.0

    @property
    def tokens_under_way(self) -> int:
        """Of the steps whose output is not here yet."""
        return sum(tokens for tokens, _ in self._under_way)

    def began(self, tokens: int, now_s: float) -> None:
        """A step of so many tokens of prompts, after all before it."""
        self._under_way.append((tokens, now_s))

    def ended(self, now_s: float) -> None:
        """The output of the first step under way is here."""
        if not self._under_way:
            return
        tokens, began_s = self._under_way.popleft()
        seconds = now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        if not tokens:
            return
        self._largest = max(_FORGETTING * self._largest, float(tokens))
        if tokens >= _FULL_STEP * self._largest:
            expected_s = tokens / self._meter.rate if self._meter.rate else math.inf
            self._meter.add(tokens, min(seconds, _HELD_UP * expected_s))


@dataclass
class _Request:
    """What is still to be done for a request, in tokens."""

    tokens: float  # that it has, as far as is known
    to_compute: float
    to_load: float = 0.0
    promised: float = 0.0  # of ``to_load``: not yet begun
    asked: bool = False  # the engine has asked for it or begun with it: it is no longer behind


@dataclass
class _Work:
    """What is still to be done, in tokens: of requests that were asked for, and behind them."""

    to_load: float = 0.0
    to_compute: float = 0.0
    behind: float = 0.0  # of those not asked for, as if the disk had nothing of them

    def add(self, request: _Request, sign: int = 1) -> None:
        if not request.asked:
            self.behind += sign * request.to_compute
        else:
            self.to_load += sign * request.to_load
            self.to_compute += sign * request.to_compute


class LoadPlanner:
    """The waiting requests of one scheduler. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        mode: PartialLoads,
        *,
        token_bytes: float,
        deadline_s: float,
        loads_have_room: bool = True,
    ) -> None:
        """``token_bytes``: what a rank's disk reads for a token. ``deadline_s``: of a load, where
        the GPU's steps are short beside it; see ``load_within_s``.
        ``loads_have_room``: what is being loaded has its room in the device's cache already.
        """
        self._mode = mode
        self._token_bytes = token_bytes
        self._deadline_s = deadline_s
        self._loads_have_room = loads_have_room
        self._steps = PrefillMeter()
        self._load_rate: float | None = None  # bytes per second
        self._load_rate_at_s = -math.inf
        self._store_rate = 0.0
        self._requests: dict[str, _Request] = {}
        self._work = _Work()

    # --- what happens

    def arrived(self, request_id: str, tokens: int) -> None:
        """A request waits, of ``tokens`` tokens as far as is known."""
        self.gone(request_id)
        self._requests[request_id] = _Request(float(tokens), to_compute=float(tokens))
        self._work.add(self._requests[request_id])

    def found(self, request_id: str, tokens: int) -> None:
        """The engine's own caches have so many tokens of a request that still waits."""
        request = self._requests.get(request_id)
        if request is not None and not request.asked:
            self._work.add(request, -1)
            request.to_compute = max(0.0, request.tokens - tokens)
            self._work.add(request)

    def load_began(self, request_id: str, tokens: int) -> None:
        """So many tokens of a request are being loaded, promised or not."""
        request = self._requests.get(request_id)
        if request is not None:
            kept = min(request.promised, tokens)
            request.promised -= kept
            self._set(request_id, request.to_load + tokens - kept, request.to_compute)

    def settled(self, request_id: str, left_tokens: int) -> None:
        """The engine goes on with a request and still has to compute so many tokens of it, beside
        what is being loaded. What was promised and has not begun is among them.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._set(request_id, request.to_load - request.promised, left_tokens)
            request.promised = 0.0

    def load_ended(self, request_id: str) -> None:
        """All loads of a request have ended; what was promised and never begun is computed."""
        request = self._requests.get(request_id)
        if request is not None:
            self._set(request_id, 0, request.to_compute + request.promised)
            request.promised = 0.0

    def step_began(self, tokens: Mapping[str, int], now_s: float) -> None:
        """The GPU's next step computes so many tokens of each of these requests.

        What goes beyond a prompt is answers, or drafts of them, which say nothing of prefill.
        """
        of_prompts = 0
        for request_id, count in tokens.items():
            request = self._requests.get(request_id)
            if request is not None and request.to_compute:
                computed = min(count, int(request.to_compute))
                of_prompts += computed
                self._set(request_id, request.to_load, request.to_compute - computed)
        self._steps.began(of_prompts, now_s)

    def step_ended(self, now_s: float) -> None:
        """The output of the first step under way is here. Once for each that began."""
        self._steps.ended(now_s)

    def measured_loads(self, bytes_per_s: float, now_s: float) -> None:
        """What the slowest rank's disk gives now: nothing counts as a token a second."""
        self._load_rate, self._load_rate_at_s = max(bytes_per_s, self._token_bytes), now_s

    def measured_stores(self, bytes_per_s: float) -> None:
        """What it takes: how much is asked of it to find out what it gives."""
        self._store_rate = bytes_per_s

    def gone(self, request_id: str) -> None:
        """A request has ended."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._work.add(request, -1)

    @property
    def idle(self) -> bool:
        """Nothing is known of any request, and the books are empty."""
        work = self._work
        return not self._requests and (work.to_load, work.to_compute, work.behind) == (0, 0, 0)

    # --- what to do

    def tokens_to_load(
        self,
        request_id: str,
        hit_tokens: int,
        rest_tokens: int,
        now_s: float,
        *,
        free_tokens: int = 0,
        room_tokens: float = math.inf,
    ) -> int:
        """How many of ``hit_tokens`` to load; ``rest_tokens`` are computed in any case.

        ``free_tokens``, behind the hit, need neither if all of the hit is loaded. ``room_tokens``:
        what the device's cache takes beside all of this request; what waits behind and finds no
        room there is no work for the GPU yet.
        """
        request = self._requests.get(request_id)
        if request is None or self._mode == "off":
            return hit_tokens
        others = self._work_of_others(request_id)
        taken = others.to_compute + (0.0 if self._loads_have_room else others.to_load)
        others.behind = min(others.behind, max(0.0, room_tokens - taken))
        wanted = self._wanted(others, hit_tokens, free_tokens, now_s)
        lost = 0 if wanted == hit_tokens else hit_tokens - wanted + free_tokens
        self._set(request_id, wanted, rest_tokens + lost)
        request.promised = float(wanted)
        return wanted

    def load_within_s(self, now_s: float) -> float:
        """How long a load that begins now may take: what comes later is a miss.

        The deadline; where the queue may be longer than half of it, what is in the queue and half
        of it: never more than five of them.
        """
        rate = None if self._mode == "off" else self._believed_rate(now_s)
        queued_s = self._work.to_load * self._token_bytes / rate if rate else 0.0
        longest_s = min(queued_s, self._queue_limit_s()) + self._deadline_s / 2
        return max(self._deadline_s, longest_s)

    # --- steps of the above

    def _wanted(self, others: _Work, hit_tokens: int, free_tokens: int, now_s: float) -> int:
        rate = self._believed_rate(now_s)
        wanted = 0 if rate is None else self._best_split(others, hit_tokens, free_tokens, rate)
        if now_s - self._load_rate_at_s > _BELIEVED_S:
            guess = _LOADS_PER_STORES * self._store_rate or _FIRST_GUESS_BYTES_S
            probe_bytes = _PROBE_S * (self._load_rate or guess)
            room = max(0.0, probe_bytes / self._token_bytes - others.to_load)
            wanted = max(wanted, min(hit_tokens, math.ceil(room)))
        return wanted

    def _best_split(self, others: _Work, hit_tokens: int, free_tokens: int, rate: float) -> int:
        tokens_per_s = rate / self._token_bytes
        disk_s = others.to_load / tokens_per_s
        most = min(hit_tokens, int(max(0.0, self._queue_limit_s() - disk_s) * tokens_per_s))
        prefill = self._steps.rate
        if not prefill:
            return most
        behind = min(others.behind, _STEPS_BEHIND * self._steps.largest)
        gpu_s = (self._steps.tokens_under_way + others.to_compute + behind) / prefill

        def ends_s(load_tokens: float) -> float:
            loaded_s = disk_s + load_tokens / tokens_per_s if load_tokens else 0.0
            left = hit_tokens + free_tokens - load_tokens if load_tokens < hit_tokens else 0.0
            return max(loaded_s, gpu_s) + left / prefill

        while_gpu_works = min(most, max(0, int((gpu_s - disk_s) * tokens_per_s)))
        if while_gpu_works < _LEAST * hit_tokens:
            while_gpu_works = 0
        best = min((most, while_gpu_works, 0), key=ends_s)
        if self._mode == "auto" and ends_s(most) <= (1 + _WORTH_IT) * ends_s(best):
            return most
        return best

    def _queue_limit_s(self) -> float:
        """What may be asked of the disk at a time. A load's end is seen a step or two later: with
        less than some steps in the queue the disk would lie idle where they are long.
        """
        longest_s = (_DEADLINES_MAX - 0.5) * self._deadline_s
        return min(max(self._deadline_s / 2, _STEPS_QUEUED * self._steps.step_s), longest_s)

    def _believed_rate(self, now_s: float) -> float | None:
        halvings = max(0.0, (now_s - self._load_rate_at_s) / _BELIEVED_S - 1)
        if self._load_rate is None or halvings > _HALVINGS_MAX:
            return None
        return float(self._load_rate * 0.5**halvings)

    def _work_of_others(self, request_id: str) -> _Work:
        others = replace(self._work)
        if request_id in self._requests:
            others.add(self._requests[request_id], -1)
        return others

    def _set(self, request_id: str, load_tokens: float, compute_tokens: float) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        self._work.add(request, -1)
        request.asked = True
        request.to_load, request.to_compute = float(load_tokens), float(compute_tokens)
        self._work.add(request)
