"""What waiting requests will need is evicted last: what is known of it, and vLLM's scheduler."""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from vllm.v1.request import Request

from kvdisk.serving.vllm.waiting import DeviceCache, KeepWaiting, Waiting
from tests.serving.vllm.below_ram import BLOCK_TOKENS, CHUNKS, Engine, Setting, engine_of
from tests.serving.vllm.chunks import broken
from tests.serving.vllm.pools import hashes, waiting_for

pytestmark = pytest.mark.quick


def test_what_two_wait_for_is_kept_until_both_have_it() -> None:
    """In the turn of the first of those that wait still."""
    shared, other = hashes("s", 3), hashes("o", 2)
    waiting = waiting_for(one=shared, between=other, two=shared[:2], three=shared)
    assert [waiting.turn(each) for each in shared] == [1, 2, 3]
    waiting.gone("three")
    assert [waiting.turn(each) for each in shared] == [1, 2, 3]
    waiting.gone("one")
    assert [waiting.turn(each) for each in [*other, *shared]] == [4, 5, 6, 7, 0]
    waiting.arrived("two", shared)  # the same once more: it counts once
    waiting.gone("two")
    waiting.gone("between")
    waiting.gone("unknown")
    assert [waiting.turn(each) for each in shared] == [0, 0, 0]
    assert not any([waiting, waiting._turns, waiting._counted, waiting._later])


def test_turns_are_those_of_the_first_that_still_waits_whoever_has_gone() -> None:
    """Against a plain reference: prompts that share beginnings, served or aborted."""
    chance = random.Random(7)
    waiting, there = Waiting(), {}
    count = 0
    for step in range(3000):
        if there and chance.random() < 0.5:
            name = chance.choice([*there][: chance.choice([1, 99])])
            waiting.gone(name)
            del there[name]
        else:
            prompt: list[bytes] = []
            for _ in range(chance.randrange(6)):
                prompt.append(b"%d" % hash((*prompt, chance.randrange(2))))
            waiting.arrived(str(step), prompt)
            there[str(step)] = dict(zip(prompt, range(count + 1, count + 7), strict=False))
            count += len(prompt)
        expected: dict[bytes, int] = {}
        for turns in reversed(there.values()):
            expected.update(turns)
        assert {each: waiting.turn(each) for each in waiting._turns} == expected


def test_who_wants_the_same_far_behind_is_found() -> None:
    """Found by an attack: as if it were the last, so that a prompt's head went before its tail."""
    shared = hashes("s", 3)
    others = {f"other {number}": hashes(f"{number}-", 1) for number in range(300)}
    waiting = waiting_for(one=shared, **others, two=[*shared, *hashes("t", 3)], three=shared)
    waiting.gone("one")
    assert [waiting.turn(each) for each in shared] == [304, 305, 306]


def test_who_wants_the_same_far_behind_is_not_searched_for() -> None:
    """Found by an attack: 4,000 that waited a second time took 1.8 s when they were aborted."""
    waiting = Waiting()
    names = [f"{name}-{turn}" for turn in (1, 2) for name in range(4000)]
    for name in names:
        waiting.arrived(name, hashes(name[:-1], 1))
    begin = time.process_time()
    for name in names[:4000]:
        waiting.gone(name)
    assert time.process_time() - begin < 0.5
    assert waiting.turn(hashes("0-", 1)[0]) == 4001


def test_one_that_makes_room_for_very_many_does_not_count_them_all_at_once() -> None:
    """Found by an attack: a long prompt that began counted a thousand questions in that step."""
    waiting = Waiting(hashes_max=1000)
    waiting.arrived("long", hashes("a", 1000))
    for number in range(100):
        waiting.arrived(str(number), [*hashes("s", 8), *hashes(f"{number}-", 1)])
    waiting.gone("long")
    assert len(waiting._counted) == 2
    for number in range(49):
        waiting.gone(str(number))
    assert len(waiting._counted) == 51
    assert not waiting._later


