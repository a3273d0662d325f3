"""Loading and computing side by side: on a model of a disk, a GPU and a server's scheduler."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from kvdisk.config import TierConfig
from kvdisk.load_plan import LoadPlanner, longest_transfer_s
from tests.unit.overlapping_server import (
    STEP_TOKENS,
    TOKEN_BYTES,
    TOKENS,
    OverlappingServer,
    computes,
)

CACHE_TOKENS = 8 * TOKENS
GPU = 40_000.0  # tokens a second


@dataclass
class _Prompt:
    name: str
    left: float = TOKENS
    loaded_at: float | None = None
    admitted: bool = False


class _Server:
    """Steps as vLLM's scheduler makes them: in order, loads beside them, a cache of a few."""

    def __init__(self, mode: str, disk: float) -> None:
        self.disk = disk  # tokens a second
        self.planner = LoadPlanner(mode, token_bytes=TOKEN_BYTES, deadline_s=2)  # type: ignore[arg-type]
        self.now = 0.0
        self.disk_free = 0.0
        self.loaded = 0.0

    def serve(self, count: int, *, hits: bool = True) -> float:
        """Seconds until all of ``count`` prompts, which come at once, are computed."""
        began = self.now
        waiting = [_Prompt(f"{began}-{number}") for number in range(count)]
        for prompt in waiting:
            self.planner.arrived(prompt.name)
        while waiting:
            self._step(waiting, hits)
            waiting = [prompt for prompt in waiting if prompt.left > 0]
        return self.now - began

    def _step(self, waiting: list[_Prompt], hits: bool) -> None:
        room = CACHE_TOKENS - TOKENS * sum(prompt.admitted for prompt in waiting)
        tokens: dict[str, int] = {}
        for number, prompt in enumerate(waiting):
            left = STEP_TOKENS - sum(tokens.values())
            if left <= 0:
                break
            if not prompt.admitted:
                if room < TOKENS:
                    continue
                wanted = self.planner.tokens_to_load(
                    prompt.name,
                    TOKENS if hits else 0,
                    0 if hits else TOKENS,
                    self.now,
                    behind=[each.left for each in waiting[number + 1 :] if not each.admitted],
                )
                self._admit(prompt, wanted)
                room -= TOKENS
            if prompt.loaded_at is None:
                tokens[prompt.name] = int(min(left, prompt.left))
                prompt.left -= tokens[prompt.name]
        self.planner.step_began(tokens, self.now)
        self.now += max(0.001, sum(tokens.values()) / GPU)
        for prompt in waiting:
            if prompt.loaded_at is not None and prompt.loaded_at <= self.now:
                prompt.loaded_at = None
                self.planner.load_ended(prompt.name)
                self.planner.measured_loads(self.disk * TOKEN_BYTES, self.now)
            if prompt.left <= 0:
                self.planner.gone(prompt.name)
        self.planner.step_ended(self.now)

    def _admit(self, prompt: _Prompt, wanted: int) -> None:
        prompt.admitted = True
        wanted = min(wanted, TOKENS - 1)  # the last token is always computed
        prompt.left -= wanted
        if wanted > 0:
            self.loaded += wanted
            self.disk_free = max(self.disk_free, self.now) + wanted / self.disk
            prompt.loaded_at = self.disk_free
            self.planner.load_began(prompt.name, wanted)
        else:
            self.planner.settled(prompt.name, int(prompt.left))


def _warm(mode: str, disk: float) -> _Server:
    """A server that has computed and loaded a little, so that it knows both rates."""
    server = _Server(mode, disk)
    server.serve(4, hits=False)
    server.serve(1)
    server.serve(1)
    return server


@pytest.mark.parametrize("disk", [0.002, 0.05, 0.4, 1.4, 10.0])
@pytest.mark.parametrize("count", [1, 2, 4, 16, 64])
def test_never_slower_than_computing_everything(disk: float, count: int) -> None:
    seconds = _warm("auto", disk * GPU).serve(count)
    assert seconds <= 1.05 * count * TOKENS / GPU + 0.01


