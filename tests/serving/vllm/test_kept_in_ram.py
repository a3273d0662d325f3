"""What waits stays in vLLM's RAM tier: vLLM's own scheduler above a simulated disk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.request import Request

from kvdisk.serving.vllm.allowances import Look
from kvdisk.serving.vllm.ram_tier import RamTier
from kvdisk.serving.vllm.tiering_connector import KVDiskTieringConnector
from kvdisk.serving.vllm.waiting import Waiting
from kvdisk.testing import Faults
from tests.serving.vllm.below_ram import BLOCK_TOKENS, CHUNKS, Engine, Setting, engine_of
from tests.serving.vllm.chunks import broken
from tests.serving.vllm.pools import hashes

pytestmark = pytest.mark.quick


def in_ram(engine: Engine, request: Request) -> int:
    """How many chunks of a request's prompt the RAM tier has."""
    ram = engine.manager.primary_tier._policy
    return sum(ram.get(make_offload_key(each, 0)) is not None for each in request.block_hashes)


@pytest.mark.parametrize("shared", [0, 1], ids=["apart", "one-system-prompt"])
def test_the_ram_tier_gives_up_what_is_wanted_last(shared: int, tmp_path: Path) -> None:
    """Also where the device has the first block of all of them."""
    setting = Setting(ram_rows=5 * CHUNKS, step_tokens=CHUNKS * BLOCK_TOKENS)
    with engine_of(tmp_path, setting) as engine:
        engine.chance.random = lambda: 1.0  # type: ignore[method-assign]
        prompts = [[3] * (shared * BLOCK_TOKENS) for _ in range(4)]
        for prefix, prompt in enumerate(prompts):
            prompt += [10 + prefix] * (CHUNKS * BLOCK_TOKENS - len(prompt))
            engine.ask_for(prompt)
            engine.drain()
        engine.scheduler.kv_cache_manager.reset_prefix_cache()
        if shared:
            engine.ask_for([3] * BLOCK_TOKENS + [9])
            engine.drain()
        for prompt in prompts:
            engine.ask_for(prompt)
        touch_ram(engine)
        engine.manager.primary_tier._policy.evict(CHUNKS, set())
        left = [in_ram(engine, each) for each in engine.requests.values()]
        engine.drain()
    assert left == [CHUNKS - shared] * 3 + [0]


def touch_ram(engine: Engine) -> None:
    engine.ours._ram._touch_at_change = 0
    engine.ours._ram.step_ended()
    engine.ours._before_rows_are_taken()


def in_ram_alone(engine: Engine, count: int = 6) -> list[list[int]]:
    """Prompts in a RAM tier of eight, that are on the device no more."""
    engine.chance.random = lambda: 1.0  # type: ignore[method-assign]
    prompts = [[10 + number] * (CHUNKS * BLOCK_TOKENS) for number in range(count)]
    for prompt in prompts:
        engine.ask_for(prompt)
        engine.drain()
    engine.scheduler.kv_cache_manager.reset_prefix_cache()
    return prompts


def four_wait(engine: Engine) -> None:
    """For what the RAM tier has, and it knows."""
    for prompt in in_ram_alone(engine)[:4]:
        engine.ask_for(prompt)
    touch_ram(engine)


EIGHT_IN_RAM = {"ram_rows": 8 * CHUNKS, "step_tokens": CHUNKS * BLOCK_TOKENS, "seats": 1}


@pytest.mark.parametrize("keep", [True, False])
def test_what_waits_is_not_given_up_for_what_nobody_waits_for(keep: bool, tmp_path: Path) -> None:
    """In the RAM tier, by whatever is computed before it; when nobody waits, all is stored."""
    setting = Setting(**EIGHT_IN_RAM, evict_waiting_last=keep)
    with engine_of(tmp_path, setting) as engine:
        prompts = in_ram_alone(engine)
        others = [engine.ask_for([50 + number] * CHUNKS * BLOCK_TOKENS) for number in range(4)]
        waiting = [engine.ask_for(prompt) for prompt in prompts[:4]]
        while not all(each.is_finished() for each in others):
            engine.step(moves_end=2.0)
        left = [in_ram(engine, each) for each in waiting]
        engine.drain()
        last = engine.ask_for([70] * CHUNKS * BLOCK_TOKENS)
        engine.drain()
        assert in_ram(engine, last) == CHUNKS
    assert (left == [CHUNKS] * 4) is keep