def test_of_a_long_queue_the_first_are_known_and_the_others_in_their_turn() -> None:
    prompts = {name: hashes(name, 4) for name in "abcd"}
    waiting = Waiting(hashes_max=6)
    for name, prompt in prompts.items():
        waiting.arrived(name, prompt)
    assert [bool(waiting.turn(prompt[0])) for prompt in prompts.values()] == [1, 1, 0, 0]
    waiting.gone("a")
    assert [bool(waiting.turn(prompt[0])) for prompt in prompts.values()] == [0, 1, 1, 0]
    assert waiting.turn(prompts["b"][0]) < waiting.turn(prompts["c"][0])
    assert list(waiting) == ["b", "c", "d"]


def test_what_many_want_counts_for_each() -> None:
    """Else memory grows with all that wait, and so does what it takes to forget one."""
    waiting = Waiting(hashes_max=30)
    for number in range(9):
        waiting.arrived(str(number), [*hashes("s", 9), *hashes(f"{number}-", 1)])
    assert [*waiting._counted] == ["0", "1", "2"]
    waiting.gone("1")
    assert [*waiting._counted] == ["0", "2", "3"]


def test_a_list_of_hashes_that_grows_is_forgotten_as_it_was_counted() -> None:
    """Of a session that waits for more of its prompt."""
    prompt = hashes("a", 2)
    waiting = waiting_for(one=prompt)
    prompt += hashes("b", 2)
    waiting.gone("one")
    assert not any([waiting, waiting._turns])


# --- vLLM's scheduler above a RAM tier and a disk

PROMPTS = 8


def scan_twice(engine: Engine) -> int:
    """Prompts one after the other, then all of them at once: how many tokens the GPU had then."""
    tokens = CHUNKS * BLOCK_TOKENS
    engine.chance.random = lambda: 1.0  # type: ignore[method-assign]  # no prompt of its own
    for prefix in range(PROMPTS):
        engine.ask(prefix, tokens, 1)
        engine.drain()
    on_device: dict[str, int] = {}
    find = engine.ours.get_num_new_matched_tokens

    def asked(request: Any, computed: int) -> Any:
        on_device[request.request_id] = computed
        return find(request, computed)

    engine.ours.get_num_new_matched_tokens = asked
    for prefix in range(PROMPTS):
        engine.ask(prefix, tokens, 1)
    engine.drain()
    return sum(on_device.values())


@pytest.mark.parametrize("keep", [True, False])
def test_more_waits_than_the_device_holds(keep: bool, tmp_path: Path) -> None:
    """In the order in which it was computed: by LRU each pushes out what the next would find."""
    setting = Setting(
        gpu_blocks=4 * CHUNKS + 4,
        ram_rows=16,
        step_tokens=CHUNKS * BLOCK_TOKENS,
        evict_waiting_last=keep,
    )
    with engine_of(tmp_path, setting) as engine:
        found = scan_twice(engine)
    assert (found >= 2 * CHUNKS * BLOCK_TOKENS) is keep
    assert keep or found == 0


NOBODY = SimpleNamespace(request_id=None, block_hashes=[])


def work_behind(engine: Engine, asked: Any = None) -> dict[str, int]:
    """Of each request that waits, behind one that is asked for or behind none."""
    ours = engine.ours
    asked = asked or NOBODY
    names = [each for each in ours.waiting if each != asked.request_id]
    return dict(zip(names, ours._work_behind(ours.planner, asked), strict=True))


def test_one_that_may_not_read_the_cache_wants_nothing_of_it(tmp_path: Path) -> None:
    tokens = CHUNKS * BLOCK_TOKENS
    with engine_of(tmp_path, Setting()) as engine:
        engine.ask_for([7] * tokens)
        engine.drain()
        ask = Request.__init__

        def deaf(self: Request, *arguments: Any, **options: Any) -> None:
            ask(self, *arguments, **options)
            self.skip_reading_prefix_cache = True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Request, "__init__", deaf)
            request = engine.ask_for([7] * tokens)
        assert engine.ours.waiting.turn(request.block_hashes[0]) == 0
        assert work_behind(engine) == {request.request_id: tokens}
        engine.drain()