@pytest.mark.parametrize(("disk", "slack"), [(0.2, 1.05), (0.4, 1.08), (1.4, 1.25), (10.0, 1.6)])
def test_many_prompts_use_disk_and_gpu_together(disk: float, slack: float) -> None:
    count = 32
    seconds = _warm("auto", disk * GPU).serve(count)
    assert seconds <= slack * count * TOKENS / (GPU + disk * GPU)


def _overlapping(disk: float, deadline_s: float = 10.0, **sizes: int) -> OverlappingServer:
    """Has computed and loaded, some seconds ago."""
    planner = LoadPlanner("auto", token_bytes=TOKEN_BYTES, deadline_s=deadline_s)
    server = OverlappingServer(planner, disk=disk * GPU, gpu=GPU, **sizes)
    for hit in (0, TOKENS, TOKENS):
        server.serve(16, hit=hit)
        server.now += 20
    return server


@pytest.mark.parametrize(("disk", "slack"), [(0.4, 1.2), (0.8, 1.35), (2.0, 1.6)])
@pytest.mark.parametrize("count", [8, 16, 32])
def test_disk_and_gpu_work_together_where_steps_overlap(
    disk: float, slack: float, count: int
) -> None:
    server = _overlapping(disk)
    computed = 1 / (1 + disk)
    assert server.serve(count) <= slack * computed * count * TOKENS / GPU + 0.02


@pytest.mark.parametrize("disk", [0.001, 0.05, 0.4, 2.0])
@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_never_slower_than_computing_where_steps_overlap(disk: float, count: int) -> None:
    assert _overlapping(disk).serve(count) <= 1.05 * count * (TOKENS + 32) / GPU + 0.03


@pytest.mark.parametrize("disk", [0.3, 0.8])
def test_what_waits_behind_is_computed_while_a_hit_is_loaded(disk: float) -> None:
    """Also where only every other prompt is on the disk, so that few of those before are loaded."""
    hits = [0, TOKENS] * 16
    best = len(hits) * TOKENS / (GPU + disk * GPU)
    assert _overlapping(disk).serve(len(hits), hit=hits) <= 1.15 * best


@pytest.mark.parametrize(("gpu", "slack"), [(40_000, 1.15), (9_600, 1.2), (4_000, 1.2)])
def test_long_steps_leave_the_disk_no_more_idle(gpu: float, slack: float) -> None:
    """Steps of 0.2 s to 2 s, beside a deadline of 2 s: as much waits for the disk as they take."""
    planner = LoadPlanner("auto", token_bytes=TOKEN_BYTES, deadline_s=2.0)
    server = OverlappingServer(planner, disk=0.8 * gpu, gpu=gpu)
    for hit in (0, TOKENS):
        server.serve(16, hit=hit)
    assert server.serve(16, hit=TOKENS) <= slack * 16 * TOKENS / (gpu + 0.8 * gpu)


def test_a_load_may_take_as_long_as_was_planned_for_it() -> None:
    """And half of the deadline longer, but never more than some deadlines."""
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=2.0)
    assert planner.load_within_s() == 2.0
    computes(planner, 1000, 1.0)
    planner.measured_loads(1000.0, 1.0)
    for name, hit in (("first", 900), ("next", 1600), ("last", 9000)):
        planner.arrived(name)
        planner.tokens_to_load(name, hit, 20_000 - hit, 1.0)
        within_s = planner.load_within_s()
        assert within_s == {"first": 2.0, "next": 3.5, "last": 5.0}[name], "4 steps of 1 s at most"
        planner.load_began(name, hit)
    planner.measured_loads(100.0, 1.0)
    assert planner.load_within_s() == 5.0, "a disk that has become slow is given no more"