def test_where_other_tiers_lie_below_they_have_all_that_vllm_offers(tmp_path: Path) -> None:
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM, other_tier=True)) as engine:
        prompts = in_ram_alone(engine, 8)
        first = engine.ask_for([50] * 3 * CHUNKS * BLOCK_TOKENS)
        for prompt in prompts:
            engine.ask_for(prompt)
        engine.drain()
        _, other = engine.manager.secondary_tiers
        assert {make_offload_key(each, 0) for each in first.block_hashes} <= other.chunks.keys()


def fitting(
    engine: Engine, prompt: list[bytes], context: ReqContext | None = None, taken: bool = True
) -> int:
    """How many chunks of a prompt vLLM would be given to store now; whether it could."""
    own = context or request_of(engine, "other")
    keys = [make_offload_key(each, 0) for each in prompt]
    for number, key in enumerate(keys):
        own.set_offload_key_position(key, (number + 1) * BLOCK_TOKENS)
    given: list[list[Any]] = []

    def prepare_store(keys: Any, _: ReqContext) -> Any:
        given.append([*keys])
        return object() if taken else None

    engine.ours._prepare_what_fits(prepare_store, keys, own)
    (found,) = given
    assert found == keys[: len(found)]
    if context is None:
        engine.tier.allowances.gone("other")
    return len(found)


def request_of(engine: Engine, name: str) -> ReqContext:
    engine.tier.allowances.arrived(name)
    return ReqContext(name)


def left_out(engine: Engine) -> int:
    """As an operator sees it."""
    told = engine.tier.get_stats()
    refused = {} if told is None else told._values.get("vllm:kvdisk_refusals", {})
    return int(refused.get(("waiting",), 0))


LONG = hashes("long", 10 * CHUNKS)


def test_only_what_is_there_and_wanted_is_kept(tmp_path: Path) -> None:
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine:
        prompts = in_ram_alone(engine)
        engine.ask_for([50] * CHUNKS * BLOCK_TOKENS)
        assert fitting(engine, LONG) == 10 * CHUNKS, "nothing is wanted of it"
        waiting = [engine.ask_for(prompt) for prompt in prompts[:4]]
        touch_ram(engine)
        assert fitting(engine, LONG) == 2 * CHUNKS, "a quarter is for the disk's"
        engine.tier.allowances.allow(waiting[0].request_id, look({0, 1, 2}), 3 * BLOCK_TOKENS)
        touch_ram(engine)
        assert fitting(engine, LONG) == 2 * CHUNKS + 3, "and some of that is taken"
        engine.tier.allowances.settled(waiting[0].request_id)
        engine.drain()


def look(chunks: set[int]) -> Look:
    found = Look(BLOCK_TOKENS)
    for number in chunks:
        found.told((1 + number) * BLOCK_TOKENS, True)
    return found


def test_what_many_wait_for_is_kept_once(tmp_path: Path) -> None:
    """One system prompt, and a queue of questions, stopped every store."""
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine:
        prompts = in_ram_alone(engine)
        for _ in range(12):
            engine.ask_for(prompts[0])
        touch_ram(engine)
        assert fitting(engine, LONG) == 5 * CHUNKS
        engine.drain()


def test_what_is_held_for_the_disk_is_not_counted_twice(tmp_path: Path) -> None:
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine:
        engine.chance.random = lambda: 1.0  # type: ignore[method-assign]
        prompts = [[10 + number] * (CHUNKS * BLOCK_TOKENS) for number in range(4)]
        for number, prompt in enumerate(prompts):
            engine.disk.faults = Faults(delay=float(number >= 2))
            engine.ask_for(prompt)
            for _ in range(9):
                engine.step(moves_end=2.0)
        engine.scheduler.kv_cache_manager.reset_prefix_cache()
        assert engine.tier._held_rows == 2 * CHUNKS
        for prompt in prompts:
            engine.ask_for(prompt)
        touch_ram(engine)
        assert fitting(engine, LONG) == 4 * CHUNKS, "as much as is free"
        engine.disk.faults = Faults()
        engine.drain()


def test_what_is_stored_takes_room_whoever_waits_for_it(tmp_path: Path) -> None:
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine:
        prompts = in_ram_alone(engine)
        for prompt in prompts[:4]:
            engine.ask_for(prompt)
        wanted = engine.ask_for([90] * CHUNKS * BLOCK_TOKENS)
        touch_ram(engine)
        assert fitting(engine, [*wanted.block_hashes, *LONG]) == 2 * CHUNKS
        engine.drain()


