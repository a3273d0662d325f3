"""What lies below vLLM's RAM tier, driven by vLLM's own scheduler with whatever can go wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from kvdisk.serving.vllm.connector import KVDiskConnector
from kvdisk.serving.vllm.sessions import SessionsLeftOut
from kvdisk.serving.vllm.tiering_connector import KVDiskTieringConnector
from kvdisk.testing import Faults
from tests.serving.vllm.below_ram import BLOCK_TOKENS, MOVES, Engine, Setting, engine_of

pytestmark = pytest.mark.quick

FAULTS = (
    Faults(),
    Faults(delay=0.5),
    Faults(delay=0.9),
    Faults(delay=1.0),
    Faults(timeout=0.3, delay=0.5),
    Faults(load_error=0.3, store_error=0.3, delay=0.3),
    Faults(bit_flip=0.1, lost=0.1, misdirected=0.1, delay=0.5),
)
SETTINGS = (
    Setting(1, ram_rows=4, slots=64),
    Setting(2, ram_rows=12, prefixes=4, seats=16),
    Setting(3, ram_rows=32, gpu_blocks=28, prefixes=2, mode="auto"),
    Setting(4, ram_rows=16, prompt_chunks=12, mode="off"),
    Setting(5, blocks_per_chunk=3, ram_rows=24, gpu_blocks=40),
    Setting(6, kinds="ff", ram_rows=24, gpu_blocks=40),
    Setting(7, kinds="fs", ram_rows=32, gpu_blocks=64, mode="auto"),
    Setting(8, kinds="Fs", ram_rows=48, gpu_blocks=64, seats=4),
)
REQUESTS = 150
STEPS_MAX = 40 * REQUESTS


def disturb(engine: Engine) -> None:
    """A fault of the disk, a rate that is none, an abort, a reset: each now and then."""
    chance = engine.chance
    if chance.random() < 0.03:
        engine.disk.faults = chance.choice(FAULTS)
    if chance.random() < 0.02:
        rate, age_s = chance.choice((0.0, 1e3, 1e6, 1e9)), chance.choice((0, 90, 1000))
        engine.ours.planner.measured_loads(rate, engine.clock.now_s - age_s)
    if chance.random() < 0.03 and engine.requests:
        engine.abort(chance.choice(list(engine.requests)))
    if chance.random() < 0.002:
        engine.reset()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_request_is_served_and_nothing_is_left_over(tmp_path: Path, setting: Setting) -> None:
    """Rows have their keys' bytes, or the driver's worker says so."""
    with engine_of(tmp_path, setting) as engine:
        chance = engine.chance
        for _ in range(STEPS_MAX):
            if engine.count < REQUESTS:
                disturb(engine)
                while len(engine.requests) < chance.choice((2, 8, 20)):
                    tokens = chance.randrange(1, 16 * setting.prompt_chunks + 8)
                    engine.ask(chance.randrange(setting.prefixes), tokens, chance.choice((1, 2, 9)))
            else:
                engine.disk.faults = Faults()
            engine.step(chance.choice((0.1, 0.5, 1.0)), chance.choice((1e-4, 0.02, 0.5)))
            engine.check()
            if engine.idle:
                break
        assert engine.idle, f"{engine.requests} after {STEPS_MAX} steps"
        assert MOVES.stored
        if setting.mode == "off":  # else the planner may find that nothing is worth a load
            assert MOVES.loaded
            assert engine.tier._tier.stats().counters.blocks_loaded
        assert engine.leftovers() == {}


def test_what_a_request_has_taken_is_room_for_others_while_it_runs(tmp_path: Path) -> None:
    tokens = 8 * BLOCK_TOKENS
    with engine_of(tmp_path, Setting(ram_rows=32, gpu_blocks=200)) as engine:
        engine.chance.random = lambda: 1.0  # type: ignore[method-assign]
        for prefix in range(6):
            engine.ask(prefix, tokens, 1)
            engine.drain()
        engine.scheduler.kv_cache_manager.reset_prefix_cache()
        allowances = engine.tier.allowances
        room_tokens = allowances.room_tokens
        left: list[float] = []
        request = engine.ask(0, tokens, 50)
        while not request.num_output_tokens:
            engine.step(moves_end=2.0)
            left.append(allowances.room_tokens)
        assert min(left) < room_tokens, "something was allowed"
        assert left[-1] == room_tokens
        engine.drain()


def session(engine: Engine, turns: int) -> None:
    """Each brings five blocks and is answered; the first is what another has asked before."""
    for turn in range(turns):
        prompt = [3 + 100 * turn + number for number in range(5 * BLOCK_TOKENS)]
        engine.ask_for(prompt, 17, "session", resumable=True)
        for _ in range(25):
            engine.step(moves_end=2.0)


def test_of_a_prompt_that_grows_nothing_is_stored_or_loaded(tmp_path: Path) -> None:
    """Found by an attack: in its second turn vLLM's connector took one block for another."""
    with engine_of(tmp_path, Setting(ram_rows=64)) as engine:
        engine.ask_for([3 + number for number in range(5 * BLOCK_TOKENS)])
        engine.drain()
        engine.scheduler.kv_cache_manager.reset_prefix_cache()
        stored = MOVES.stored
        session(engine, 3)
        (blocks,) = engine.scheduler.kv_cache_manager.get_blocks("session").blocks
        (state,) = engine.half._req_status["session"].group_states
        assert state.block_ids == [block.block_id for block in blocks]
        engine.ask_for([], 1, "session")  # no more of it
        engine.drain()
        assert (MOVES.stored, MOVES.loaded) == (stored, 0)
        assert engine.leftovers() == {}


@pytest.mark.parametrize("connector", [KVDiskConnector, KVDiskTieringConnector])
def test_neither_connector_knows_a_prompt_that_grows(connector: type) -> None:
    made: Any = object.__new__(connector)
    states = {name: SimpleNamespace(max_load_tokens=None) for name in ("session", "other")}
    made.connector_scheduler = SimpleNamespace(
        _req_status=states, on_new_request=lambda request: None
    )
    for name in states:
        request = SimpleNamespace(
            request_id=name,
            resumable=name == "session",
            skip_reading_prefix_cache=False,
            block_hashes=[],
            num_tokens=1,
        )
        made.on_new_request(request)
    assert vars(states["session"]) == {"max_load_tokens": 0, "max_offload_tokens": 0}
    assert vars(states["other"]) == {"max_load_tokens": None}


def test_what_vllm_calls_new_comes_with_all_of_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SessionsLeftOut, "on_new_request")
    with engine_of(tmp_path, Setting(ram_rows=64)) as engine:
        session(engine, 3)
        assert MOVES.stored >= 15, "each the right block's, or the driver says so"
        engine.abort("session")
        engine.drain()