def test_where_steps_are_short_no_load_has_more_than_its_deadline() -> None:
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=2.0)
    computes(planner, 1, 0.1)
    planner.measured_loads(1e6, 0.0)
    planner.arrived("this")
    planner.tokens_to_load("this", 900_000, 9_100_000, 0.0)
    planner.measured_loads(0.0, 1.0)
    assert planner.load_within_s() == 2.0
    planner = LoadPlanner("off", token_bytes=1.0, deadline_s=2.0)
    planner.measured_loads(1.0, 0.0)
    planner.arrived("this")
    planner.tokens_to_load("this", 100, 0, 0.0)
    assert planner.load_within_s() == 2.0


def test_no_load_is_waited_for_longer_than_its_adapters_are() -> None:
    config = TierConfig.from_mapping({"path": "/x", "capacity": "1GiB", "load_deadline": "3s"})
    assert longest_transfer_s(config) == 60.0
    longer = TierConfig.from_mapping({"path": "/x", "capacity": "1GiB", "store_deadline": "20s"})
    assert longest_transfer_s(longer) == 70.0


def test_what_stores_get_says_how_much_is_asked_of_the_disk_to_find_out_more() -> None:
    """50 ms of half of that, however much of a hit it is: reads may be much slower than writes."""

    def wanted(*, loads: float | None = None, now_s: float = 1.0) -> int:
        planner = _planner(loads)
        planner.measured_stores(4000.0)
        for name in ("before", "this"):
            planner.arrived(name)
        planner.tokens_to_load("before", 0, 10_000, 1.0)  # a second of computing
        return planner.tokens_to_load("this", 10_000, 0, now_s)

    assert wanted() == wanted(now_s=1e9) == 100
    assert wanted(loads=3000.0) == 3000
    assert wanted(loads=3000.0, now_s=1e9) == 3000
    assert wanted(loads=10.0, now_s=1e9) == 1


@pytest.mark.parametrize("pause_s", [2.0, 10.0, 60.0])
@pytest.mark.parametrize("disk", [0.02, 0.4])
@pytest.mark.parametrize("count", [1, 4])
def test_a_step_that_took_very_long_is_soon_forgotten(
    pause_s: float, disk: float, count: int
) -> None:
    """Found by an attack: then the GPU counted as slow, each hit was loaded whole, and so nothing
    was computed that could have shown otherwise.
    """
    server = _overlapping(disk, deadline_s=2.0)
    server.planner.step_began({}, server.now)
    server.planner.arrived("paused")
    server.planner.settled("paused", TOKENS)
    server.planner.step_began({"paused": TOKENS}, server.now)
    server.planner.step_ended(server.now)
    server.now += pause_s
    server.planner.step_ended(server.now)
    server.planner.gone("paused")
    times = [server.serve(count) for _ in range(10)]
    alone = count * (TOKENS + 32) / GPU
    assert max(times) <= 1.5 + alone
    assert max(times[3:]) <= 1.05 * alone + 0.03