def test_the_rows_of_a_prompt_are_no_room_for_the_rest_of_it(tmp_path: Path) -> None:
    """Found by an attack: vLLM gives up none of these, so that it took what others wait for."""
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine:
        prompts = in_ram_alone(engine, 8)
        there = [engine.ask_for(prompt) for prompt in prompts[:4]]
        touch_ram(engine)
        own = [each for prompt in prompts[4:7] for each in blocks_of(engine, prompt)]
        assert fitting(engine, [*own, *LONG]) == 3 * CHUNKS
        assert fitting(engine, LONG) == 2 * CHUNKS
        assert all(in_ram(engine, each) == CHUNKS for each in there)
        engine.drain()


def blocks_of(engine: Engine, prompt: list[int]) -> list[bytes]:
    request = engine.ask_for(prompt)
    engine.abort(request.request_id)
    return [*request.block_hashes]


def test_nothing_is_stored_behind_what_was_left_out(tmp_path: Path) -> None:
    """It would never be found."""
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine:
        four_wait(engine)
        cut = request_of(engine, "cut")
        engine.tier.get_stats()
        assert fitting(engine, LONG[: 3 * CHUNKS], cut) == 2 * CHUNKS
        assert left_out(engine) == CHUNKS
        assert fitting(engine, LONG[: 3 * CHUNKS], cut) == 2 * CHUNKS, "what lies before is"
        assert fitting(engine, LONG[:1]) == 1, "and another request's"
        engine.drain()
        assert fitting(engine, LONG[: 3 * CHUNKS], cut) == 2 * CHUNKS
        engine.tier.allowances.gone("cut")
        assert fitting(engine, LONG[: 3 * CHUNKS], request_of(engine, "cut")) == 3 * CHUNKS
        engine.tier.allowances.gone("cut")


def test_what_vllm_offers_again_is_not_left_out(tmp_path: Path) -> None:
    """Found in a review: it had no room at that moment, and what was wanted was lost."""
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine:
        four_wait(engine)
        one = request_of(engine, "one")
        engine.tier.get_stats()
        assert fitting(engine, LONG, one, taken=False) == 2 * CHUNKS
        assert left_out(engine) == 0
        engine.drain()
        assert fitting(engine, LONG, one) == 10 * CHUNKS
        engine.tier.allowances.gone("one")


def test_after_a_reset_all_of_a_prompt_is_offered_anew(tmp_path: Path) -> None:
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine:
        four_wait(engine)
        one = request_of(engine, "one")
        assert fitting(engine, LONG, one) == 2 * CHUNKS
        engine.drain()
        engine.reset()
        assert fitting(engine, LONG, one) == 10 * CHUNKS
        engine.tier.allowances.gone("one")


def test_once_nobody_waits_all_is_stored(tmp_path: Path) -> None:
    """At once, and not when the RAM tier is touched the next time."""
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine:
        waiting = [engine.ask_for(prompt) for prompt in in_ram_alone(engine)[:4]]
        touch_ram(engine)
        assert fitting(engine, LONG) == 2 * CHUNKS
        for each in waiting:
            engine.abort(each.request_id)
        assert fitting(engine, LONG) == 10 * CHUNKS
        engine.drain()


def test_who_comes_after_the_ram_tier_was_touched_is_reckoned_with_soon(tmp_path: Path) -> None:
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine:
        prompts = in_ram_alone(engine, 8)
        engine.ask_for([50] * BLOCK_TOKENS, 200)
        engine.step(moves_end=2.0)
        engine.ask_for([60] * BLOCK_TOKENS)
        touch_ram(engine)
        assert fitting(engine, LONG) == 10 * CHUNKS
        for prompt in prompts:
            engine.ask_for(prompt)
        engine.step(moves_end=2.0)
        assert fitting(engine, LONG) in (2 * CHUNKS, 2 * CHUNKS - 1)
        engine.drain()


