"""What lies below vLLM's RAM tier, driven by vLLM's own scheduler with whatever can go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from kvdisk.testing import Faults
from tests.serving.vllm.below_ram import MOVES, Engine, Setting, engine_of

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