@pytest.mark.parametrize("deadline_s", [2.0, 10.0])
def test_never_slower_than_computing_whatever_is_on_the_disk(deadline_s: float) -> None:
    chance = random.Random(1)
    for _ in range(60):
        count, disk = chance.choice([1, 2, 3, 4, 6, 12, 32]), 10 ** chance.uniform(-2.5, 0.5)
        hits = [chance.choice([0, 0, TOKENS // 4, TOKENS // 2, TOKENS]) for _ in range(count)]
        server = _overlapping(disk, deadline_s)
        assert server.serve(count, hit=hits) <= 1.05 * count * (TOKENS + 32) / GPU + 0.03


def test_what_waits_behind_is_work_as_far_as_it_finds_room() -> None:
    """The disk is asked for as much as it gives while the GPU works for others."""

    def wanted(*behind: float, room_tokens: float = math.inf) -> int:
        planner = _planner(rate=1000.0)
        planner.arrived("this")
        return planner.tokens_to_load(
            "this", 4000, 1000, 1.0, behind=behind, room_tokens=room_tokens
        )

    assert wanted(5000) == 500  # a tenth of what is to be computed: the disk is so much slower
    assert wanted(4000, 1000) == wanted(2500, 2500) == 500
    assert wanted(4600) == 460
    assert wanted(*[5000] * 20) == 3000, "of three steps, the largest that were seen"
    assert wanted() == wanted(1) == 0
    assert wanted(5000, room_tokens=5_000) == 500
    assert wanted(5000, room_tokens=4_600) == 460, "it is not computed while nothing is given up"
    assert wanted(5000, room_tokens=-2_000) == 0


def test_nobody_lets_those_go_first_who_take_much_longer() -> None:
    """They would not be longer in coming than the load, but all would wait longer in the mean."""

    def wanted(*behind: float) -> int:
        planner = _planner(rate=1000.0)
        planner.arrived("this")
        return planner.tokens_to_load("this", 10_000, 0, 1.0, behind=behind)

    assert wanted(10_900) == 1090
    assert wanted(11_100) == 0
    assert wanted(5000, 17_000) == 2200, "as long as it is, in the mean"
    assert wanted(10_000, 10_000, 13_100) == 1000, "the last begins before the load's end is seen"


def test_nothing_is_loaded_before_a_prompt_that_is_much_longer() -> None:
    """Nor asked of the disk to find out its rate: also then the long one would have begun."""
    planner = _planner(rate=100_000.0)
    for behind, wanted in ((60_000, 0), (30_000, 10_000)):
        planner.arrived("this")
        asked = planner.tokens_to_load("this", 10_000, 0, 1e6, behind=[behind, 100, 100])
        assert asked == wanted
    planner.arrived("this")
    asked = planner.tokens_to_load("this", 10_000, 0, 1e6, behind=[60_000] + 7 * [100])
    assert asked == 10_000, "and there may be many more, who all gain"
    planner.arrived("before")
    planner.settled("before", 20_000)  # takes both steps until a load's end is seen
    planner.arrived("this")
    assert planner.tokens_to_load("this", 10_000, 0, 1e6, behind=[60_000]) == 10_000
    unknown = _planner(rate=None)
    unknown.arrived("this")
    assert unknown.tokens_to_load("this", 10_000, 0, 1e6, behind=[60_000]) > 0, "once"


@pytest.mark.parametrize("long", [2, 8, 15])
@pytest.mark.parametrize("disk", [0.1, 0.2, 0.4, 0.8])
def test_a_hit_before_a_longer_prompt_waits_no_longer_than_without(disk: float, long: int) -> None:
    """Found by an attack: it was loaded, and then vLLM had begun with the other."""
    ended_s = []
    for hit in (0, TOKENS):
        server = _overlapping(disk, deadline_s=2.0, cache_tokens=16 * TOKENS)
        server.serve(2, hit=[hit, 0], more=[0, (long - 1) * TOKENS])
        ended_s.append(server.ended_s[0])
    assert ended_s[1] <= 1.05 * ended_s[0] + 0.03


def test_what_is_being_loaded_cannot_be_computed_meanwhile() -> None:
    """Found by an attack: two hits on a slow disk each counted the other as the GPU's work."""
    planner = _planner(rate=1000.0)
    planner.arrived("first")
    assert planner.tokens_to_load("first", 10_000, 0, 1.0, behind=[10_000]) == 1000
    planner.load_began("first", 1000)
    planner.settled("first", 9000)
    planner.arrived("second")
    assert planner.tokens_to_load("second", 10_000, 0, 1.0) == 0
    planner.gone("second")
    planner.arrived("between")
    planner.settled("between", 10_000)  # for as long as the first is being loaded: then goes that
    planner.arrived("third")
    assert planner.tokens_to_load("third", 8_000, 0, 1.0) == pytest.approx(900, abs=15)


@pytest.mark.parametrize("step_tokens", [TOKENS // 4, TOKENS // 16])
@pytest.mark.parametrize("disk", [0.05, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_prompts_of_some_steps_are_no_slower_than_computed(
    disk: float, step_tokens: int, count: int
) -> None:
    planner = LoadPlanner("auto", token_bytes=TOKEN_BYTES, deadline_s=2.0)
    server = OverlappingServer(planner, disk=disk * 4000, gpu=4000, step_tokens=step_tokens)
    for hit in (0, TOKENS, TOKENS):
        server.serve(16, hit=hit)
        server.now += 20
    assert server.serve(count) <= 1.05 * count * (TOKENS + 32) / 4000 + 0.03


@pytest.mark.parametrize("loads_have_room", [True, False])
def test_what_is_being_loaded_takes_room_once(loads_have_room: bool) -> None:
    """Below a RAM tier it has none on the device yet; else what is left is beside it already."""
    planner = LoadPlanner("on", token_bytes=1.0, deadline_s=200, loads_have_room=loads_have_room)
    computes(planner, 10_000, 1.0)
    planner.measured_loads(1000.0, 1.0)
    planner.arrived("loading")
    planner.load_began("loading", 100)
    planner.settled("loading", 0)
    planner.arrived("this")
    wanted = planner.tokens_to_load("this", 3000, 3000, 1.0, behind=[5000], room_tokens=4600)
    assert wanted == (360 if loads_have_room else 350)  # beside the 100


def test_next_to_nothing_of_a_hit_is_not_worth_a_load() -> None:
    planner = _planner(rate=1000.0)
    planner.arrived("before")
    planner.tokens_to_load("before", 0, 900, 1.0)
    for hit, wanted in ((890, 90), (910, 0)):  # in the time that the one before takes
        planner.arrived("this")
        assert planner.tokens_to_load("this", hit, 0, 1.0) == wanted
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=2)
    computes(planner, 1, 0.1)
    planner.measured_loads(1000.0, 1.0)
    for hit, wanted in ((950, 950), (10_000, 0), (400, 50)):  # as much as the disk gives in 1 s
        planner.arrived(str(hit))
        assert planner.tokens_to_load(str(hit), hit, 0, 1.0) == wanted


def test_what_lies_behind_a_hit_is_worth_its_load() -> None:
    """The disk takes longer for it than the GPU, but not than the GPU for all of it."""
    planner = _planner(rate=1000.0)
    planner.arrived("this")
    assert planner.tokens_to_load("this", 200, 800, 1.0, free_tokens=2000) == 200
    planner.load_began("this", 200)
    planner.load_ended("this")
    assert _asked_behind(planner) == 0  # 800 are to be computed: 80 ms, less than a tenth
    planner.arrived("other")
    assert planner.tokens_to_load("other", 200, 2800, 1.0) == 80


def test_a_hit_after_a_long_pause_is_loaded_as_before_it() -> None:
    """Who comes back after a night: nothing is doubted for being old."""
    planner = _planner(rate=50_000.0)
    planner.arrived("this")
    assert planner.tokens_to_load("this", 10_000, 0, 50_000.0) == 10_000


def test_a_gpu_that_shows_nothing_is_trusted_with_more_and_more() -> None:
    """Else one that was slow for a while counted as slow for ever, where all is loaded."""
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=200)
    computes(planner, 10_000, 10.0)  # at 1000 tokens a second

    def loaded_whole() -> int:
        for count in range(1000):
            planner.measured_loads(3000.0, 30.0)
            planner.arrived("this")
            if planner.tokens_to_load("this", 10_000, 0, 30.0) < 10_000:
                return count
            planner.gone("this")
        return 1000

    assert loaded_whole() == 128  # twice the factor of two, to be as fast as the disk
    planner.settled("this", 10_000)
    planner.step_began({"this": 10_000}, 30.0)
    planner.step_ended(40.0)
    assert loaded_whole() == 128
    planner.settled("this", 10_000)
    planner.step_began({"this": 10_000}, 50.0)
    planner.step_ended(51.0)
    assert loaded_whole() == 0, "now it is as fast as it was believed to be"


def test_a_hit_that_is_asked_for_again_and_again_counts_once() -> None:
    """vLLM asks in each step for one that finds no room."""
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=200)
    computes(planner, 10_000, 10.0)
    planner.measured_loads(3000.0, 30.0)
    planner.arrived("this")
    for _ in range(1000):
        assert planner.tokens_to_load("this", 10_000, 0, 30.0) == 10_000


def test_what_is_known_of_steps_of_one_size_is_not_said_of_larger_ones() -> None:
    """Found by an attack: hundreds of short prompts made the GPU count as slow, since a step costs
    something in any case, and what was long was loaded for ever.
    """
    planner = _planner(rate=5000.0)
    for number in range(2000):  # 100 tokens, 20 ms each
        computes(planner, 100, 0.02, began_s=2.0 + number, full=False)
    planner.measured_loads(5000.0, 2002.0)
    for hit, wanted in ((100, 100), (10_000, 0)):
        planner.arrived("this")
        assert planner.tokens_to_load("this", hit, 0, 500.0) == wanted


@pytest.mark.parametrize("first_steps", [1, 20])
def test_what_a_step_takes_may_become_less(first_steps: int) -> None:
    """Found by an attack: decodes, or vLLM's threshold for long prompts, leave less of a step for
    them; then what was known of larger steps stood against every hit.
    """
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=200)
    now_s = 1.0
    whole = 0
    for number, step in enumerate([8192] * first_steps + [2048] * 600):
        planner.measured_loads(100_000.0, now_s)
        planner.arrived("this")
        if planner.tokens_to_load("this", 20_000, 0, now_s) == 20_000:
            whole += number >= first_steps
            planner.gone("this")
            continue
        planner.settled("this", 20_000)
        planner.step_began({"this": step}, now_s)
        now_s += step / 10_000
        planner.step_ended(now_s)
    assert whole > 550


def test_what_a_step_takes_may_become_more_again() -> None:
    """Found by an attack: a server that was busy with answers has time again, and prompts that fit
    into a step.
    """
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=200)
    for number in range(20):
        computes(planner, 400, 0.03, began_s=1.0 + number)
    now_s, whole = 30.0, 0
    for _ in range(2000):
        planner.measured_loads(200_000.0, now_s)
        planner.arrived("this")
        if planner.tokens_to_load("this", 4000, 32, now_s) == 4000:
            whole += 1
            planner.gone("this")
            continue
        planner.settled("this", 4032)
        planner.step_began({"this": 4032}, now_s)
        now_s += 0.21
        planner.step_ended(now_s)
    assert whole > 1950


def test_a_longer_prompt_than_ever_says_nothing_of_those_after_it() -> None:
    """Found by an attack, where prompts are computed whole: one that came once had no rate, and
    whenever as much waited nothing was loaded.
    """
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=200)
    planner.measured_loads(100_000.0, 1.0)
    computes(planner, 8000, 0.8, full=False)
    planner.arrived("long")
    planner.settled("long", 100_000)
    planner.step_began({"long": 100_000}, 2.0)
    planner.step_ended(12.0)
    planner.gone("long")
    planner.arrived("before")
    planner.settled("before", 100_000)
    planner.arrived("this")
    assert planner.tokens_to_load("this", 8000, 0, 12.0) == 8000


def test_what_the_gpu_has_not_shown_yet_it_is_given_to_do() -> None:
    """As without a tier: a server that has just started over a full disk."""
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=200)
    planner.measured_loads(1e6, 0.0)
    now_s = 0.0
    planner.arrived("this")
    for hit, computed, took_s in ((32, 32, 20.0), (32, 32, 1.0), (20_000, 10_000, 20.0)):
        assert planner.tokens_to_load("this", hit, 0, now_s) == 0
        planner.settled("this", hit)
        planner.step_began({"this": computed}, now_s)
        now_s += took_s
        planner.step_ended(now_s)
    assert planner.tokens_to_load("this", 32, 0, now_s) == 32
    assert planner.tokens_to_load("this", 20_000, 0, now_s) == 0, "the first may be compiled"
    planner.settled("this", 20_000)
    planner.step_began({"this": 10_000}, now_s)
    assert planner.tokens_to_load("this", 8000, 0, now_s) == 0, "while it is under way"
    planner.step_ended(now_s + 1)
    assert planner.tokens_to_load("this", 20_000, 0, now_s) == 20_000, "by steps of 10,000"
    assert planner.tokens_to_load("this", 100, 0, now_s) == 100, "by the next larger size"