@pytest.mark.parametrize("what", ["aborted", "reset"])
def test_what_waits_no_more_is_not_kept_for_long(what: str, tmp_path: Path) -> None:
    """While somebody waits who wants nothing of it."""
    with engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine:
        prompts = in_ram_alone(engine, 8)
        engine.ask_for([50] * BLOCK_TOKENS, 200)
        waiting = [engine.ask_for(prompt) for prompt in prompts]
        engine.ask_for([60] * BLOCK_TOKENS)
        engine.step(moves_end=2.0)
        touch_ram(engine)
        assert fitting(engine, LONG) in (2 * CHUNKS, 2 * CHUNKS - 1), "a quarter is for what is new"
        engine.step(moves_end=2.0)
        if what == "aborted":
            for each in waiting:
                engine.abort(each.request_id)
            for _ in range(8):
                engine.step(moves_end=2.0)
        else:
            engine.reset()
            assert fitting(engine, LONG) >= 7 * CHUNKS, "what is free is nobody's"
            for _ in range(64):
                engine.step(moves_end=2.0)
        assert fitting(engine, LONG) == 10 * CHUNKS
        engine.drain()


def test_what_somebody_waits_for_is_stored_whatever_waits(tmp_path: Path) -> None:
    setting = Setting(**{**EIGHT_IN_RAM, "step_tokens": 4 * CHUNKS * BLOCK_TOKENS})
    with engine_of(tmp_path, setting) as engine:
        prompts = in_ram_alone(engine, 8)
        shared = [50] * 3 * CHUNKS * BLOCK_TOKENS
        first = engine.ask_for([*shared, *[51] * BLOCK_TOKENS])
        for prompt in prompts:
            engine.ask_for(prompt)
        engine.ask_for([*shared, *[52] * BLOCK_TOKENS])
        while not first.is_finished():
            engine.step(moves_end=2.0)
        assert in_ram(engine, first) == 3 * CHUNKS
        engine.drain()


def computed_a_turn(directory: Path, shared_chunks: int, ram_rows: int, keep: bool) -> float:
    """Tokens, in chats that all wait for two seats again and again: a queue that never ends."""
    setting = Setting(ram_rows=ram_rows, slots=2048, seats=2, step_tokens=256)
    setting.evict_waiting_last = keep
    directory.mkdir()
    with engine_of(directory, setting) as engine:
        chance = random.Random(5)
        turns = 0

        def more(prompt: list[int], chunks: int) -> list[int]:
            return [*prompt, *(3 + chance.randrange(900) for _ in range(chunks * BLOCK_TOKENS))]

        head = [7] * shared_chunks * BLOCK_TOKENS
        chats = [engine.ask_for(more(head, 3), 4) for _ in range(30)]
        for _ in range(800):
            engine.step(moves_end=0.8)
            for number, chat in enumerate(chats):
                if chat.is_finished():
                    turns += 1
                    prompt = [*chat.all_token_ids] if len(chat.all_token_ids) < 400 else head
                    chats[number] = engine.ask_for(more(prompt, 3), 4)
        for chat in chats:
            engine.abort(chat.request_id)
        engine.drain()
    return engine.tokens_computed / turns


@pytest.mark.parametrize(("shared_chunks", "ram_rows"), [(8, 256), (0, 256), (0, 128)])
def test_with_a_queue_that_never_ends_no_more_is_computed_for_it(
    shared_chunks: int, ram_rows: int, tmp_path: Path
) -> None:
    """Found by an attack: nothing new was stored any more, and twice as much computed."""
    on, off = (
        computed_a_turn(tmp_path / str(keep), shared_chunks, ram_rows, keep)
        for keep in (True, False)
    )
    assert on <= 1.02 * off