def test_what_was_evicted_meanwhile_is_work_again(tmp_path: Path) -> None:
    setting = Setting(gpu_blocks=3 * CHUNKS, ram_rows=CHUNKS, step_tokens=CHUNKS * BLOCK_TOKENS)
    with engine_of(tmp_path, setting) as engine:
        engine.chance.random = lambda: 1.0  # type: ignore[method-assign]
        tokens = CHUNKS * BLOCK_TOKENS
        pool = engine.scheduler.kv_cache_manager.block_pool

        def evict(request: Any, first: int) -> None:
            hashes = request.block_hashes[first:]
            pool.evict_blocks({pool.get_cached_block(each, [0])[0].block_id for each in hashes})

        engine.ask(1, tokens, 1)
        engine.drain()
        engine.ask(2, tokens, 1)  # pushes the first out of the RAM tier
        engine.drain()
        evict(engine.ask(2, tokens, 1), 0)  # so that its hit is planned
        last = engine.ask(1, tokens, 1)
        assert work_behind(engine)[last.request_id] == 1, "it is on the device"
        evict(last, 5)
        assert work_behind(engine)[last.request_id] == tokens - 5 * BLOCK_TOKENS
        engine.drain()


def test_what_several_want_is_work_for_the_first_of_them(tmp_path: Path) -> None:
    """Found by an attack: questions on one document each counted as computing all of it, so that
    the first waited for its load while the GPU had nothing to do.
    """
    document, question = [7] * CHUNKS * BLOCK_TOKENS, BLOCK_TOKENS + 3
    setting = Setting(gpu_blocks=9 * CHUNKS, step_tokens=CHUNKS * BLOCK_TOKENS, seats=2)
    with engine_of(tmp_path, setting) as engine:
        asked, *others = (
            engine.ask_for([*document, *[number] * question], name=str(number))
            for number in range(20, 24)
        )
        other = engine.ask_for([8] * len(document), name="other")
        own_tokens = len(document) + question
        behind = work_behind(engine, asked)
        assert behind == {
            **{each.request_id: question for each in others},
            other.request_id: len(document),
        }
        assert work_behind(engine)[asked.request_id] == own_tokens
        engine.step(moves_end=2.0)  # it is being computed: for those that wait as well
        assert asked.request_id not in engine.ours.waiting
        waiting = work_behind(engine, other)
        assert waiting
        assert set(waiting.values()) == {question}
        engine.drain()
        assert engine.ours._requests == {}
        assert work_behind(engine) == {}


def test_who_was_asked_and_still_waits_is_no_work_behind(tmp_path: Path) -> None:
    """Below a RAM tier, until what is promised is there: the planner's books have it already."""
    with engine_of(tmp_path, Setting(gpu_blocks=3 * CHUNKS, ram_rows=2 * CHUNKS)) as engine:
        waits = engine.ask_for([7] * CHUNKS * BLOCK_TOKENS)
        assert work_behind(engine) == {waits.request_id: CHUNKS * BLOCK_TOKENS}
        engine.ours.planner.tokens_to_load(waits.request_id, 64, 64, 0.0)
        assert [*engine.ours._work_behind(engine.ours.planner, NOBODY)] == []
        other = engine.ask_for([7] * CHUNKS * BLOCK_TOKENS)
        [left] = engine.ours._work_behind(engine.ours.planner, NOBODY)
        assert left == 1, "it waits for the same"
        assert other.request_id not in engine.ours.planner.unfinished
        engine.drain()
        assert engine.ours._requests == engine.ours.planner.unfinished == {}