def test_what_was_promised_counts_before_its_load_begins() -> None:
    """Below a RAM tier loads begin when all requests of a step have been asked for."""
    planner = LoadPlanner("on", token_bytes=1.0, deadline_s=2)
    computes(planner, 1, 0.1)
    planner.measured_loads(1000.0, 0.0)
    for name in "abc":
        planner.arrived(name)
    asked = [planner.tokens_to_load(name, 800, 0, 0.0) for name in "abc"]
    assert sum(wanted or 0 for wanted in asked) == pytest.approx(1000, abs=1)


def test_what_was_promised_and_not_there_is_computed() -> None:
    planner = LoadPlanner("on", token_bytes=1.0, deadline_s=2)
    computes(planner, 1, 0.1)
    planner.measured_loads(1000.0, 0.0)
    for name in "abcd":
        planner.arrived(name)
    assert planner.tokens_to_load("a", 800, 0, 0.0) == 800
    planner.load_began("a", 100)
    planner.settled("a", 700)
    assert planner.tokens_to_load("b", 800, 0, 0.0) == 800
    planner.load_ended("b")
    assert planner.tokens_to_load("c", 800, 0, 0.0) == 800
    planner.settled("c", 800)
    assert planner.tokens_to_load("d", 800, 0, 0.0) == 800