def test_the_ram_tier_is_touched_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each request; and not where its policy learns from each use."""
    setting = Setting(ram_rows=2 * CHUNKS, step_tokens=CHUNKS * BLOCK_TOKENS)
    with engine_of(tmp_path, setting) as engine:
        touched: list[str] = []
        counted: list[str] = []
        ram = engine.ours._ram

        def remember(keys: list[Any], request_id: str) -> None:
            assert all(map(ram._has, keys))
            touched.append(request_id)

        def use(request_id: str, hashes: Any) -> None:
            counted.append(request_id)
            RamTier.use(ram, request_id, hashes)

        monkeypatch.setattr(ram, "_touch", remember)
        monkeypatch.setattr(ram, "use", use)
        for number in range(40):
            engine.ask(number % 3, CHUNKS * BLOCK_TOKENS, 1)
        engine.drain()
        assert counted, "what the disk completes is used"
        assert 3 <= len(touched) - len(counted) <= 40 / 2
        touched.clear()
        counted.clear()
        monkeypatch.setattr("kvdisk.serving.vllm.ram_tier.LRUCachePolicy", Waiting)
        for number in range(40):
            engine.ask(number % 3, CHUNKS * BLOCK_TOKENS, 1)
        engine.drain()
        assert counted
        assert not touched


def test_the_ram_tier_is_touched_once_in_a_step_and_in_part(tmp_path: Path) -> None:
    """Found by an attack: 256 requests that began in a step had it touched 53 times."""
    tokens = CHUNKS * BLOCK_TOKENS
    setting = Setting(gpu_blocks=400, ram_rows=100 * CHUNKS, seats=64, step_tokens=64 * tokens)
    with engine_of(tmp_path, setting) as engine, pytest.MonkeyPatch.context() as patch:
        engine.chance.random = lambda: 1.0  # type: ignore[method-assign]
        for _ in range(2):
            for number in range(40):
                engine.ask_for([10 + number] * tokens)
            engine.drain()
        touched: list[int] = []
        patch.setattr(engine.ours._ram, "_touch", lambda keys, _: touched.append(len(keys)))
        patch.setattr("kvdisk.serving.vllm.ram_tier._LOOKED_MAX", 10)
        patch.setattr("kvdisk.serving.vllm.ram_tier._LOOKS_PER_REQUEST", 1)
        patch.setattr("kvdisk.serving.vllm.ram_tier._TOUCHED_LEAST", 1)
        engine.ours._ram._touch_at_change = 0
        for number in range(40):
            engine.ask_for([10 + number] * tokens)
        engine.step(moves_end=2.0)
        engine.drain()
    assert touched == [10]


def test_the_ram_tier_is_not_touched_in_each_step_in_which_somebody_ends(tmp_path: Path) -> None:
    """Found by an attack: an abort in each step had all of it touched in each."""
    with (
        engine_of(tmp_path, Setting(**EIGHT_IN_RAM)) as engine,
        pytest.MonkeyPatch.context() as patch,
    ):
        prompts = in_ram_alone(engine)
        engine.ask_for([50] * BLOCK_TOKENS, 200)
        waiting = [engine.ask_for(prompts[number % 6]) for number in range(40)]
        engine.step(moves_end=2.0)
        touched: list[int] = []
        patch.setattr(engine.ours._ram, "_touch", lambda keys, _: touched.append(len(keys)))
        for each in waiting:
            engine.abort(each.request_id)
            engine.step(moves_end=2.0)
            engine.ours._before_rows_are_taken()
        assert 3 <= len(touched) <= 40 / 8
        patch.undo()
        engine.drain()


def test_of_very_many_short_requests_a_part_is_looked_up(tmp_path: Path) -> None:
    with engine_of(tmp_path, Setting(step_tokens=BLOCK_TOKENS, seats=1)) as engine:
        for number in range(1200):
            engine.ask_for([3 + number % 900] * 3)  # shorter than a block
        looked: list[str] = []
        engine.ours._found_on_device = lambda _, request_id: looked.append(request_id) or 0
        touch_ram(engine)
        assert len(looked) == 1024
        assert engine.ours.waiting is not None


def test_a_bug_in_what_is_stored_lets_vllm_store_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVDiskTieringConnector, "_beside_what_waits", broken)
    with engine_of(tmp_path, Setting(ram_rows=4 * CHUNKS)) as engine:
        request = engine.ask(1, CHUNKS * BLOCK_TOKENS, 1)
        engine.drain()
        assert engine.ours.waiting is None
        assert in_ram(engine, request) == CHUNKS


@pytest.mark.parametrize("method", ["wait_for_room", "allow", "settled", "arrived", "gone"])
def test_a_bug_in_what_a_request_may_have_is_a_miss(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the end of the engine."""
    prompt = [7] * CHUNKS * BLOCK_TOKENS
    with engine_of(tmp_path, Setting(mode="off" if method == "wait_for_room" else "on")) as engine:
        engine.ask_for(prompt)
        engine.drain()
        for number in range(9):
            engine.ask(number, CHUNKS * BLOCK_TOKENS, 1)
        engine.drain()
        monkeypatch.setattr(engine.tier.allowances, method, broken)
        again = engine.ask_for(prompt)
        engine.drain()
        assert again.is_finished()
        assert engine.tier.broken
        monkeypatch.undo()
        for request_id in [*engine.tier.allowances._requests]:
            engine.tier.allowances.gone(request_id)