def test_the_next_step_of_one_that_runs_takes_nothing_that_is_wanted(tmp_path: Path) -> None:
    """It is not asked for again before it takes its blocks."""
    setting = Setting(gpu_blocks=4 * CHUNKS, ram_rows=CHUNKS, step_tokens=2 * BLOCK_TOKENS, seats=1)
    with engine_of(tmp_path, setting) as engine:
        engine.chance.random = lambda: 1.0  # type: ignore[method-assign]
        for prefix in (1, 2, 3):
            engine.ask(prefix, CHUNKS * BLOCK_TOKENS, 1)
            engine.drain()
        engine.ask(4, 2 * CHUNKS * BLOCK_TOKENS, 1)
        engine.step(moves_end=2.0)
        waits = engine.ask(1, CHUNKS * BLOCK_TOKENS, 1)
        for _ in range(6):
            engine.step(moves_end=2.0)
            assert waits.request_id in engine.ours.waiting
        found = engine.ours._device.found_tokens(waits.block_hashes)
        engine.drain()
    assert found == CHUNKS * BLOCK_TOKENS


def test_room_is_what_is_free_beside_all_of_a_request(tmp_path: Path) -> None:
    with engine_of(tmp_path, Setting(gpu_blocks=4 * CHUNKS + 1)) as engine:
        told: list[float] = []
        planner = engine.ours.planner
        decide = planner.tokens_to_load

        def remember(*arguments: Any, **options: Any) -> int:
            told.append(options["room_tokens"])
            return decide(*arguments, **options)

        planner.tokens_to_load = remember
        engine.ask(1, CHUNKS * BLOCK_TOKENS, 1)
        engine.drain()
    assert told == [3 * CHUNKS * BLOCK_TOKENS]


def test_in_each_step_as_much_may_be_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._STEP_BLOCKS", 2 * CHUNKS)
    with engine_of(tmp_path, Setting(step_tokens=2 * BLOCK_TOKENS)) as engine:
        left: list[int] = []
        for prefix in range(3):
            engine.ask(prefix, CHUNKS * BLOCK_TOKENS, 1)
        engine.ask(4, CHUNKS * BLOCK_TOKENS, 1)
        for _ in range(20):
            engine.step(moves_end=2.0)
            left.append(engine.ours._device._blocks_left)
        engine.drain()
    # After a step's end the next one's blocks are looked at.
    assert min(left) > 0
    assert max(left) <= 2 * CHUNKS


def test_before_a_request_is_given_blocks_as_many_are_put_first(tmp_path: Path) -> None:
    """All of a prompt that is loaded takes its blocks at once, however small a step is."""
    with engine_of(tmp_path, Setting(step_tokens=2 * BLOCK_TOKENS)) as engine:
        needed: list[float] = []
        device = engine.ours._device
        device.evict_waiting_last = lambda waiting, tokens: needed.append(tokens)
        engine.ask(1, CHUNKS * BLOCK_TOKENS, 1)
        engine.ask(2, CHUNKS * BLOCK_TOKENS, 1)  # else nobody is left who waits
        engine.step(moves_end=2.0)
        engine.drain()
    assert needed[0] == CHUNKS * BLOCK_TOKENS
    assert min(needed) == 2 * BLOCK_TOKENS


def test_for_what_the_device_has_of_a_request_nothing_is_put_first(tmp_path: Path) -> None:
    with engine_of(tmp_path, Setting(step_tokens=BLOCK_TOKENS)) as engine:
        for chunks in (5, 2):  # a prompt that begins like the next, and whose end stays
            engine.ask_for([7] * chunks * BLOCK_TOKENS + [chunks])
            engine.drain()
        needed: list[float] = []
        engine.ours._device.evict_waiting_last = lambda _, tokens: needed.append(tokens)
        engine.ask_for([7] * 5 * BLOCK_TOKENS + [8] * 3 * BLOCK_TOKENS)
        engine.ask_for([9] * CHUNKS * BLOCK_TOKENS)  # else nobody is left who waits
        engine.step(moves_end=2.0)
        engine.drain()
    assert needed[0] == 3 * BLOCK_TOKENS