def test_a_slow_disk_is_asked_for_next_to_nothing_and_again_when_it_is_fast() -> None:
    server = _warm("auto", 0.001 * GPU)
    server.loaded = 0
    server.serve(64)
    assert server.loaded < 0.01 * 64 * TOKENS
    server.disk = 10 * GPU
    server.now += 61
    for _ in range(4):
        server.serve(8)
        server.now += 61
    assert server.serve(64) < 0.5 * 64 * TOKENS / GPU


def test_off_loads_every_hit_whole() -> None:
    server = _Server("off", 0.1 * GPU)
    assert server.serve(4) == pytest.approx(4 * TOKENS / (0.1 * GPU), rel=0.05)


def test_a_lone_hit_on_a_fast_disk_is_loaded_whole() -> None:
    server = _warm("auto", 10 * GPU)
    server.loaded = 0
    server.serve(1)
    assert server.loaded == TOKENS - 1


def test_no_more_is_asked_of_the_disk_than_it_gives_before_the_deadline() -> None:
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=2)
    computes(planner, 1, 0.1)
    planner.measured_loads(1000.0, 0.0)
    asked = 0
    for number in range(10):
        planner.arrived(str(number))
        wanted = planner.tokens_to_load(str(number), 800, 0, 0.0)
        planner.load_began(str(number), wanted)
        asked += wanted
    assert asked == pytest.approx(1000, abs=1)


