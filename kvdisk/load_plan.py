"""How much of a hit to load and how much to compute again, so that disk and GPU finish together.

A disk may be slower than the GPU at making the same blocks. Then loading every hit makes requests
wait longer than having no tier at all; computing everything leaves the disk idle. So each hit
prefix is split: its head is loaded while the GPU works for other requests, its tail is computed.
How long either takes follows from rates that are measured all the time, and from what is still to
be done for the others.

No I/O, no clock of its own, no serving engine: times are passed in, in seconds, amounts in tokens
and bytes. A serving engine's adapter tells it what happens, request by request, and asks.

Requests that wait and have not been asked for yet are work for the GPU too: while it does that, the
disk loads for the one that is asked for now. They go before it then, so no more of them count than
may without making all wait longer together.

What always holds:
    * No amount is negative, the sums are those of the requests, and zero when all have gone.
    * A disk whose rate is not known is asked for little, until it has shown what it can do. While
      it is not known how fast the GPU computes steps of some size, no more than that is loaded of
      what would be computed in such steps.
    * Nothing that was measured is believed for ever where it has the effect that it is not measured
      again: a slow disk is asked for a little now and then, and after every so many hits that were
      loaded by a GPU's rate it counts for twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvdisk.config import PartialLoads, TierConfig
from kvdisk.prefill_meter import PrefillMeter

LOOK_AHEAD: Final = 8  # of those that wait: about so many the planner is told
_PROBED_AFTER_S: Final = 60.0  # of no loads: a disk that was slow may not be so any more
_LOADS_PER_STORES: Final = 0.5  # of the rates: a guess, as long as no load has been measured
_PROBE_S: Final = 0.05  # what finding a rate out may cost, by the last one known
_FIRST_GUESS_BYTES_S: Final = 1e9
_WORTH_IT: Final = 0.05  # of the time: "auto" leaves a hit whole for less than this
# Both were chosen in the model of tests/unit/overlapping_server.py: with more steps or less of a
# hit a request may end a step later than without a tier, with fewer the disk lies idle.
_STEPS_BEHIND: Final = 3  # of the GPU: as much of what waits behind counts as work for it
_LEAST: Final = 0.1  # of a hit: less is not loaded, since a load's end is seen a step later
# What goes before a hit may be so many times as long as it, in the mean: with more the mean wait
# grows. A tenth is for prompts that are nearly of one length.
_LONGER: Final = 1.1
_SEEN_AFTER: Final = 2  # steps of the GPU: the end of a load that begins now, at the earliest
# As much may be asked of the disk as takes so many steps of the GPU: with fewer it lies idle where
# they are long, with more a request waits for what was computed meanwhile.
_STEPS_QUEUED: Final = 4
_DEADLINES_MAX: Final = 5  # no load is waited for longer than so many times its deadline
_DEVICE_PATIENCE_S: Final = 30.0  # of the engine: beyond a load's deadline, with its device


def longest_transfer_s(config: TierConfig) -> float:
    """By then a transfer has ended, unless a copy of it hangs in the device: until the device is
    done with its blocks, and in its own time from then on.
    """
    longest_ns = max(_DEADLINES_MAX * config.load_deadline_ns, config.store_deadline_ns)
    return 2 * longest_ns / 1e9 + _DEVICE_PATIENCE_S


@dataclass
class _Request:
    """What is still to be done for a request, in tokens: nothing until the engine asks for it."""

    to_compute: float = 0.0
    to_load: float = 0.0
    promised: float = 0.0  # of ``to_load``: not yet begun


@dataclass(frozen=True)
class _Hit:
    """Of the request that is asked for, in tokens, as ``tokens_to_load`` has them."""

    tokens: int
    free: int
    rest: int

    @property
    def all_tokens(self) -> int:
        return self.tokens + self.free + self.rest


@dataclass
class _Work:
    """What is still to be done for the requests that were asked for, in tokens."""

    to_load: float = 0.0
    to_compute: float = 0.0
    loading: int = 0  # requests
    tails: float = 0.0  # of ``to_compute``: theirs, which cannot begin before they are loaded

    def add(self, request: _Request, sign: int = 1) -> None:
        self.to_load += sign * request.to_load
        self.to_compute += sign * request.to_compute
        if request.to_load:
            self.loading += sign
            self.tails += sign * request.to_compute


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
        self.unfinished: dict[str, None] = {}  # asked for, and not all loaded or computed

    # --- what happens

    def arrived(self, request_id: str) -> None:
        """A request waits, or another of that name."""
        self.gone(request_id)
        self._requests[request_id] = _Request()

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
        of_prompts, full = 0, False
        for request_id, count in tokens.items():
            request = self._requests.get(request_id)
            if request is not None and request.to_compute:
                computed = min(count, int(request.to_compute))
                of_prompts += computed
                self._set(request_id, request.to_load, request.to_compute - computed)
                full |= request.to_compute > 0
        self._steps.began(of_prompts, now_s, full=full)

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
        self.unfinished.pop(request_id, None)
        if request is not None:
            self._work.add(request, -1)

    @property
    def idle(self) -> bool:
        """Nothing is known of any request, and the books are empty."""
        work = self._work
        return not self._requests and work == _Work()

    # --- what to do

    def tokens_to_load(
        self,
        request_id: str,
        hit_tokens: int,
        rest_tokens: int,
        now_s: float,
        *,
        free_tokens: int = 0,
        behind: Iterable[float] = (),
        room_tokens: float = math.inf,
    ) -> int:
        """How many of ``hit_tokens`` to load; ``rest_tokens`` are computed in any case.

        ``free_tokens``, behind the hit, need neither if all of the hit is loaded. ``behind``: what
        is to be computed of each of the next ``LOOK_AHEAD`` that wait, in order, as if the disk had
        nothing of them, without what is computed for another before. ``room_tokens``: what the
        device's cache takes beside all of this request; what finds no room there is no work for
        the GPU yet.
        """
        request = self._requests.get(request_id)
        if request is None or self._mode == "off":
            return hit_tokens
        others = self._work_of_others(request_id)
        taken = others.to_compute + (0.0 if self._loads_have_room else others.to_load)
        hit, wanted = _Hit(hit_tokens, free_tokens, rest_tokens), 0
        if hit_tokens:
            ready = self._steps.tokens_under_way + others.to_compute - others.tails
            first = self._may_go_first([*behind], hit, ready, room_tokens - taken)
            steps = self._steps.of_size(
                ready + (first or 0) + others.tails + hit.all_tokens, hit.all_tokens
            )
            if first is not None:
                rate = steps.rate if steps else None
                wanted = self._wanted(hit, others, ready + first, rate, now_s)
            if wanted and steps and not request.promised:  # the engine may ask more than once
                steps.believed += 1
        lost = 0 if wanted == hit_tokens else hit_tokens - wanted + free_tokens
        self._set(request_id, wanted, rest_tokens + lost)
        request.promised = float(wanted)
        return wanted

    def load_within_s(self) -> float:
        """How long a load that begins now may take: what comes later is a miss.

        The deadline; where the queue may be longer than half of it, what is in the queue and half
        of it: never more than five of them.
        """
        rate = None if self._mode == "off" else self._load_rate
        queued_s = self._work.to_load * self._token_bytes / rate if rate else 0.0
        longest_s = min(queued_s, self._queue_limit_s()) + self._deadline_s / 2
        return max(self._deadline_s, longest_s)

    # --- steps of the above

    def _may_go_first(
        self, behind: Sequence[float], hit: _Hit, ready: float, room_tokens: float
    ) -> float | None:
        """How much of what waits behind the GPU may compute before: the mean wait grows where those
        that go first are longer than who lets them. None: one that is much longer would begin
        before any load's end is seen, and make this one wait for more than all of them gain; with
        more behind than it is told of, they gain more than is known.
        """
        largest = self._steps.largest
        most = min(_STEPS_BEHIND * largest, room_tokens)
        first = 0.0
        for count, tokens in enumerate(behind):
            if first >= most:
                break
            if first + tokens > _LONGER * (count + 1) * hit.all_tokens:
                who_gain = 1 + len(behind) - count
                begins_soon = ready + first < _SEEN_AFTER * largest
                costs_more = len(behind) < LOOK_AHEAD and who_gain * hit.tokens < tokens
                if begins_soon and costs_more and self._load_rate is not None:
                    return None
                # The load's end is seen a step later; by then that one must not have begun.
                return max(0.0, first - largest)
            first += tokens
        return max(0.0, min(first, most))

    def _wanted(
        self, hit: _Hit, others: _Work, ready: float, prefill: float | None, now_s: float
    ) -> int:
        """``ready``: tokens that the GPU can compute before; ``prefill``: how many a second."""
        wanted = 0  # as without a tier, until both rates are known
        if self._load_rate is not None and prefill:
            wanted = self._best_split(hit, others, ready, prefill, self._load_rate)
        if now_s - self._load_rate_at_s > _PROBED_AFTER_S:
            guess = _LOADS_PER_STORES * self._store_rate or _FIRST_GUESS_BYTES_S
            probe_bytes = _PROBE_S * (self._load_rate or guess)
            room = max(0.0, probe_bytes / self._token_bytes - others.to_load)
            wanted = max(wanted, min(hit.tokens, math.ceil(room)))
        return wanted

    def _best_split(
        self, hit: _Hit, others: _Work, ready: float, prefill: float, load_rate: float
    ) -> int:
        tokens_per_s = load_rate / self._token_bytes
        disk_s, gpu_s = others.to_load / tokens_per_s, ready / prefill
        tails_s, loading = others.tails / prefill, max(1, others.loading)

        def others_end_s(busy_s: float) -> float:
            """The GPU may be idle until the first of them is loaded, or wait for the last."""
            begin_s = max(busy_s, disk_s / loading)
            return max(begin_s + tails_s, disk_s + tails_s / loading)

        others_s = others_end_s(gpu_s)
        room_s = max(0.0, self._queue_limit_s() - disk_s)
        most = min(hit.tokens, int(room_s * tokens_per_s))
        if most < _LEAST * hit.tokens:
            return 0

        def ends_s(load_tokens: float) -> float:
            """When all is computed, of this request and of the others."""
            left = hit.tokens + hit.free - load_tokens if load_tokens < hit.tokens else 0.0
            if not load_tokens:
                return others_end_s(gpu_s + left / prefill)
            return max(disk_s + load_tokens / tokens_per_s, others_s) + left / prefill

        while_gpu_works = min(most, int((others_s - disk_s) * tokens_per_s))
        if while_gpu_works < _LEAST * hit.tokens:
            while_gpu_works = 0
        best = min((most, while_gpu_works, 0), key=ends_s)
        nearly_s = (1 + _WORTH_IT) * ends_s(best)
        if self._mode == "auto" and most == hit.tokens and ends_s(most) <= nearly_s:
            return most
        return best

    def _queue_limit_s(self) -> float:
        """What may be asked of the disk at a time. A load's end is seen a step or two later: with
        less than some steps in the queue the disk would lie idle where they are long.
        """
        longest_s = (_DEADLINES_MAX - 0.5) * self._deadline_s
        return min(max(self._deadline_s / 2, _STEPS_QUEUED * self._steps.step_s), longest_s)

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
        request.to_load, request.to_compute = float(load_tokens), float(compute_tokens)
        self._work.add(request)
        if request.to_load or request.to_compute:
            self.unfinished[request_id] = None
        else:
            self.unfinished.pop(request_id, None)