def test_of_a_larger_device_s_queue_more_is_known(tmp_path: Path) -> None:
    """As much as it could hold several times."""
    known: list[int] = []
    for blocks in (64, 9000):
        (tmp_path / str(blocks)).mkdir()
        with engine_of(tmp_path / str(blocks), Setting(gpu_blocks=blocks)) as engine:
            known.append(engine.ours.waiting.hashes_max)
    assert known == [65_536, 8 * 9000]


def test_a_device_that_keeps_nothing_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceCache, "__init__", broken)
    with engine_of(tmp_path, Setting(prefix_caching=False)) as engine:
        assert scan_twice(engine) == 0
        assert engine.ours.waiting is not None, "it raised"


def test_what_nobody_waits_for_any_more_goes_before_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue was seen to be all wanted, and one of those who wait is aborted."""
    monkeypatch.setattr("kvdisk.serving.vllm.waiting._WINDOW_BLOCKS", 8)
    setting = Setting(gpu_blocks=6 * CHUNKS + 2, ram_rows=6 * CHUNKS, step_tokens=4, seats=1)
    with engine_of(tmp_path, setting) as engine:
        engine.chance.random = lambda: 1.0  # type: ignore[method-assign]
        prompts = [[10 + number] * (CHUNKS * BLOCK_TOKENS) for number in range(6)]
        for prompt in prompts:
            engine.ask_for(prompt)
            engine.drain()
        engine.ask_for([90] * 4, 99)
        waiting = [engine.ask_for(prompt) for prompt in prompts]
        for _ in range(20):
            engine.step(moves_end=2.0)
        found = engine.ours._device.found_tokens
        before = [found(each.block_hashes) for each in waiting]
        assert sum(before) > 5 * CHUNKS * BLOCK_TOKENS
        engine.abort(waiting[2].request_id)
        for _ in range(50):
            engine.step(moves_end=2.0)
        after = [found(each.block_hashes) for each in waiting]
        engine.drain()
    assert after[2] < before[2]
    del before[2], after[2]
    assert after == before


def test_before_one_that_waits_for_the_disk_no_blocks_are_put_first() -> None:
    """vLLM takes none for it yet, and asks for it in each step."""
    answers = iter([(None, False), (0, False)])
    request = SimpleNamespace(request_id="one", num_tokens=9)

    class Vllms:
        def get_num_new_matched_tokens(self, *_: Any) -> Any:
            return next(answers)

    class Connector(KeepWaiting, Vllms):
        pass

    made: Any = Connector()
    needed: list[int] = []
    made.waiting, made._reorders = waiting_for(one=hashes("a", 2)), True
    made._device = SimpleNamespace(evict_waiting_last=lambda _, tokens: needed.append(tokens))
    for answered in ([], [9]):
        made.get_num_new_matched_tokens(request, 0)
        assert needed == answered


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_is_served_first_is_as_vllm_schedules(policy: str, tmp_path: Path) -> None:
    with engine_of(tmp_path, Setting(policy=policy)) as engine:
        assert engine.ours._device._served_as_they_come is (policy == "fcfs")


@pytest.mark.parametrize(
    "method", ["found_tokens", "free_tokens", "evict_waiting_last", "__init__"]
)
def test_a_bug_here_leaves_vllms_order_alone(
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    failing = property(broken) if method == "free_tokens" else broken
    monkeypatch.setattr(DeviceCache, method, failing)
    setting = Setting(gpu_blocks=4 * CHUNKS + 4, evict_waiting_last=False)
    if method == "evict_waiting_last":
        setting.evict_waiting_last = True
    with engine_of(tmp_path, setting) as engine:
        scan_twice(engine)
        ours: Any = engine.ours
        assert ours.waiting is None
        assert ours.planner is not None
    assert len([text for text in caplog.messages if "please report it" in text]) == 1