def test_a_disk_that_gives_nothing_is_asked_for_little_and_breaks_nothing() -> None:
    """Its first loads are under way and none has come, or it hangs."""
    planner = LoadPlanner("on", token_bytes=TOKEN_BYTES, deadline_s=2)
    computes(planner, TOKENS, 0.2)
    planner.arrived("first")
    planner.load_began("first", TOKENS)
    planner.measured_loads(0.0, 0.2)
    planner.arrived("second")
    asked = planner.tokens_to_load("second", TOKENS, 0, 0.2, behind=[TOKENS])
    assert asked * TOKEN_BYTES <= 50e6 + TOKEN_BYTES


def test_what_has_ended_is_forgotten() -> None:
    planner = LoadPlanner("on", token_bytes=1.0, deadline_s=2)
    computes(planner, 1, 0.1)
    planner.measured_loads(1000.0, 0.0)
    for number in range(100):
        planner.arrived(str(number))
        planner.tokens_to_load(str(number), 400, 100, 0.0)
        planner.load_began(str(number), 400)
        planner.gone(str(number))
    planner.gone("unknown")
    planner.arrived("last")
    assert planner.tokens_to_load("last", 400, 100, 0.0) == 400


def test_a_disk_that_gives_nothing_is_no_error() -> None:
    planner = LoadPlanner("auto", token_bytes=TOKEN_BYTES, deadline_s=2)
    computes(planner, 8192, 0.2)
    planner.measured_loads(0.0, 0.2)
    planner.arrived("b")
    assert planner.tokens_to_load("b", 8000, 192, 0.2) == 0


def _planner(rate: float | None = 1000.0) -> LoadPlanner:
    """One token a byte; the disk gives ``rate`` a second, the GPU computes 10,000."""
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=200)
    computes(planner, 10_000, 1.0)
    if rate is not None:
        planner.measured_loads(rate, 1.0)
    return planner


def _asked_behind(planner: LoadPlanner) -> int:
    """What another request would load: a tenth of what the GPU has to compute before it."""
    planner.arrived("behind")
    wanted = planner.tokens_to_load("behind", 3000, 0, 1.0)
    planner.gone("behind")
    return wanted


def test_answers_and_their_drafts_are_no_prefill() -> None:
    planner = _planner()
    planner.arrived("chat")
    planner.settled("chat", 100)
    now_s = 1.0
    planner.step_began({"chat": 100}, now_s)
    planner.step_ended(now_s)
    for _ in range(2000):  # four tokens a step, 20 ms each
        planner.step_began({"chat": 4}, now_s)
        now_s += 0.02
        planner.step_ended(now_s)
    planner.measured_loads(1000.0, now_s)
    planner.arrived("next")
    assert planner.tokens_to_load("next", 8000, 0, now_s) == 0, "the GPU is ten times faster"


def test_what_a_step_computes_is_done_also_when_a_request_goes_on_later() -> None:
    """A session that waits for more of its prompt settles again, with nothing found."""
    planner = _planner()
    planner.arrived("session")
    assert planner.tokens_to_load("session", 0, 5000, 1.0) == 0
    planner.settled("session", 5000)
    assert _asked_behind(planner) == 500
    planner.step_began({"session": 5000}, 1.0)
    planner.step_ended(1.0)
    planner.settled("session", 0)
    assert _asked_behind(planner) == 0


def test_a_load_that_nobody_waits_for_saves_nothing() -> None:
    """Below a RAM tier, where a part of what a request needs found no room."""
    planner = _planner()
    planner.arrived("settled")
    assert planner.tokens_to_load("settled", 0, 5000, 1.0) == 0
    planner.settled("settled", 5000)
    planner.load_began("settled", 1000)
    planner.load_ended("settled")
    assert _asked_behind(planner) == 500


def test_what_did_not_load_is_to_be_computed_after_all() -> None:
    planner = _planner(rate=100_000.0)
    planner.arrived("failing")
    assert planner.tokens_to_load("failing", 4900, 100, 1.0) == 4900
    planner.load_began("failing", 4900)
    planner.settled("failing", 100)
    planner.load_ended("failing")
    planner.settled("failing", 4000)
    planner.measured_loads(1000.0, 1.0)
    assert _asked_behind(planner) == 400
